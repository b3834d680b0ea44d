"""Recurrent mixers: Gated DeltaNet, Kimi Delta Attention, Mamba, Mamba-2, short convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.memory import Mixer, RopeAndMemory
from engine.model.parts.recurrent import (
    DeltaNetPart,
    KdaPart,
    LowRankMamba2Part,
    Mamba2Part,
    MambaPart,
    ShortConvPart,
)
from engine.model.recurrence import ConvInputs, StateKey
from engine.model.recurrent_states import DeltaInputs, ScanInputs, SsdInputs
from engine.model.weights import MatrixRows, Projection, Weights, project_each
from kernels.dispatch import runs_triton
from kernels.linear import linear_of_columns, operation_rows
from kernels.linear.block_parts import Residual, Rows
from kernels.norm import gated_rms_norm_rows, group_rms_norm_rows, rms_norm
from kernels.pointwise import multiply, step_gates, swiglu


class _RecurrentMixer(Mixer):
    """A mixer of trunk layer `layer` with state and window in the memory. conv: taps [C,
    d_conv]."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        inputs: list[Projection],
        conv: Tensor,
        output: str,
    ) -> None:
        self._state, self._window = StateKey(layer, "state"), StateKey(layer, "window")
        self._eps, self._input, self._inputs = config.eps, inputs[0], inputs
        self.reads = tuple(each.packed for each in inputs)
        # taps as rows in memory, as the convolution reads them
        self._conv = conv.t().contiguous().t()
        self._output = weights.project(output)


class _DeltaRule(_RecurrentMixer):
    """Mixers with a gated delta rule: everything between input and output projections."""

    _bound: float | None = None
    _sigmoid: bool = True
    _qkv_sizes: list[int]

    def __init__(self, weights: Weights, *base: Any) -> None:
        super().__init__(weights, *base)
        self._l2_eps = self._eps
        self._dt = weights.keep("ssm_dt.bias")
        self._norm = weights.keep("ssm_norm.weight")

    def _advance(
        self,
        around: RopeAndMemory,
        channels: Tensor,
        decay: Tensor,
        a: Tensor,
        beta: Tensor,
        gate: Tensor,
        residual: Residual | None,
    ) -> Tensor:
        """channels: raw queries, keys and values; decay: see DeltaInputs.g, with its factor `a`;
        beta and gate: raw. On a GPU the recurrence applies norms and gates."""
        memory = around.recurrent
        heads, invariant = (*gate.shape[:2], -1, self._norm.shape[0]), around.invariant
        convolved = memory.advance(self._window, ConvInputs(channels, self._conv))
        qk, v = (x.view(heads) for x in convolved.split_with_sizes(self._qkv_sizes, -1))
        inputs = DeltaInputs(qk, qk, v, decay, beta, (self._l2_eps, self._dt, a, self._bound))
        if not runs_triton(qk):
            inputs = inputs.finished(invariant=invariant)
        rows = gated_rms_norm_rows(
            memory.advance(self._state, inputs),
            gate.view(heads),
            self._norm,
            self._eps,
            reads=(self._output.packed,),
            sigmoid=self._sigmoid,
            invariant=invariant,
        )
        return self._output(rows, invariant=invariant, residual=residual)


class DeltaNet(_DeltaRule):
    """Gated DeltaNet (Yang et al., 2024): short convolution, gated delta rule, gated norm.

    One projection gives, in this order of rows, queries, keys, values (the convolved channels), the
    output gate z, and the raw beta and decay. In reduced compute modes the last two, small and fed
    back through the state at every token, are a separate projection in f32.
    """

    def __init__(
        self, part: DeltaNetPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        qkv_z = _qkv_and_z(weights, part)
        gates = _beta_and_decay(weights, part)
        if weights.compute == "f32":
            inputs = [weights.stack([*qkv_z, *gates])]
        else:
            inputs = [weights.stack(qkv_z), weights.stack(gates, compute="f32")]
        conv = weights.keep("ssm_conv1d.weight")
        super().__init__(weights, config, layer, inputs, conv, "ssm_out.weight")
        self._sigmoid = part.sigmoid_gate
        self._sizes = [part.conv_dim, part.value_dim, part.n_v_heads, part.n_v_heads]
        self._qkv_sizes = [2 * part.key_dim, part.value_dim]
        self._a = weights.keep("ssm_a")

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        joined, *gates = project_each(x, self._inputs, invariant=around.invariant)
        if gates:
            channels, z = joined.split_with_sizes(self._sizes[:2], -1)
            beta, decay = gates[0].split_with_sizes(self._sizes[2:], -1)
        else:
            channels, z, beta, decay = joined.split_with_sizes(self._sizes, -1)
        return self._advance(around, channels, decay, self._a, beta, z, residual)


def _qkv_and_z(weights: Weights, part: DeltaNetPart) -> list[MatrixRows]:
    """Stacked rows of queries, keys, values and gates."""
    if "ssm_in.weight" not in weights:
        return [weights.rows("attn_qkv.weight"), weights.rows("attn_gate.weight")]
    # the legacy tensor groups its rows by key head: q, k, then this head's values and gates
    per_head = part.value_dim // part.n_k_heads
    sizes = [part.d_state, part.d_state, per_head, per_head]

    def parts(rows: Tensor) -> list[Tensor]:
        grouped = rows.unflatten(0, (part.n_k_heads, -1))
        return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]

    return weights.rows("ssm_in.weight").rearranged(parts)


def _beta_and_decay(weights: Weights, part: DeltaNetPart) -> list[MatrixRows]:
    """Rows of beta, then rows of the decay, one per value head each."""
    if not part.joint_gates:
        return [weights.numbers("ssm_beta.weight"), weights.numbers("ssm_alpha.weight")]

    # per key head: beta of its value heads, then their decay
    def parts(rows: Tensor) -> list[Tensor]:
        grouped = rows.unflatten(0, (part.n_k_heads, 2, -1))
        return [part.flatten(0, 1) for part in grouped.unbind(1)]

    return weights.numbers("ssm_ba.weight").rearranged(parts)


class Kda(_DeltaRule):
    """Kimi Delta Attention.

    One projection gives, in this order of rows, queries, keys, values (the convolved channels) and
    the inputs of decay and output gate. Beta, small and fed back through the state at every token,
    is a separate projection in f32.
    """

    def __init__(self, part: KdaPart, weights: Weights, config: ModelConfig, layer: int) -> None:
        width = part.width
        first = [weights.rows(part.decay[0]), weights.rows(part.gate[0])]
        inputs = [
            weights.stack([*_qkv(weights), *first]),
            weights.stack([weights.numbers("ssm_beta.weight")], compute="f32"),
        ]
        taps = [weights.keep(f"ssm_conv1d_{one}.weight").squeeze(1) for one in "qkv"]
        super().__init__(weights, config, layer, inputs, torch.cat(taps), "attn_output.weight")
        self._bound = part.bound
        if part.l2_eps is not None:
            self._l2_eps = part.l2_eps
        n_decay, n_gate = (
            width if len(names) == 1 else part.head_dim for names in (part.decay, part.gate)
        )
        self._sizes = [3 * width, n_decay, n_gate]
        self._qkv_sizes = [2 * width, width]
        self._names = part.decay, part.gate
        self._second = [
            (at, weights.project(names[1]).packed)
            for at, names in zip((3 * width, 3 * width + n_decay), self._names, strict=True)
            if len(names) == 2
        ]
        a = weights.keep("ssm_a").flatten().repeat_interleave(part.head_dim)
        self._a = -a if part.positive_a else a

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        invariant = around.invariant
        (joined, beta), second = linear_of_columns(x, self.reads, self._second, invariant=invariant)
        channels, *first = joined.split_with_sizes(self._sizes, -1)
        # results of one matrix, or of two
        found = iter(second)
        decay, gate = (
            next(found) if len(names) == 2 else one
            for one, names in zip(first, self._names, strict=True)
        )
        decay = decay.view(*gate.shape[:2], -1, self._norm.shape[0])
        return self._advance(around, channels, decay, self._a, beta, gate, residual)


def _qkv(weights: Weights) -> list[MatrixRows]:
    """Rows of queries, keys and values."""
    if "attn_qkv.weight" in weights:
        return [weights.rows("attn_qkv.weight")]
    return [weights.rows(f"attn_{one}.weight") for one in "qkv"]


class Mamba(_RecurrentMixer):
    """Mamba (arXiv 2312.00752).

    The inputs of steps, B and C, small and fed back through the state at every token, stay f32 in
    every compute mode.
    """

    def __init__(self, part: MambaPart, weights: Weights, config: ModelConfig, layer: int) -> None:
        inputs, conv = [weights.project("ssm_in.weight")], weights.keep("ssm_conv1d.weight")
        super().__init__(weights, config, layer, inputs, conv, "ssm_out.weight")
        self._halves = [part.d_inner, part.d_inner]
        self._bias = weights.keep("ssm_conv1d.bias")
        self._low = weights.stack([weights.numbers("ssm_x.weight")], compute="f32")
        self._sizes = list(part.sizes.values())
        self._norms: list[Tensor] | None = None
        if part.normed:
            self._norms = [
                weights.keep(f"{name}.weight")
                if f"{name}.weight" in weights
                else torch.ones(n, device=weights.device)
                for name, n in part.sizes.items()
            ]
        self._steps = weights.stack([weights.numbers("ssm_dt.weight")], compute="f32")
        self._dt = weights.keep("ssm_dt.bias")
        self._a = weights.keep("ssm_a").t().contiguous()
        self._d = weights.keep("ssm_d")

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        memory, invariant = around.recurrent, around.invariant
        channels, z = self._input(x, invariant=invariant).split_with_sizes(self._halves, -1)
        values = memory.advance(self._window, ConvInputs(channels, self._conv, self._bias))
        low = [*self._low(values, invariant=invariant).split_with_sizes(self._sizes, -1)]
        if self._norms is not None:
            low = [rms_norm(y, w, self._eps) for y, w in zip(low, self._norms, strict=True)]
        step, B, C = low
        dt, _ = step_gates(
            self._steps(step, invariant=invariant), self._dt, self._d, invariant=invariant
        )
        out = memory.advance(self._state, ScanInputs(values, dt, self._a, B, C, self._d))
        rows = operation_rows(swiglu, (z, out), (self._output.packed,), invariant=invariant)
        return self._output(rows, invariant=invariant, residual=residual)


class Mamba2Mixer(_RecurrentMixer):
    """Mamba-2 (arXiv 2405.21060).

    One projection gives, in this order of rows, the gate z, the convolved channels (x, B, C) and
    the raw step sizes. If weights are rounded, the last, small and fed back through the state at
    every token, are a separate projection in f32.
    """

    def __init__(self, part: Mamba2Part, weights: Weights, config: ModelConfig, layer: int) -> None:
        self._sizes = [part.d_inner, part.conv_dim, part.n_heads]
        self._channels = [part.d_inner, part.group_dim, part.group_dim]
        self._heads = part.n_heads, part.head_dim
        self._groups = part.n_groups, part.d_state
        rows = weights.rows("ssm_in.weight")
        if weights.compute in ("f32", "blocks"):
            inputs = [weights.stack([rows])]
        else:
            apart = [sum(self._sizes[:2]), self._sizes[2]]
            numbers = weights.numbers("ssm_in.weight")
            steps = numbers.rearranged(lambda data: data.split(apart))[1:]
            inputs = [
                weights.stack(rows.rearranged(lambda data: data.split(apart))[:1]),
                weights.stack(steps, compute="f32"),
            ]
        conv = weights.keep("ssm_conv1d.weight")
        super().__init__(weights, config, layer, inputs, conv, "ssm_out.weight")
        bias = "ssm_conv1d.bias"
        self._bias = weights.keep(bias) if bias in weights else None
        self._dt = weights.keep("ssm_dt.bias")
        self._a = weights.keep("ssm_a").flatten()
        self._d = weights.keep("ssm_d").flatten()
        self._norm = weights.keep("ssm_norm.weight") if part.normed else None

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        memory = around.recurrent
        shape, invariant = x.shape[:2], around.invariant
        joined, *apart = project_each(x, self._inputs, invariant=invariant)
        if apart:
            z, channels = joined.split_with_sizes(self._sizes[:2], -1)
            (steps,) = apart
        else:
            z, channels, steps = joined.split_with_sizes(self._sizes, -1)
        convolved = memory.advance(self._window, ConvInputs(channels, self._conv, self._bias))
        values, B, C = convolved.split_with_sizes(self._channels, -1)
        inputs = SsdInputs(
            values.view(*shape, *self._heads),
            steps,
            steps,
            B.view(*shape, *self._groups),
            C.view(*shape, *self._groups),
            self._d,
            (self._dt, self._a),
        )
        if not runs_triton(steps):
            inputs = inputs.finished(invariant=invariant)
        out = memory.advance(self._state, inputs).flatten(2)
        rows: Rows
        if self._norm is None:
            reads = (self._output.packed,)
            rows = operation_rows(swiglu, (z, out), reads, invariant=invariant)
        else:
            of_groups = (*shape, *self._norm.shape)
            rows = group_rms_norm_rows(
                out.view(of_groups),
                z.view(of_groups),
                self._norm,
                self._eps,
                reads=(self._output.packed,),
                invariant=invariant,
            )
        return self._output(rows, invariant=invariant, residual=residual)


class LowRankMamba2(_RecurrentMixer):
    """Mamba-2 with one projection for gate and channels, by head in the file; the inputs of steps,
    B and C, small and fed back through the state at every token, stay f32 in every mode."""

    def __init__(
        self, part: LowRankMamba2Part, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        def halves(data: Tensor) -> list[Tensor]:
            return [
                half.flatten(0, 1) for half in data.unflatten(0, (part.n_heads, 2, -1)).unbind(1)
            ]

        inputs = [weights.stack(weights.rows("ssm_in.weight").rearranged(halves))]
        conv = weights.keep("ssm_conv1d.weight")
        super().__init__(weights, config, layer, inputs, conv, "ssm_out.weight")
        self._heads = part.n_heads, part.head_dim
        self._low = weights.stack([weights.numbers("ssm_x.weight")], compute="f32")
        self._sizes = list(part.sizes.values())
        self._norms = [weights.keep(name) for name in part.sizes]
        self._steps = weights.stack([weights.numbers("ssm_dt.weight")], compute="f32")
        self._dt, self._a, self._d = (weights.keep(f"ssm_{one}") for one in ("dt.bias", "a", "d"))

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        memory, invariant = around.recurrent, around.invariant
        z, channels = self._input(x, invariant=invariant).chunk(2, -1)
        values = memory.advance(self._window, ConvInputs(channels, self._conv))
        low = self._low(values, invariant=invariant).split_with_sizes(self._sizes, -1)
        B, C, steps = (rms_norm(y, w, self._eps) for y, w in zip(low, self._norms, strict=True))
        steps = self._steps(steps, invariant=invariant)
        values = values.view(*x.shape[:2], *self._heads)
        raw = self._dt, self._a
        inputs = SsdInputs(values, steps, steps, B.unsqueeze(2), C.unsqueeze(2), self._d, raw)
        if not runs_triton(steps):
            inputs = inputs.finished(invariant=invariant)
        out = memory.advance(self._state, inputs).flatten(2)
        rows = operation_rows(swiglu, (z, out), (self._output.packed,), invariant=invariant)
        return self._output(rows, invariant=invariant, residual=residual)


class ShortConv(_RecurrentMixer):
    """c * conv(b * x), where b, c and x are thirds of one projection; its window, rows of b * x, is
    in the memory."""

    def __init__(
        self, part: ShortConvPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        inputs = [weights.project("shortconv.in_proj.weight")]
        conv = weights.keep("shortconv.conv.weight")
        super().__init__(weights, config, layer, inputs, conv, "shortconv.out_proj.weight")

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        memory, invariant = around.recurrent, around.invariant
        b, c, x = self._input(x, invariant=invariant).chunk(3, -1)
        inputs = ConvInputs(x, self._conv, gate=b)
        convolved = memory.advance(self._window, inputs if runs_triton(x) else inputs.finished())
        rows = operation_rows(multiply, (c, convolved), (self._output.packed,))
        return self._output(rows, invariant=invariant, residual=residual)
