"""Block-sparse attention: an indexer chooses the blocks of tokens that a query looks at (QSA)."""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.memory import AttentionView
from engine.model.mixers.attention import Attention
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts import CellRow
from engine.model.parts.sparse_attention import INDEX_ROW, SparseAttentionPart
from engine.model.weights import Weights
from kernels.attention.block_choice import Indexer, choose_blocks
from kernels.norm import rms_norm
from kernels.rope import apply_rope


class SparseAttention(Attention):
    """Attention of which each query sees the best n_blocks of the blocks before it, as the indexer
    scores them, and the tokens behind the last whole block.

    A block is `ratio` tokens by position; its key is the mean of theirs, normed and roped as its
    first token. The indexer stays f32 in every compute mode: rounding there flips choices.
    """

    def __init__(
        self, part: SparseAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        super().__init__(part, weights, config, layer)
        self._part, self._eps = part, config.eps
        self._row = CellRow(layer, INDEX_ROW)
        rows = [weights.numbers(f"indexer.{name}_proj.weight") for name in ("q", "k")]
        self._index = weights.stack(rows, compute="f32")
        self._index_sizes = [part.n_index_head * part.index_dim, part.index_dim]
        self._index_norms = [weights.keep(f"indexer.{name}_norm.weight") for name in ("q", "k")]
        self._indexer = Indexer(part.ratio, part.n_blocks, config.eps)

    def _visible(
        self, x: torch.Tensor, cells: AttentionView, around: RopeAndMemory
    ) -> torch.Tensor:
        part = self._part
        if not part.ratio:
            return cells.mask
        q, k = self._index(x, invariant=around.invariant).split_with_sizes(self._index_sizes, -1)
        held = around.memory.attention.update(self._row, k.unsqueeze(2))
        assert held.positions is not None
        assert around.table is not None
        if held.mask.shape[2] // part.ratio <= part.n_blocks:
            return cells.mask  # no query has more blocks to choose from
        q = q.view(*x.shape[:2], part.n_index_head, part.index_dim)
        q = apply_rope(rms_norm(q, self._index_norms[0], self._eps), around.cos, around.sin)
        return choose_blocks(
            q,
            held.k[:, 0],
            held.positions,
            cells.mask,
            self._index_norms[1],
            around.table,
            self._indexer,
            invariant=around.invariant,
        )
