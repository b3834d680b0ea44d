"""Matrix states, of the gated delta rule, Mamba and Mamba-2, and states rounded to a shorter
storage type.

A recurrence writes float32 states to a policy's rows; with a shorter type they are rounded in those
rows, which the next pass reads. Within a pass the state stays float32, as in kernels that keep it
in registers: a batch of n tokens rounds once, n batches of one token n times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.recurrence import LogPart, Recurrence, RecurrentLayout, RowNumbers, RowViews
from kernels.linear.rounding import round_in_place, round_rows, rounded
from kernels.pointwise import step_gates
from kernels.recurrence import UpdateLog, delta_rule, ssd
from kernels.recurrence.channel_gates import RawGates, normed_and_gated
from kernels.recurrence.conv import fold_window
from kernels.recurrence.selective_scan import scan_into, scan_slots

Kernel = Callable[..., Any]


class DeltaInputs(NamedTuple):
    """q, k: [B, T, H_k, d]. v: [B, T, H_v, d]. g: log decay [B, T, H_v], or [B, T, H_v, d] for one
    gate per key channel. beta: [B, T, H_v]. raw: operations still to be applied, on a GPU; q and k
    are then both queries and keys, [B, T, 2 H_k, d], g and beta the layer's raw projections."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    raw: RawGates | None = None

    def finished(self, *, invariant: bool = False) -> DeltaInputs:
        """The same with pending operations applied."""
        if self.raw is None:
            return self
        (eps, dt, a, bound), decay = self.raw, self.g.flatten(2)
        qk, g, beta = normed_and_gated(
            self.q, eps, decay, dt, a, self.beta, bound, invariant=invariant
        )
        q, k = qk.chunk(2, 2)
        return DeltaInputs(q, k, self.v, g.view(self.g.shape), beta)

    def part(self, rows: slice, tokens: slice) -> DeltaInputs:
        q, k, v, g, beta = (x[rows, tokens] for x in self[:5])
        return DeltaInputs(q, k, v, g, beta, self.raw)

    def with_gates(self, type: str) -> DeltaInputs:
        """The same with the gates rounded to a type."""
        whole = self.finished()
        return whole._replace(g=rounded(whole.g, type), beta=rounded(whole.beta, type))


class SsdInputs(NamedTuple):
    """x: [B, T, H, P]. dt, g: step sizes and log decay, [B, T, H]. B, C: [B, T, G, N]. D: [H], of
    the layer. raw: dt and a of step_gates if these are still to be applied; dt and g are then one
    tensor."""

    x: Tensor
    dt: Tensor
    g: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    raw: tuple[Tensor, Tensor] | None = None

    def finished(self, *, invariant: bool = False) -> SsdInputs:
        """The same with pending operations applied."""
        if self.raw is None:
            return self
        dt, g = step_gates(self.dt, *self.raw, invariant=invariant)
        return self._replace(dt=dt, g=g, raw=None)

    def part(self, rows: slice, tokens: slice) -> SsdInputs:
        x, dt, g, B, C = (part[rows, tokens] for part in self[:5])
        return SsdInputs(x, dt, g, B, C, self.D, self.raw)

    def with_gates(self, type: str) -> SsdInputs:
        """The same with the gates rounded to a type."""
        whole = self.finished()
        return whole._replace(dt=rounded(whole.dt, type), g=rounded(whole.g, type))


class ScanInputs(NamedTuple):
    """x, dt: values and step sizes, [B, T, C]. A: [N, C] and D: [C], of the layer. B, C:
    [B, T, N]."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    def part(self, rows: slice, tokens: slice) -> ScanInputs:
        x, dt, B, C = (part[rows, tokens] for part in (self.x, self.dt, self.B, self.C))
        return ScanInputs(x, dt, self.A, B, C, self.D)

    def with_gates(self, type: str) -> ScanInputs:
        """The same with the gates rounded to a type."""
        return self._replace(dt=rounded(self.dt, type))


class ScanState(Recurrence):
    """S [d_state, n_channels] of kernels.recurrence.selective_scan; a token's log entry is the
    state after it. Advancing gives o [B, T, n_channels]."""

    def __init__(self, d_state: int, n_channels: int) -> None:
        super().__init__((d_state, n_channels), [(d_state, n_channels)])

    def into(
        self, inputs: ScanInputs, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        return scan_into(*inputs, start, slots=slots, invariant=invariant)

    def log(
        self, inputs: ScanInputs, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        states = start.new_empty(*inputs.x.shape[:2], *self.shape)
        newest_first = states.unbind(1)[::-1]
        return scan_into(*inputs, start, slots=newest_first, invariant=invariant), (states,)

    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        start, (states,), n_tokens = log
        out = torch.empty_like(start) if out is None else out
        if isinstance(n_tokens, int):
            return out.copy_(states[:, n_tokens - 1] if n_tokens else start)
        # a state buffer is treated as a window of one row
        window, to = (each.view(len(each), 1, -1) for each in (start, out))
        fold_window(window, states.flatten(2), n_tokens, to)
        return out

    def by_index(self, inputs: ScanInputs, pool: Tensor, rows: RowNumbers) -> Tensor:
        return scan_slots(*inputs, pool, rows.read, rows.write)


class MatrixState(Recurrence):
    """S [n_heads, rows, columns], advanced by the functions of one kernel; folding is one product.
    Advancing gives o [B, T, n_heads, …].

    into, log, fold, slots: of kernels.recurrence.delta_rule or kernels.recurrence.ssd.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        entry: Sequence[tuple[int, ...]],
        *,
        into: Kernel,
        log: Kernel,
        fold: Kernel,
        slots: Kernel,
    ) -> None:
        self._into, self._log, self._fold, self._slots = into, log, fold, slots
        super().__init__(shape, entry)

    def into(
        self, inputs: Any, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        return self._into(*inputs.finished()[:-1], start, slots=slots, invariant=invariant)

    def log(
        self, inputs: Any, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._log(*inputs.finished()[:-1], start, invariant=invariant)

    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        start, entries, n_tokens = log
        return self._fold(start, UpdateLog(*entries), n_tokens, out=out, invariant=invariant)

    def by_index(self, inputs: Any, pool: Tensor, rows: RowNumbers) -> Tensor:
        *operands, raw = inputs
        return self._slots(*operands, pool, rows.read, rows.write, raw=raw)


class DeltaState(MatrixState):
    """S [n_v_heads, d, d] of kernels.recurrence.delta_rule; a token's log entry is (k, u, g).

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    channels: one gate per key channel (Kimi Delta Attention, arXiv 2510.26692), else one per head.
    """

    def __init__(
        self, n_k_heads: int, n_v_heads: int, d: int, *, grouped: bool, channels: bool = False
    ) -> None:
        self.n_k_heads, self.n_v_heads, self.d, self.grouped = n_k_heads, n_v_heads, d, grouped
        gates = (n_v_heads, d) if channels else (n_v_heads,)
        super().__init__(
            (n_v_heads, d, d),
            [(n_k_heads, d), (n_v_heads, d), gates],
            into=partial(delta_rule.gated_delta_into, grouped=grouped),
            log=partial(delta_rule.gated_delta_log, grouped=grouped),
            fold=partial(delta_rule.fold, grouped=grouped),
            slots=partial(delta_rule.gated_delta_slots, grouped=grouped),
        )


class SsdState(MatrixState):
    """S [n_heads, head_dim, d_state] of kernels.recurrence.ssd; a token's log entry is
    (dt x, B, g)."""

    llama_cpp_turns = False

    def __init__(self, n_heads: int, head_dim: int, n_groups: int, d_state: int) -> None:
        super().__init__(
            (n_heads, head_dim, d_state),
            [(n_heads, head_dim), (n_groups, d_state), (n_heads,)],
            into=ssd.ssd_into,
            log=ssd.ssd_log,
            fold=partial(delta_rule.fold, grouped=True),
            slots=ssd.ssd_slots,
        )


EXACT = "f32"


def stored_as(
    layout: RecurrentLayout, s: str = EXACT, r: str = EXACT, gates: str = EXACT, older: str = EXACT
) -> RecurrentLayout:
    """A layout whose states and windows are stored as types `s` and `r`; integer states stay.
    gates, older: see StoredState."""

    def stored(one: Recurrence) -> Recurrence:
        type = r if one.is_window else s
        of_gates = EXACT if one.is_window else gates
        if one.is_exact or {type, of_gates, older} == {EXACT}:
            return one
        return StoredState(one, type, older, of_gates)

    return RecurrentLayout({key: stored(one) for key, one in layout.states.items()})


class StoredState(Recurrence):
    """`inner` with states stored as `type`, those before the newest of a pass also as `older`, and
    gates rounded to `gates`: each "f32", "bf16" or "f16".

    A log of inputs is not rounded; a state folded from it is.
    """

    def __init__(
        self, inner: Recurrence, type: str = EXACT, older: str = EXACT, gates: str = EXACT
    ) -> None:
        super().__init__(inner.shape, inner.entry)
        self.is_window, self.is_exact = inner.is_window, inner.is_exact
        self.by_position = inner.by_position
        self._inner, self._type, self._older, self._gates = inner, type, older, gates

    def _read(self, inputs: Any) -> Any:
        if self._gates == EXACT or not hasattr(inputs, "with_gates"):
            return inputs
        return inputs.with_gates(self._gates)

    def into(
        self, inputs: Any, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        o = self._inner.into(self._read(inputs), start, slots, invariant=invariant)
        for type, written in ((self._type, slots), (self._older, slots[1:])):
            for slot in written if type != EXACT else ():
                round_in_place(slot, type)
        return o

    def log(
        self, inputs: Any, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._inner.log(self._read(inputs), start, invariant=invariant)

    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        state = self._inner.fold(*log, out=out, invariant=invariant)
        if out is None:  # may be a view of the log
            return self.stored(state)
        if self._type != EXACT:
            round_in_place(out, self._type)
        return out

    def in_rows(self, inputs: Any, *views: *RowViews, invariant: bool = False) -> Tensor:
        o = self._inner.in_rows(self._read(inputs), *views, invariant=invariant)
        pool, *_, in_order = views
        self._round_rows(pool, in_order, in_order[:, :-1])
        return o

    def by_index(self, inputs: Any, pool: Tensor, rows: RowNumbers) -> Tensor:
        o = self._inner.by_index(self._read(inputs), pool, rows)
        self._round_rows(pool, rows.write, rows.write[:, 1:])
        return o

    def serves(self, n_tokens: int, n_written: int) -> bool:
        return self._inner.serves(n_tokens, n_written)

    def needed(self, state: Tensor, n_tokens: int) -> Tensor:
        return self._inner.needed(state, n_tokens)

    def in_order(self, state: Tensor, n_tokens: int) -> Tensor:
        return self._inner.in_order(state, n_tokens)

    def stored(self, state: Tensor) -> Tensor:
        return state if self._type == EXACT else rounded(state, self._type)

    def _round_rows(self, pool: Tensor, new: Tensor, older: Tensor) -> None:
        for type, numbers in ((self._type, new), (self._older, older)):
            if type != EXACT and numbers.numel():
                round_rows(pool, numbers, type)
