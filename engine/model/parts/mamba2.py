"""Mamba-2: sizes, tensors, states."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import Shapes, StateSize, only_present


@dataclass(frozen=True, slots=True)
class Mamba2Part:
    """Mamba-2 block: n_heads heads of head_dim channels, states of d_state numbers a channel.

    Head h reads and writes with group h // (n_heads / n_groups). normed: a norm of every group's
    channels stands behind the gate; where it may be missing, the file says.
    """

    d_conv: int
    d_state: int
    n_heads: int
    head_dim: int
    n_groups: int
    normed: bool = True

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "mamba-2"

    @property
    def d_inner(self) -> int:
        """Channels of all heads."""
        return self.n_heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Numbers that all groups write with, and as many that they read with."""
        return self.n_groups * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels that pass the short convolution: those of the heads, B and C."""
        return self.d_inner + 2 * self.group_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        inner = self.d_inner
        shapes: Shapes = {
            "ssm_in.weight": (inner + self.conv_dim + self.n_heads, n_embd),
            "ssm_conv1d.weight": (self.conv_dim, self.d_conv),
            "ssm_dt.bias": (self.n_heads,),
            "ssm_a": (self.n_heads, 1),
            "ssm_d": (self.n_heads, 1),
            "ssm_out.weight": (n_embd, inner),
        }
        if self.normed:
            shapes["ssm_norm.weight"] = (self.n_groups, inner // self.n_groups)
        return shapes | only_present({"ssm_conv1d.bias": (self.conv_dim,)}, present)

    def states(self) -> Mapping[str, StateSize]:
        """S of every head, logged as dt x, B and g; and the convolution's window."""
        heads = self.n_heads, self.head_dim
        entry = heads, (self.n_groups, self.d_state), (self.n_heads,)
        window = (self.d_conv - 1, self.conv_dim)
        return {
            "state": StateSize((*heads, self.d_state), entry),
            "window": StateSize(window, ((self.conv_dim,),), is_window=True),
        }

    def cells(self) -> None:
        """None."""
