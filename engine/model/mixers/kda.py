"""Kimi Delta Attention: short convolutions, a delta rule with gates per channel, gated norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.conv_window import ConvInputs, ConvWindow
from engine.model.delta_state import DeltaInputs, DeltaState
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.kda import KdaPart
from engine.model.recurrence import Recurrence, StateKey
from engine.model.weights import MatrixRows, Projection, Weights
from kernels.norm import gated_rms_norm, l2_norm
from kernels.recurrence.channel_gates import channel_gates


def recurrences(part: KdaPart) -> Mapping[str, Recurrence[Any]]:
    """How tokens advance the part's states."""
    heads = part.n_heads, part.n_heads, part.head_dim
    return {
        "state": DeltaState(*heads, grouped=True, channels=True),
        "window": ConvWindow(part.d_conv, 3 * part.width),
    }


class Kda:
    """Recurrent mixer of trunk layer `layer`; its state and window live in the memory.

    One projection gives, in this order of rows, queries, keys, values (the convolved channels) and
    what decay and output gate come from. Beta, small and fed back through the state at every token,
    is a projection of its own in f32.
    """

    def __init__(self, part: KdaPart, weights: Weights, config: ModelConfig, layer: int) -> None:
        self._state, self._window = StateKey(layer, "state"), StateKey(layer, "window")
        self._eps, self._bound = config.eps, part.bound
        self._heads = part.n_heads
        width = part.width
        first = [weights.rows(part.decay[0]), weights.rows(part.gate[0])]
        n_decay, n_gate = (
            width if len(names) == 1 else part.head_dim for names in (part.decay, part.gate)
        )
        self._sizes = [3 * width, n_decay, n_gate]
        self._qkv_sizes = [2 * width, width]
        self._input = weights.stack([*_qkv(weights), *first])
        self._beta = weights.stack([weights.numbers("ssm_beta.weight")], compute="f32")
        self._decay = _second(weights, part.decay)
        self._gate = _second(weights, part.gate)
        taps = [weights.keep(f"ssm_conv1d_{one}.weight").squeeze(1) for one in "qkv"]
        # taps as rows in memory, as the convolution reads them
        self._conv = torch.cat(taps).t().contiguous().t()
        self._dt = weights.keep("ssm_dt.bias")
        a = weights.keep("ssm_a").flatten().repeat_interleave(part.head_dim)
        self._a = -a if part.positive_a else a
        self._norm = weights.keep("ssm_norm.weight")
        self._output = weights.project("attn_output.weight")

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; advances the memory's states."""
        memory = around.memory.recurrent
        assert memory is not None  # a model with recurrent layers is given such a memory
        heads = (x.shape[0], x.shape[1], -1, self._norm.shape[0])
        invariant = around.invariant
        joined = self._input(x, invariant=invariant)
        channels, decay, gate = joined.split_with_sizes(self._sizes, -1)
        beta = self._beta(x, invariant=invariant)
        if self._decay:
            decay = self._decay(decay, invariant=invariant)
        if self._gate:
            gate = self._gate(gate, invariant=invariant)
        convolved = memory.advance(self._window, ConvInputs(channels, self._conv))
        qk, v = convolved.split_with_sizes(self._qkv_sizes, -1)
        q, k = l2_norm(qk.reshape(heads), self._eps).split_with_sizes([self._heads] * 2, 2)
        g, beta = channel_gates(decay, self._dt, self._a, beta, self._bound, invariant=invariant)
        inputs = DeltaInputs(q, k, v.reshape(heads), g.view(heads), beta)
        out = memory.advance(self._state, inputs)
        out = gated_rms_norm(
            out, gate.view(heads), self._norm, self._eps, sigmoid=True, invariant=invariant
        )
        return self._output(out.flatten(2), invariant=invariant)


def _qkv(weights: Weights) -> list[MatrixRows]:
    """Rows of queries, keys and values."""
    if "attn_qkv.weight" in weights:
        return [weights.rows("attn_qkv.weight")]
    return [weights.rows(f"attn_{one}.weight") for one in "qkv"]


def _second(weights: Weights, names: tuple[str, ...]) -> Projection | None:
    """The second of two matrices."""
    return weights.project(names[1]) if len(names) == 2 else None
