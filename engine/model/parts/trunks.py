"""Trunks other than one residual stream: sizes and tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.model.parts import Shapes
from engine.model.parts.ngram_embedding import TABLE, NgramEmbeddingPart


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """Hyper-connections (Zhu et al., arXiv 2409.19606) as qwen4exp has them.

    n_streams residual streams; mixers of this rank read from all of them and write to all.

    ngrams: the part whose table is one of the tensors outside the blocks.
    """

    n_streams: int
    rank: int
    ngrams: NgramEmbeddingPart | None = None

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.TrunkPart."""
        table = {TABLE: self.ngrams.table_shape()} if self.ngrams else {}
        return self._mixer("output_hc", n_embd) | table

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.TrunkPart."""
        shapes: Shapes = {}
        for name in ("hc_attn", "hc_ffn"):
            shapes |= self._mixer(name, n_embd)
            shapes[f"{name}_inject.weight"] = (self.n_streams, self.n_streams * n_embd)
        return shapes

    def _mixer(self, name: str, n_embd: int) -> Shapes:
        width = self.n_streams * n_embd
        return {
            f"{name}_norm.weight": (self.n_streams, n_embd),
            f"{name}_down.weight": (self.rank, width),
            f"{name}_up.weight": (width, self.rank),
        }


@dataclass(frozen=True, slots=True)
class CrossLayerResidual:
    """Every half of a block reads a mixture of the stream and of its values at the starts of
    groups of `group` layers, each of which begins a stream of its own (kimi-k3)."""

    group: int

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.TrunkPart."""
        return {"output_res_score.weight": (n_embd,)}

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.TrunkPart."""
        return {"attn_res_score.weight": (n_embd,), "ffn_res_score.weight": (n_embd,)}
