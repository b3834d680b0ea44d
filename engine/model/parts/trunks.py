"""Trunks other than one residual stream: sizes and tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from engine.model.parts import Shapes, TrunkPart
from engine.model.parts.recurrent import TABLE, NgramEmbeddingPart


@dataclass(frozen=True, slots=True)
class HyperConnections(TrunkPart):
    """Hyper-connections (Zhu et al., arXiv 2409.19606) as in qwen4exp.

    n_streams residual streams; mixers of this rank read from all of them and add to all. ngrams:
    the part whose table is one of the tensors outside the blocks.
    """

    n_streams: int
    rank: int
    ngrams: NgramEmbeddingPart | None = None

    @property
    def tapped(self) -> bool:
        return False

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        table = {TABLE: self.ngrams.table_shape()} if self.ngrams else {}
        return self._mixer("output_hc", n_embd) | table

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        shapes: Shapes = {}
        for name in ("hc_attn", "hc_ffn"):
            shapes |= self._mixer(name, n_embd)
            shapes[f"{name}_inject.weight"] = (self.n_streams, self.n_streams * n_embd)
        return shapes

    @property
    def n_handed(self) -> int:
        return self.n_streams

    def mtp_shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.TrunkPart: a block like the others, with a final mixer of its own
        and a norm for each stream that it gets."""
        norm = {"nextn.hnorm.weight": (self.n_streams, n_embd)}
        return self.block_shapes(0, n_embd, present) | self._mixer("nextn.hc_head", n_embd) | norm

    def _mixer(self, name: str, n_embd: int) -> Shapes:
        width = self.n_streams * n_embd
        return {
            f"{name}_norm.weight": (self.n_streams, n_embd),
            f"{name}_down.weight": (self.rank, width),
            f"{name}_up.weight": (width, self.rank),
        }


@dataclass(frozen=True, slots=True)
class SinkhornConnections(TrunkPart):
    """Hyper-connections of four streams whose matrix between streams is made doubly stochastic
    (mHC, arXiv 2512.24880), as in glm5-next and deepseek4.

    n_rounds, eps: see kernels.rows.streams.stream_gates. has_head: whether final gates weight the
    streams, else their mean is used; with them the MTP block gets the raw streams and has the
    tensors of a trunk block.
    """

    n_rounds: int
    eps: float
    has_head: bool = False
    n_streams: ClassVar[int] = 4

    @property
    def n_handed(self) -> int:
        return self.n_streams if self.has_head else 1

    @property
    def tapped(self) -> bool:
        """See engine.model.parts.TrunkPart: llama.cpp gives drafters the mean of deepseek4's
        streams, and nothing of glm5-next's."""
        return self.has_head

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        return self._gates("output_hc", n_embd, self.n_streams, 1) if self.has_head else {}

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        n = self.n_streams * (self.n_streams + 2)
        return self._gates("hc_attn", n_embd, n, 3) | self._gates("hc_ffn", n_embd, n, 3)

    def mtp_shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        return self.block_shapes(0, n_embd, present) if self.has_head else {}

    def _gates(self, name: str, n_embd: int, n: int, n_scales: int) -> Shapes:
        return {
            f"{name}_fn.weight": (n, self.n_streams * n_embd),
            f"{name}_base.weight": (n,),
            f"{name}_scale.weight": (n_scales,),
        }


@dataclass(frozen=True, slots=True)
class CrossLayerResidual(TrunkPart):
    """Every half of a block reads a mixture of the stream and of the streams' values at the starts
    of groups of `group` layers, each of which starts a new stream (kimi-k3)."""

    group: int

    @property
    def tapped(self) -> bool:
        return False

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        return {"output_res_score.weight": (n_embd,)}

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        return {"attn_res_score.weight": (n_embd,), "ffn_res_score.weight": (n_embd,)}
