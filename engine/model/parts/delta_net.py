"""Gated DeltaNet: sizes, tensors, states."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import Shapes, StateSize


@dataclass(frozen=True, slots=True)
class DeltaNetPart:
    """Gated DeltaNet block: d_state is the key and the value head dimension.

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    joint_gates: beta and decay are one tensor, interleaved by key head, and queries, keys, values
    and output gates may be one too (qwen3next). sigmoid_gate: of the output, else silu.
    """

    d_conv: int
    d_state: int
    n_k_heads: int
    n_v_heads: int
    grouped: bool = False
    joint_gates: bool = False
    sigmoid_gate: bool = False

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "delta net"

    @property
    def key_dim(self) -> int:
        """Channels of all query heads, equal to those of all key heads."""
        return self.n_k_heads * self.d_state

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.n_v_heads * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels that pass the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        n_v = self.n_v_heads
        shapes: Shapes = {
            "ssm_conv1d.weight": (self.conv_dim, self.d_conv),
            "ssm_dt.bias": (n_v,),
            "ssm_a": (n_v,),
            "ssm_norm.weight": (self.d_state,),
            "ssm_out.weight": (n_embd, self.value_dim),
        }
        if self.joint_gates:
            shapes["ssm_ba.weight"] = (2 * n_v, n_embd)
        else:
            shapes |= {"ssm_alpha.weight": (n_v, n_embd), "ssm_beta.weight": (n_v, n_embd)}
        if self.joint_gates and "ssm_in.weight" in present:
            return shapes | {"ssm_in.weight": (self.conv_dim + self.value_dim, n_embd)}
        return shapes | {
            "attn_qkv.weight": (self.conv_dim, n_embd),
            "attn_gate.weight": (self.value_dim, n_embd),
        }

    def states(self) -> Mapping[str, StateSize]:
        """S of every value head, logged as k, u and g; and the convolution's window."""
        d = self.d_state
        entry = (self.n_k_heads, d), (self.n_v_heads, d), (self.n_v_heads,)
        window = (self.d_conv - 1, self.conv_dim)
        return {
            "state": StateSize((self.n_v_heads, d, d), entry),
            "window": StateSize(window, ((self.conv_dim,),), is_window=True),
        }

    def cells(self) -> None:
        """None."""
