"""Kimi Delta Attention: sizes, tensors, states."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import Shapes, StateSize


@dataclass(frozen=True, slots=True)
class KdaPart:
    """A delta rule with one gate per key channel (arXiv 2510.26692); keys and values have the same
    heads.

    decay, gate: the matrices, by name and in order, whose product gives the raw decay and the
    output gate; of two, the first leaves head_dim numbers. positive_a: `ssm_a` holds exp(A_log) in
    place of -exp(A_log). flat_a: it is a vector, not a column. bound: of the log decay, see
    kernels.recurrence.channel_gates.
    """

    n_heads: int
    head_dim: int
    d_conv: int
    decay: tuple[str, ...]
    gate: tuple[str, ...]
    positive_a: bool = False
    flat_a: bool = False
    bound: float | None = None

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "kda"

    @property
    def width(self) -> int:
        """Channels of all heads: of queries, of keys and of values alike."""
        return self.n_heads * self.head_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        width = self.width
        rows = (
            {"attn_qkv.weight": (3 * width, n_embd)}
            if "attn_qkv.weight" in present
            else {f"attn_{one}.weight": (width, n_embd) for one in "qkv"}
        )
        return {
            **rows,
            **{f"ssm_conv1d_{one}.weight": (width, 1, self.d_conv) for one in "qkv"},
            **self._product(self.decay, n_embd),
            **self._product(self.gate, n_embd),
            "ssm_dt.bias": (width,),
            "ssm_a": (self.n_heads,) if self.flat_a else (self.n_heads, 1),
            "ssm_beta.weight": (self.n_heads, n_embd),
            "ssm_norm.weight": (self.head_dim,),
            "attn_output.weight": (n_embd, width),
        }

    def states(self) -> Mapping[str, StateSize]:
        """See engine.model.parts.MixerPart. The windows of queries, keys and values are one."""
        of_heads = (self.n_heads, self.head_dim)
        state = StateSize((*of_heads, self.head_dim), (of_heads,) * 3)
        channels = 3 * self.width
        return {
            "state": state,
            "window": StateSize((self.d_conv - 1, channels), ((channels,),), is_window=True),
        }

    def cells(self) -> None:
        """None."""
        return None

    def _product(self, names: tuple[str, ...], n_embd: int) -> Shapes:
        if len(names) == 1:
            return {names[0]: (self.width, n_embd)}
        first, second = names
        return {first: (self.head_dim, n_embd), second: (self.width, self.head_dim)}
