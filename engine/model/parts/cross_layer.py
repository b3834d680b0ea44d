"""Cross-layer residual attention: the tensors of its scores."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.model.parts import Shapes


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
