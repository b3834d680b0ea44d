"""Triton kernels of flash-linear-attention: the last state alone, or (KDA) a paged pool; in some
shapes states are values-first ("v first")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.conform.adapters import Engine
from engine.conform.adapters.vllm import Paged
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts

_V_FIRST = "v first"
_RAW = dict.fromkeys((f"use_{of}_in_kernel" for of in ("gate", "qk_l2norm", "beta_sigmoid")), True)


def _turned(shape: Shape, states: torch.Tensor) -> torch.Tensor:
    """States [..., d_k, d_v] in their stored layout, and back."""
    return states.mT if _V_FIRST in shape.extras else states


def _options(shape: Shape, rows: Rows) -> dict[str, Any]:
    """Arguments that all of these kernels take."""
    return {
        "scale": shape.d_k**-0.5,
        "output_final_state": True,
        "state_v_first": _V_FIRST in shape.extras,
        "cu_seqlens": rows.starts.long(),
        "A_log": rows.A_log,
        "dt_bias": rows.dt_bias,
    }


class LastState:
    """fused_recurrent_gated_delta_rule: a rollback replays the accepted rows."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        size = _turned(shape, torch.empty(shape.state, device="meta")).shape
        self.states = memory.empty(shape.n_sequences, *size)
        self.last: dict[int, Rows] = {}

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.states[sequence] = _turned(self.shape, state)

    def run(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.package.module("fla.ops.gated_delta_rule.fused_recurrent")
        g, beta = (t.unsqueeze(0) for t in rows.beside("a", "b"))
        o, states = module.fused_recurrent_gated_delta_rule(
            *(t.unsqueeze(0) for t in rows.beside("q", "k", "v")),
            g=g,
            beta=beta,
            initial_state=self.states[rows.sequences],
            **_RAW,
            **_options(self.shape, rows),
        )
        return o[0], states

    def verify(self, rows: Rows) -> torch.Tensor:
        self.last = {s: rows.one(i) for i, s in enumerate(rows.sequences)}
        return self.run(rows)[0]

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            rows = self.last[sequence].one(0, slice(count))
            self.states[sequence] = self.run(rows)[1][0]

    def decode(self, rows: Rows) -> torch.Tensor:
        o, states = self.run(rows)
        self.states[rows.sequences] = states
        return o

    def state(self, sequence: int) -> torch.Tensor:
        return _turned(self.shape, self.states[sequence])


class _ChannelGates(Paged):
    """fused_recurrent_kda_fwd with a pool, a block table and accepted counts; a step without drafts
    has states of its own, which are returned."""

    def stored(self, states: torch.Tensor) -> torch.Tensor:
        return _turned(self.shape, states)

    def run(self, rows: Rows, table: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
        module = self.package.module("fla.ops.kda.fused_recurrent")
        paged = {"ssm_state_indices": table, "num_accepted_tokens": accepted}
        own = table.flatten() if accepted is None else None
        o, states = module.fused_recurrent_kda_fwd(
            *(t.unsqueeze(0) for t in (rows.q, rows.k, rows.v, rows.a, rows.b)),
            initial_state=self.pool if own is None else self.pool[own],
            inplace_final_state=own is None,
            lower_bound=rows.bound,
            **(paged if own is None else {}),
            **_RAW,
            **_options(self.shape, rows),
        )
        if own is not None:
            self.pool[own] = states.to(self.pool)
        output: torch.Tensor = o[0]
        return output


class _Chunked(Prompts):
    """chunk_gated_delta_rule_fwd or chunk_kda_fwd, alternating between its kernel for gates and the
    one for their sums."""

    calls = 0

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        kda = self.shape.recurrence == "kda"
        place = "kda.chunk_fwd" if kda else "gated_delta_rule.chunk"
        module = self.package.module(f"fla.ops.{place}")
        self.calls += 1
        gates = rows.g if self.calls % 2 else rows.a
        bound = {"lower_bound": rows.bound, "safe_gate": rows.bound is not None}
        made = (module.chunk_kda_fwd if kda else module.chunk_gated_delta_rule_fwd)(
            *(t.unsqueeze(0) for t in (rows.q_normed, rows.k_normed, rows.v, gates, rows.beta)),
            use_gate_in_kernel=gates is rows.a,
            initial_state=None if first is None else _turned(self.shape, first).contiguous(),
            **(bound if kda else {}),
            **_options(self.shape, rows),
        )
        o, last = made[:2] if kda else made[1:4:2]
        return o[0], _turned(self.shape, last)


_F32, _ALL = ("float32",), (_V_FIRST, "lower bound")  # each where it applies
ENGINE = Engine(
    package="fla",
    versions=("0.6.0",),
    kept=(
        "fla.ops.gated_delta_rule",
        "fla.ops.kda",
        "fla.ops.common",
        "fla.ops.gla.chunk",
        "fla.ops.utils",
        "fla.utils",
        "fla.modules.norm.l2norm",
    ),
    values={"fla.__version__": "0"},
    traced_ranges=("fla.ops.common.chunk_delta_h",),
    packages=("fla.ops.utils", "fla.utils"),
    kernels=(
        Kernel("fused_recurrent_gated_delta_rule", ("gdn",), LastState, dtypes=_F32, extras=_ALL),
        Kernel("fused_recurrent_kda", ("kda",), _ChannelGates, extras=(*_ALL, "far slots")),
        Kernel("chunk_gated_delta_rule", ("gdn",), _Chunked, dtypes=_F32, chunk=64, extras=_ALL),
        Kernel("chunk_kda", ("kda",), _Chunked, dtypes=_F32, chunk=64, extras=_ALL),
    ),
)
