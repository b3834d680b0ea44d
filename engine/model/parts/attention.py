"""Full attention: sizes, tensors, cells."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import CellSize, Shapes, StateSize, only_present


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Grouped-query attention.

    gated: the query projection holds an output gate for every head behind its queries. normed:
    queries and keys are normed per head. rope: which numbers of a head turn as a pair, "halves"
    (x[j], x[j + n/2]) or "pairs" (x[2j], x[2j + 1]), or "none". scale: of the products of queries
    and keys, 1 / sqrt(head_dim) if None. window: tokens back that are looked at, the token itself
    included; None for all. output_bias: the file may have a bias behind the output projection.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    gated: bool
    normed: bool = True
    rope: str = "halves"
    scale: float | None = None
    window: int | None = None
    output_bias: bool = False

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "attention"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        hd = self.head_dim
        n_q, n_kv = self.n_head * hd * (2 if self.gated else 1), self.n_head_kv * hd
        rows = (
            {"attn_qkv": n_q + 2 * n_kv}
            if "attn_qkv.weight" in present
            else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
        )
        biased = {**rows, "attn_output": n_embd} if self.output_bias else rows
        biases = {f"{name}.bias": (n,) for name, n in biased.items()}
        norms = dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (hd,))
        return {
            **{f"{name}.weight": (n, n_embd) for name, n in rows.items()},
            **only_present(biases, present),
            **(norms if self.normed else {}),
            "attn_output.weight": (n_embd, self.n_head * hd),
        }

    def states(self) -> Mapping[str, StateSize]:
        """None."""
        return {}

    def cells(self) -> CellSize:
        """See engine.model.parts.MixerPart."""
        return CellSize(self.n_head_kv, self.head_dim, self.head_dim, self.window)
