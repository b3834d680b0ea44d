"""Recurrent mixers and short convolutions: sizes, tensors, states."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.model.parts import MixerPart, Shapes, StateSize, only_present


@dataclass(frozen=True, slots=True)
class DeltaNetPart(MixerPart):
    """Gated DeltaNet block: d_state is the dimension of key and value heads.

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    joint_gates: beta and decay are one tensor, interleaved by key head, and queries, keys, values
    and output gates may be one too (qwen3next). sigmoid_gate: the output gate is a sigmoid, else
    silu.
    """

    d_conv: int
    d_state: int
    n_k_heads: int
    n_v_heads: int
    grouped: bool = False
    joint_gates: bool = False
    sigmoid_gate: bool = False

    kind: ClassVar[str] = "delta net"

    @property
    def key_dim(self) -> int:
        """Channels of all query heads, and of all key heads."""
        return self.n_k_heads * self.d_state

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.n_v_heads * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
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


@dataclass(frozen=True, slots=True)
class KdaPart(MixerPart):
    """A delta rule with one gate per key channel (arXiv 2510.26692); keys and values have the same
    heads.

    decay, gate: names of the matrices, in order, whose product gives the raw decay and the output
    gate; of two, the first has head_dim rows. positive_a: `ssm_a` holds exp(A_log) instead of
    -exp(A_log). flat_a: it is a vector, not a column. bound: of the log decay, see
    kernels.recurrence.channel_gates. l2_eps: eps of the norm of queries and keys, that of the
    model's norms if None.
    """

    n_heads: int
    head_dim: int
    d_conv: int
    decay: tuple[str, ...]
    gate: tuple[str, ...]
    positive_a: bool = False
    flat_a: bool = False
    bound: float | None = None
    l2_eps: float | None = None

    kind: ClassVar[str] = "kda"

    @property
    def width(self) -> int:
        """Channels of all heads, equal for queries, keys and values."""
        return self.n_heads * self.head_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
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
        """See engine.model.parts.MixerPart. Queries, keys and values have one joint window."""
        of_heads = (self.n_heads, self.head_dim)
        state = StateSize((*of_heads, self.head_dim), (of_heads,) * 3)
        channels = 3 * self.width
        return {
            "state": state,
            "window": StateSize((self.d_conv - 1, channels), ((channels,),), is_window=True),
        }

    def _product(self, names: tuple[str, ...], n_embd: int) -> Shapes:
        if len(names) == 1:
            return {names[0]: (self.width, n_embd)}
        first, second = names
        return {first: (self.head_dim, n_embd), second: (self.width, self.head_dim)}


@dataclass(frozen=True, slots=True)
class Mamba2Part(MixerPart):
    """Mamba-2 block: n_heads heads of head_dim channels, with d_state numbers per channel.

    Head h uses B and C of group h // (n_heads / n_groups). normed: the channels of every group are
    normed after the gate; if optional, the file determines it.
    """

    d_conv: int
    d_state: int
    n_heads: int
    head_dim: int
    n_groups: int
    normed: bool = True

    kind: ClassVar[str] = "mamba-2"

    @property
    def d_inner(self) -> int:
        """Channels of all heads."""
        return self.n_heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Size of B, and of C, over all groups."""
        return self.n_groups * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: those of the heads, B and C."""
        return self.d_inner + 2 * self.group_dim

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
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


@dataclass(frozen=True, slots=True)
class LowRankMamba2Part(Mamba2Part):
    """Mamba-2 block whose steps, B and C are projected from the convolved channels, each normed,
    and shared by all heads (PLaMo 2). step_rank: width of the steps before their second
    projection."""

    step_rank: int = 1

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: those of the heads."""
        return self.d_inner

    @property
    def sizes(self) -> dict[str, int]:
        """Widths of B, C and steps, by the names of their norms."""
        n = self.d_state
        return {"ssm_b_norm": n, "ssm_c_norm": n, "ssm_dt_norm": self.step_rank}

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        inner, n_heads = self.d_inner, (self.n_heads,)
        return {
            "ssm_in.weight": (2 * inner, n_embd),
            "ssm_conv1d.weight": (inner, self.d_conv),
            "ssm_x.weight": (sum(self.sizes.values()), inner),
            "ssm_dt.weight": (*n_heads, self.step_rank),
            **dict.fromkeys(("ssm_dt.bias", "ssm_a", "ssm_d"), n_heads),
            "ssm_out.weight": (n_embd, inner),
            **{name: (n,) for name, n in self.sizes.items()},
        }


@dataclass(frozen=True, slots=True)
class MambaPart(MixerPart):
    """Mamba block: d_inner channels, each with d_state numbers and its own decays.

    Steps, B and C are projected from the convolved channels; step_rank: width of the steps before
    their second projection. normed: RMS norms follow, with weights if the file has them.
    """

    d_conv: int
    d_state: int
    d_inner: int
    step_rank: int
    normed: bool = False

    kind: ClassVar[str] = "mamba"

    @property
    def sizes(self) -> dict[str, int]:
        """Widths of steps, B and C, by the prefixes of their norms' names."""
        return {
            "ssm_dt_norm": self.step_rank,
            "ssm_b_norm": self.d_state,
            "ssm_c_norm": self.d_state,
        }

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        inner = self.d_inner
        norms = {f"{name}.weight": (n,) for name, n in self.sizes.items()}
        return {
            "ssm_in.weight": (2 * inner, n_embd),
            "ssm_conv1d.weight": (inner, self.d_conv),
            "ssm_conv1d.bias": (inner,),
            "ssm_x.weight": (sum(self.sizes.values()), inner),
            "ssm_dt.weight": (inner, self.step_rank),
            "ssm_dt.bias": (inner,),
            "ssm_a": (inner, self.d_state),
            "ssm_d": (inner,),
            "ssm_out.weight": (n_embd, inner),
            **(only_present(norms, present) if self.normed else {}),
        }

    def states(self) -> Mapping[str, StateSize]:
        """S of every channel, logged whole because decays differ; and the convolution's window."""
        state = self.d_state, self.d_inner
        window = (self.d_conv - 1, self.d_inner)
        return {
            "state": StateSize(state, (state,)),
            "window": StateSize(window, ((self.d_inner,),), is_window=True),
        }


@dataclass(frozen=True, slots=True)
class ShortConvPart(MixerPart):
    """Short convolution of n_channels, the model's width, between two gates (LFM2)."""

    d_conv: int
    n_channels: int

    kind: ClassVar[str] = "short convolution"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        return {
            "shortconv.in_proj.weight": (3 * n_embd, n_embd),
            "shortconv.conv.weight": (n_embd, self.d_conv),
            "shortconv.out_proj.weight": (n_embd, n_embd),
        }

    def states(self) -> Mapping[str, StateSize]:
        """The last inputs of the convolution, which are the whole state."""
        window = (self.d_conv - 1, self.n_channels)
        return {"window": StateSize(window, ((self.n_channels,),), is_window=True)}


TABLE = "per_layer_token_embd.weight"
"""The table of n-gram rows, larger than all other tensors: it stays in the file."""


@dataclass(frozen=True, slots=True)
class NgramEmbeddingPart(MixerPart):
    """Table rows for the n-grams that end at a token, for n from 2 to n_gram, several per n
    (heads).

    multipliers: n_gram factors of the hash. sizes, offsets: row range of each head, ordered by n.
    end_id: a token after which n-grams start anew. n_streams: streams it is added to. d_conv: taps
    of the convolution after it, n_gram tokens apart. n_rows: of the table.
    """

    n_gram: int
    d_conv: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end_id: int
    n_streams: int
    n_embd: int
    n_rows: int

    kind: ClassVar[str] = "n-gram embedding"

    @property
    def n_taps(self) -> int:
        """Taps of the convolution including the zero ones between the d_conv."""
        return (self.d_conv - 1) * self.n_gram + 1

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: all streams."""
        return self.n_streams * self.n_embd

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        each = (self.n_streams, n_embd)
        return {
            "ple_key.weight": (self.n_channels, n_embd),
            "ple_value.weight": (n_embd, n_embd),
            "ple_norm_key.weight": each,
            "ple_norm_query.weight": each,
            "ple_norm_conv.weight": each,
            "ple_conv1d.weight": (self.n_channels, self.d_conv),
        }

    def table_shape(self) -> tuple[int, int]:
        """Shape of the tensor TABLE."""
        return self.n_rows, self.n_embd // len(self.sizes)

    def states(self) -> Mapping[str, StateSize]:
        """The last tokens, and the convolution's window."""
        row = (self.n_channels,)
        return {
            "tokens": StateSize((self.n_gram - 1, 1), ((1,),), is_window=True),
            "ngrams": StateSize((self.n_taps - 1, *row), (row,), is_window=True),
        }
