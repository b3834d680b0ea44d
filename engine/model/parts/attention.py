"""Full attention: sizes, tensors, cells."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import CellSize, Shapes, StateSize, only_present


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Grouped-query attention with per-head norms of queries and keys, roped.

    gated: the query projection holds an output gate for every head behind its queries.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    gated: bool

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
        return {
            **{f"{name}.weight": (n, n_embd) for name, n in rows.items()},
            **only_present({f"{name}.bias": (n,) for name, n in rows.items()}, present),
            "attn_q_norm.weight": (hd,),
            "attn_k_norm.weight": (hd,),
            "attn_output.weight": (n_embd, self.n_head * hd),
        }

    def states(self) -> Mapping[str, StateSize]:
        """None."""
        return {}

    def cells(self) -> CellSize:
        """See engine.model.parts.MixerPart."""
        return CellSize(self.n_head_kv, self.head_dim, self.head_dim)
