"""Feed-forward parts: sizes and tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.model.parts import Shapes


@dataclass(frozen=True, slots=True)
class SwigluPart:
    """down(silu(gate x) * up x) of this width."""

    width: int

    def shapes(self, n_embd: int, present: Container[str], suffix: str = "") -> Shapes:
        """See engine.model.parts.FeedForwardPart. suffix: of the tensors' names."""
        return {
            f"ffn_gate{suffix}.weight": (self.width, n_embd),
            f"ffn_up{suffix}.weight": (self.width, n_embd),
            f"ffn_down{suffix}.weight": (n_embd, self.width),
        }


@dataclass(frozen=True, slots=True)
class MixturePart:
    """Mixture of experts with one always-on shared expert; n_ff and n_ff_shared are widths."""

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.FeedForwardPart."""
        n, width = self.n_experts, self.n_ff
        if "ffn_gate_up_exps.weight" in present:
            inner = {"ffn_gate_up_exps.weight": (n, 2 * width, n_embd)}
        else:
            one = (n, width, n_embd)
            inner = {"ffn_gate_exps.weight": one, "ffn_up_exps.weight": one}
        return {
            "ffn_gate_inp.weight": (n, n_embd),
            **inner,
            "ffn_down_exps.weight": (n, n_embd, width),
            "ffn_gate_inp_shexp.weight": (1, n_embd),
            **SwigluPart(self.n_ff_shared).shapes(n_embd, present, "_shexp"),
        }
