"""Block-sparse attention (QSA of qwen4exp): sizes, tensors, cells."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.model.parts import CellSize, Shapes
from engine.model.parts.attention import AttentionPart

INDEX_ROW = "index"
"""Name of the further row of a cell: the token's key of the indexer, neither normed nor roped."""


@dataclass(frozen=True, slots=True)
class SparseAttentionPart(AttentionPart):
    """Attention whose queries see the blocks of tokens that an indexer chooses, and the tail.

    ratio: tokens of a block; 0 for no choice, where the indexer's tensors lie idle. n_blocks: how
    many are chosen. n_index_head, index_dim: heads of the indexer's queries, and their length.
    """

    n_index_head: int = 1
    index_dim: int = 1
    ratio: int = 0
    n_blocks: int = 0

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "sparse attention" if self.ratio else "attention"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        return {
            **AttentionPart.shapes(self, n_embd, present),
            "indexer.q_proj.weight": (self.n_index_head * self.index_dim, n_embd),
            "indexer.k_proj.weight": (self.index_dim, n_embd),
            "indexer.q_norm.weight": (self.index_dim,),
            "indexer.k_norm.weight": (self.index_dim,),
        }

    def cells(self) -> CellSize:
        """See engine.model.parts.MixerPart."""
        further = ((INDEX_ROW, self.index_dim),) if self.ratio else ()
        return AttentionPart.cells(self)._replace(further=further)
