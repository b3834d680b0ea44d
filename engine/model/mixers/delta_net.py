"""The Gated DeltaNet block (Yang et al., 2024): short convolution, gated delta rule, gated norm."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.conv_window import ConvInputs, ConvWindow
from engine.model.delta_state import DeltaInputs, DeltaState
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.delta_net import DeltaNetPart
from engine.model.recurrence import Recurrence, StateKey
from engine.model.weights import MatrixRows, Weights
from kernels.norm import gated_rms_norm, l2_norm
from kernels.pointwise import delta_gates


def recurrences(part: DeltaNetPart) -> dict[str, Recurrence[Any]]:
    """How tokens advance the states of `part`."""
    state = DeltaState(part.n_k_heads, part.n_v_heads, part.d_state, grouped=part.grouped)
    return {"state": state, "window": ConvWindow(part.d_conv, part.conv_dim)}


class DeltaNet:
    """Recurrent mixer of trunk layer `layer`; its state and window live in the memory.

    One projection gives, in this order of rows, queries, keys, values (the convolved channels),
    the output gate z, and the raw beta and decay. In reduced compute modes the last two, small
    and fed back through the state at every token, are a projection of their own in f32.
    """

    def __init__(
        self, part: DeltaNetPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        self._state, self._window = StateKey(layer, "state"), StateKey(layer, "window")
        self._head_dim = part.d_state
        self._eps = config.eps
        self._sigmoid = part.sigmoid_gate
        self._sizes = [part.conv_dim, part.value_dim, part.n_v_heads, part.n_v_heads]
        self._qkv_sizes = [2 * part.key_dim, part.value_dim]
        self._qk_heads = [part.n_k_heads, part.n_k_heads]
        qkv_z = _qkv_and_z(weights, part)
        gates = _beta_and_decay(weights, part)
        if weights.compute == "f32":
            self._input = weights.stack([*qkv_z, *gates])
            self._gates = None
        else:
            self._input = weights.stack(qkv_z)
            self._gates = weights.stack(gates, compute="f32")
        # taps as rows in memory, as the convolution reads them
        self._conv = weights.keep("ssm_conv1d.weight").t().contiguous().t()
        self._dt = weights.keep("ssm_dt.bias")
        self._a = weights.keep("ssm_a")
        self._norm = weights.keep("ssm_norm.weight")
        self._output = weights.project("ssm_out.weight")

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; advances the memory's states."""
        memory = around.memory.recurrent
        assert memory is not None  # a model with recurrent layers is given such a memory
        heads = (x.shape[0], x.shape[1], -1, self._head_dim)
        invariant = around.invariant
        if self._gates is None:
            joined = self._input(x, invariant=invariant)
            channels, z, beta, decay = joined.split_with_sizes(self._sizes, -1)
        else:
            joined = self._input(x, invariant=invariant)
            channels, z = joined.split_with_sizes(self._sizes[:2], -1)
            gates = self._gates(x, invariant=invariant)
            beta, decay = gates.split_with_sizes(self._sizes[2:], -1)
        convolved = memory.advance(self._window, ConvInputs(channels, self._conv))
        qk, v = convolved.split_with_sizes(self._qkv_sizes, -1)
        qk = l2_norm(qk.reshape(heads), self._eps)
        q, k = qk.split_with_sizes(self._qk_heads, 2)
        v = v.reshape(heads)
        g, beta = delta_gates(decay, self._dt, self._a, beta, invariant=invariant)
        out = memory.advance(self._state, DeltaInputs(q, k, v, g, beta))
        out = gated_rms_norm(
            out, z.view(heads), self._norm, self._eps, sigmoid=self._sigmoid, invariant=invariant
        )
        return self._output(out.flatten(2), invariant=invariant)


def _qkv_and_z(weights: Weights, part: DeltaNetPart) -> list[MatrixRows]:
    """Rows of queries, keys, values and gates, one below the other."""
    if "ssm_in.weight" not in weights:
        return [weights.rows("attn_qkv.weight"), weights.rows("attn_gate.weight")]
    # the legacy tensor groups its rows by key head: q, k, then this head's values and gates
    per_head = part.value_dim // part.n_k_heads
    sizes = [part.d_state, part.d_state, per_head, per_head]

    def parts(rows: torch.Tensor) -> list[torch.Tensor]:
        grouped = rows.unflatten(0, (part.n_k_heads, -1))
        return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]

    return weights.rows("ssm_in.weight").rearranged(parts)


def _beta_and_decay(weights: Weights, part: DeltaNetPart) -> list[MatrixRows]:
    """Rows of beta, then rows of the decay, one per value head each."""
    if not part.joint_gates:
        return [weights.numbers("ssm_beta.weight"), weights.numbers("ssm_alpha.weight")]

    # per key head: beta of its value heads, then their decay
    def parts(rows: torch.Tensor) -> list[torch.Tensor]:
        grouped = rows.unflatten(0, (part.n_k_heads, 2, -1))
        return [part.flatten(0, 1) for part in grouped.unbind(1)]

    return weights.numbers("ssm_ba.weight").rearranged(parts)
