"""The Mamba-2 block (Dao & Gu 2024): short convolution, state-space duality, norm of groups."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.conv_window import ConvInputs, ConvWindow
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.mamba2 import Mamba2Part
from engine.model.recurrence import Recurrence, StateKey
from engine.model.ssd_state import SsdInputs, SsdState
from engine.model.weights import Weights
from kernels.norm import group_rms_norm
from kernels.pointwise import step_gates, swiglu


def recurrences(part: Mamba2Part) -> dict[str, Recurrence[Any]]:
    """How tokens advance the states of `part`."""
    state = SsdState(part.n_heads, part.head_dim, part.n_groups, part.d_state)
    return {"state": state, "window": ConvWindow(part.d_conv, part.conv_dim)}


class Mamba2:
    """Recurrent mixer of trunk layer `layer`; its state and window live in the memory.

    One projection gives, in this order of rows, the gate z, the convolved channels (x, B, C) and
    the raw step sizes. Where weights are rounded, the last, small and fed back through the state at
    every token, are a projection of their own in f32.
    """

    def __init__(self, part: Mamba2Part, weights: Weights, config: ModelConfig, layer: int) -> None:
        self._state, self._window = StateKey(layer, "state"), StateKey(layer, "window")
        self._eps = config.eps
        self._sizes = [part.d_inner, part.conv_dim, part.n_heads]
        self._channels = [part.d_inner, part.group_dim, part.group_dim]
        self._heads = part.n_heads, part.head_dim
        self._groups = part.n_groups, part.d_state
        self._steps = None
        rows = weights.rows("ssm_in.weight")
        if weights.compute in ("f32", "blocks"):
            self._input = weights.stack([rows])
        else:
            apart = [sum(self._sizes[:2]), self._sizes[2]]
            self._input = weights.stack(rows.rearranged(lambda data: data.split(apart))[:1])
            numbers = weights.numbers("ssm_in.weight")
            steps = numbers.rearranged(lambda data: data.split(apart))[1:]
            self._steps = weights.stack(steps, compute="f32")
        # taps as rows in memory, as the convolution reads them
        self._conv = weights.keep("ssm_conv1d.weight").t().contiguous().t()
        bias = "ssm_conv1d.bias"
        self._bias = weights.keep(bias) if bias in weights else None
        self._dt = weights.keep("ssm_dt.bias")
        self._a = weights.keep("ssm_a").flatten()
        self._d = weights.keep("ssm_d").flatten()
        self._norm = weights.keep("ssm_norm.weight") if part.normed else None
        self._output = weights.project("ssm_out.weight")

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; advances the memory's states."""
        memory = around.memory.recurrent
        assert memory is not None  # a model with recurrent layers is given such a memory
        shape, invariant = x.shape[:2], around.invariant
        joined = self._input(x, invariant=invariant)
        if self._steps is None:
            z, channels, steps = joined.split_with_sizes(self._sizes, -1)
        else:
            z, channels = joined.split_with_sizes(self._sizes[:2], -1)
            steps = self._steps(x, invariant=invariant)
        convolved = memory.advance(self._window, ConvInputs(channels, self._conv, self._bias))
        values, B, C = convolved.split_with_sizes(self._channels, -1)
        dt, g = step_gates(steps, self._dt, self._a, invariant=invariant)
        inputs = SsdInputs(
            values.view(*shape, *self._heads),
            dt,
            g,
            B.view(*shape, *self._groups),
            C.view(*shape, *self._groups),
            self._d,
        )
        out = memory.advance(self._state, inputs).view(*shape, -1)
        if self._norm is None:
            out = swiglu(z, out, invariant=invariant)
        else:
            of_groups = (*shape, *self._norm.shape)
            out, z = out.view(of_groups), z.view(of_groups)
            out = group_rms_norm(out, z, self._norm, self._eps, invariant=invariant).flatten(2)
        return self._output(out, invariant=invariant)
