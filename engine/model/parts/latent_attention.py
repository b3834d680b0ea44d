"""Multi-head latent attention: sizes, tensors, cells."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from engine.model.parts import CellSize, Shapes, StateSize


@dataclass(frozen=True, slots=True)
class LatentAttentionPart:
    """Attention of all heads to one latent row per token (DeepSeek-V2, arXiv 2405.04434), with the
    matrices between latent and heads absorbed into queries and outputs.

    n_latent: numbers of the latent. n_nope, n_rope: those of a query head that meet the latent and
    those that meet the key that all heads share. v_dim: of a head's output. q_rank: width of the
    queries' own bottleneck, None without one. pairs: how that shared key is rotated, None if it is
    not. gate: sigmoid gates of the output, one per head or per number.
    """

    n_head: int
    n_latent: int
    n_nope: int
    n_rope: int
    v_dim: int
    q_rank: int | None = None
    pairs: Literal["neighbours", "halves"] | None = None
    gate: Literal["heads", "numbers"] | None = None

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "latent attention"

    @property
    def n_gates(self) -> int:
        """Rows of the output gate."""
        return {None: 0, "heads": self.n_head, "numbers": self.n_head * self.v_dim}[self.gate]

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        n_q, n_head = self.n_head * (self.n_nope + self.n_rope), self.n_head
        queries: Shapes = {"attn_q.weight": (n_q, n_embd)}
        if self.q_rank is not None:
            queries = {
                "attn_q_a.weight": (self.q_rank, n_embd),
                "attn_q_a_norm.weight": (self.q_rank,),
                "attn_q_b.weight": (n_q, self.q_rank),
            }
        return {
            **queries,
            "attn_kv_a_mqa.weight": (self.n_latent + self.n_rope, n_embd),
            "attn_kv_a_norm.weight": (self.n_latent,),
            "attn_k_b.weight": (n_head, self.n_latent, self.n_nope),
            "attn_v_b.weight": (n_head, self.v_dim, self.n_latent),
            "attn_output.weight": (n_embd, n_head * self.v_dim),
            **({"attn_gate.weight": (self.n_gates, n_embd)} if self.gate else {}),
        }

    def states(self) -> Mapping[str, StateSize]:
        """None."""
        return {}

    def cells(self) -> CellSize:
        """See engine.model.parts.MixerPart: the latent is key and value, stored once."""
        return CellSize(1, self.n_latent + self.n_rope, 0, first_turned=self.n_latent)
