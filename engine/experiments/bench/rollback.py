"""Cost of a rejected draft under every rollback policy, without a model.

One round does what a decoder does with the recurrent layers of one sequence: a checkpoint if the
policy will not reach back far enough, a ubatch of T tokens through all layers, then undoing all but
the kept ones, by `seq_rm` or by restore and replay. The policies alternate within every repetition,
so that load of the machine affects them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import UBatch
from engine.errors import OptionError
from engine.memory.policies import POLICIES
from engine.memory.recurrent import RecurrentCheckpoint, RecurrentTraffic, SnapshotPolicy
from engine.model.recurrence import (
    ConvInputs,
    ConvWindow,
    RecurrenceInputs,
    RecurrentLayout,
    StateKey,
)
from engine.model.recurrent_states import DeltaInputs, DeltaState
from kernels.recurrence.conv import causal_conv
from kernels.recurrence.delta_rule import gated_delta_rule

NO_ROLLBACK = "none"
"""The baseline row: one live state, every token kept."""

ROLLBACK_PHASES = ("save", "verify", "rollback", "restore", "replay")
_WARM_UP = 2


def bench_layout(n_heads: int, d_state: int, n_layers: int, conv_dim: int) -> RecurrentLayout:
    """The recurrent layers to measure. Raises OptionError for inconsistent sizes."""
    key_dim, odd = divmod(conv_dim - n_heads * d_state, 2)
    n_k_heads, rest = divmod(key_dim, d_state)
    if odd or rest or n_k_heads < 1 or n_heads % n_k_heads:
        raise OptionError(
            f"--conv-dim {conv_dim} does not fit --heads {n_heads} and --dim {d_state}.",
            "Give (heads + 2 x key heads) x dim, where heads is a multiple of the key heads.",
        )
    state = DeltaState(n_k_heads, n_heads, d_state, grouped=False)
    return RecurrentLayout.alike(range(n_layers), state=state, window=ConvWindow(4, conv_dim))


@torch.inference_mode()
def bench_rollback(
    policies: Sequence[str],
    widths: Sequence[int],
    layout: RecurrentLayout,
    *,
    keep: int | None = None,
    n_rs_seq: int | None = None,
    repeats: int = 7,
) -> Iterator[dict[str, Any]]:
    """Rows by width, NO_ROLLBACK first, then the policies (keys of POLICIES) in order.

    keep: kept tokens of every ubatch, None = half of them, rounded down, at least one. n_rs_seq:
    snapshots beyond the live state, None = one for each token that could be rejected.

    A row is one policy at one width, medians over the repetitions: policy; width: tokens of a
    ubatch, of which `kept` stay; ms: by phase, with "total"; min_ms: the fastest total; over_none:
    total over that of NO_ROLLBACK in the same repetition; written, copied, saved, restored: bytes
    per round (engine.memory.recurrent.RecurrentTraffic); held: bytes of storage and of the
    checkpoint; beyond: those bytes minus one live state, the memory cost of rollback; state_nmse:
    error of the state and window of one layer after the rounds against decoding only the kept
    tokens, None if all are kept.
    """
    for width in widths:
        kept = min(width, max(1, width // 2) if keep is None else keep)
        layers = [_Inputs(layout, width, layer) for layer in layout.layers]
        depth = width - 1 if n_rs_seq is None else n_rs_seq
        runners = [_Runner(NO_ROLLBACK, "checkpoint", layout, layers, width, depth)]
        runners += [_Runner(name, name, layout, layers, kept, depth) for name in policies]
        for turn in range(_WARM_UP + repeats):
            first = turn % len(runners)
            for runner in (*runners[first:], *runners[:first]):
                runner.round()
        truth = layers[0].decoded(kept, _WARM_UP + repeats)
        for runner in runners:
            yield runner.row(runners[0], truth)


class _Inputs:
    """Constant inputs of one layer for a ubatch of `width` tokens."""

    def __init__(self, layout: RecurrentLayout, width: int, layer: int) -> None:
        random = torch.Generator().manual_seed(layer)
        self._keys = StateKey(layer, "window"), StateKey(layer, "state")
        window, state = (layout.states[key] for key in self._keys)
        assert isinstance(window, ConvWindow)
        assert isinstance(state, DeltaState)
        self._grouped = state.grouped
        n_k, n_v, d = state.n_k_heads, state.n_v_heads, state.d
        n_rows, n_channels = window.shape

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random)

        x, weight = normal(1, width, n_channels), 0.5 * normal(n_channels, n_rows + 1)
        q, k = F.normalize(normal(2, 1, width, n_k, d), dim=-1).unbind()
        g = -0.1 * F.softplus(normal(1, width, n_v))
        self._conv = ConvInputs(x, weight)
        self._delta = DeltaInputs(
            q, k, normal(1, width, n_v, d), g, normal(1, width, n_v).sigmoid()
        )
        self.width = width

    def pass_through(self, memory: SnapshotPolicy, n: int) -> None:
        """Advance the memory of this layer by the first n tokens."""
        every: tuple[RecurrenceInputs, ...] = (self._conv, self._delta)
        for key, inputs in zip(self._keys, every, strict=True):
            memory.advance(key, inputs.part(slice(None), slice(n)))

    def decoded(self, n: int, times: int) -> dict[StateKey, Tensor]:
        """The states after decoding the first n tokens `times` times, which rounds must
        reproduce."""
        (x, weight, *_), delta = self._conv, self._delta.part(slice(None), slice(n))
        n_v, d = delta.v.shape[2:]
        state = torch.zeros(1, n_v, d, d)
        window = torch.zeros(1, weight.shape[1] - 1, x.shape[2])
        for _ in range(times):
            state = gated_delta_rule(*delta[:5], state, grouped=self._grouped)[1][:, 0]
            window = causal_conv(x[:, :n], weight, window)[1][:, n:]
        return dict(zip(self._keys, (window[0], state[0]), strict=True))


class _Runner:
    """One policy's memory, its rounds and their times."""

    def __init__(
        self,
        label: str,
        policy: str,
        layout: RecurrentLayout,
        layers: list[_Inputs],
        kept: int,
        n_rs_seq: int,
    ) -> None:
        self.label = label
        self._layers = layers
        self._width, self._kept = layers[0].width, kept
        self._memory = POLICIES[policy](layout, 1, n_rs_seq, torch.device("cpu"))
        self._checkpoint: RecurrentCheckpoint | None = None
        self._times: list[dict[str, float]] = []
        self._traffic: list[RecurrentTraffic] = []

    def round(self) -> None:
        """Verify a ubatch and leave the memory after its kept tokens."""
        memory, width, kept = self._memory, self._width, self._kept
        pos0 = memory.seq_pos_max(0) + 1
        ubatch, replayed = _ubatch(pos0, width), _ubatch(pos0, kept)
        ms = dict.fromkeys(ROLLBACK_PHASES, 0.0)
        before = RecurrentTraffic(*astuple(memory.traffic))
        if width - kept and width - 1 > memory.guaranteed_depth(0, width):
            with _timed(ms, "save"):
                self._checkpoint = memory.save(0)
        with _timed(ms, "verify"):
            self._decode(ubatch)
        if width - kept:
            with _timed(ms, "rollback"):
                removed = memory.seq_rm(0, pos0 + kept)
            if not removed:
                assert self._checkpoint is not None  # saved whenever the depth was not guaranteed
                with _timed(ms, "restore"):
                    memory.restore(0, self._checkpoint)
                with _timed(ms, "replay"):
                    self._decode(replayed)
        assert memory.seq_pos_max(0) == pos0 + kept - 1
        ms["total"] = sum(ms.values())
        self._times.append(ms)
        moved = zip(astuple(memory.traffic), astuple(before), strict=True)
        self._traffic.append(RecurrentTraffic(*(now - then for now, then in moved)))

    def row(self, baseline: _Runner, truth: dict[StateKey, Tensor]) -> dict[str, Any]:
        """Medians of the rounds after the warm-up. truth: reference states by key."""
        times = self._times[_WARM_UP:]
        ratios = [
            own["total"] / other["total"]
            for own, other in zip(times, baseline._times[_WARM_UP:], strict=True)
        ]
        traffic = [astuple(moved) for moved in self._traffic[_WARM_UP:]]
        moved = [int(median(column)) for column in zip(*traffic, strict=True)]
        nmse = None
        if self is not baseline:
            live = self._memory.live(0)
            nmse = max(_nmse(live[key], true) for key, true in truth.items())
        held = self._memory.n_bytes()
        held += self._checkpoint.n_bytes if self._checkpoint else 0
        return {
            "policy": self.label,
            "width": self._width,
            "kept": self._kept,
            "ms": {p: median(ms[p] for ms in times) for p in (*ROLLBACK_PHASES, "total")},
            "min_ms": min(ms["total"] for ms in times),
            "over_none": median(ratios),
            **dict(zip(("written", "copied", "saved", "restored"), moved, strict=True)),
            "held": held,
            "beyond": held - self._memory.layout.n_bytes,
            "state_nmse": nmse,
        }

    def _decode(self, ubatch: UBatch) -> None:
        self._memory.begin(ubatch)
        for inputs in self._layers:
            inputs.pass_through(self._memory, ubatch.n_seq_tokens)
        self._memory.commit()


def _ubatch(pos0: int, n: int) -> UBatch:
    positions = np.arange(pos0, pos0 + n)[None]
    return UBatch(np.zeros_like(positions), positions, (0,), np.empty(0, np.int64))


@contextmanager
def _timed(ms: dict[str, float], phase: str) -> Iterator[None]:
    start = perf_counter()
    yield
    ms[phase] = 1000 * (perf_counter() - start)


def _nmse(result: Tensor, truth: Tensor) -> float:
    error = (result.double() - truth.double()).square().sum()
    return float(error / truth.double().square().sum())
