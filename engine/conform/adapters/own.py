"""This program's kernels in each backend: slots (planes), a log of inputs that is folded, and
chunked prompts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Recurrence, Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory, Prompts, as_a_pass
from kernels import dispatch


def _operation(module: str, name: str, backend: str) -> Callable[..., Any]:
    """An operation of kernels.recurrence in one backend; "": in the one chosen for it."""
    place, end = f"kernels.recurrence.{module}", f"with_{backend}".replace("with_naive", "naive")
    if backend and module in ("delta_rule", "ssd"):
        place = f"{place}.{end}"
    elif backend == "triton":
        place = "kernels.recurrence.with_triton"
    elif backend not in ("", "torch"):
        name = f"{name}_{end}"
    found: Callable[..., Any] = getattr(importlib.import_module(place), name)
    return dispatch.torch_version(found) if backend == "torch" else found


def _stacked(parts: Sequence[Rows], names: str) -> list[torch.Tensor]:
    """Rows of sequences of equal length, [sequences, rows, …]. With several rows they are views of
    wider ones, as in a layer, with NaN between them."""
    made = []
    for name in names.split():
        x = torch.stack([getattr(part, name) for part in parts])
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), torch.nan)
        wide[..., 2 : 2 + x.shape[-1]] = x
        made.append(wide[..., 2 : 2 + x.shape[-1]] if x.shape[1] > 1 else x)
    return made


def _by_length(rows: Rows) -> list[tuple[list[int], list[int], list[Rows]]]:
    """Groups of sequences of equal length, as in the engine's ubatches: their places in the pass,
    their numbers, and the rows of each."""
    groups = []
    for length in sorted(set(rows.lengths)):
        at = [i for i, n in enumerate(rows.lengths) if n == length]
        groups.append((at, [rows.sequences[i] for i in at], [rows.one(i) for i in at]))
    return groups


class _Slots:
    """A plane for each row of a pass and sequence, whose state may be `turned`; the newest accepted
    one is read next."""

    turned = False

    def __init__(self, shape: Shape, memory: Memory, package: Package, backend: str = "") -> None:
        self.shape, self.memory, self.backend = shape, memory, backend
        n, t = shape.n_sequences, shape.n_tokens
        plane = self._stored(torch.empty(shape.state, device="meta")).shape
        if n % 2 or memory.far:
            self.pool = memory.pool(1, n * t, *plane, dtype=shape.dtype)[0]
        else:  # one of three interleaved layers of planes
            layers = memory.empty(n * t, 3, *plane, dtype=shape.dtype)
            self.pool = layers[:, 1]
            memory.keep("padding-written", "other layers", layers[:, ::2])
        mixed = torch.randperm(n * t, generator=torch.Generator().manual_seed(n * t))
        self.planes = mixed.view(n, t).to(memory.device)
        self.live = [0] * n

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[self.planes[sequence, 0]] = self._stored(state).to(self.pool)
        self.live[sequence] = 0

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        return state.mT if self.turned else state

    def verify(self, rows: Rows) -> torch.Tensor:
        outputs: dict[int, torch.Tensor] = {}
        for at, ids, parts in _by_length(rows):
            read = torch.stack([self.planes[s, self.live[s]] for s in ids])
            # the newest state comes first, and the rows' states go to planes 0, 1, …
            write = self.planes[ids, : parts[0].lengths[0]].flip(1)
            outputs |= dict(zip(at, self._run(parts, read, write), strict=True))
        return torch.cat([outputs[i] for i in range(len(rows.sequences))])

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        run = _operation("delta_rule", "gated_delta_slots", getattr(self, "backend", ""))
        rows_of = _stacked(parts, _DELTA)
        return run(*rows_of, self.pool, read, write, grouped=True)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.live[sequence] = count - 1

    decode = as_a_pass

    def state(self, sequence: int) -> torch.Tensor:
        plane = self.pool[self.planes[sequence, self.live[sequence]]]
        return self._stored(plane.float())


_DELTA = "q_normed k_normed v g beta"


def _ssd_rows(parts: Sequence[Rows]) -> tuple[torch.Tensor, ...]:
    """x, dt, g, B, C and D as `kernels.recurrence.ssd` takes them."""
    x, dt, B, C = _stacked(parts, "x dt B C")
    # in f64, so that its bits do not depend on the number of rows
    dt = torch.nn.functional.softplus((dt + parts[0].dt_bias).double()).float()
    return x, dt, dt * parts[0].A, B, C, parts[0].D


class _SsdSlots(_Slots):
    """Mamba-2 over planes stored as [heads, d_v, d_k]."""

    turned = True

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        run = _operation("ssd", "ssd_slots", self.backend)
        return run(*_ssd_rows(parts), self.pool, read, write)


class _ScanSlots(_Slots):
    """The selective scan over planes of [groups, d_k, channels of a group]: Mamba-2 is a scan per
    group in which all channels of a head decay alike."""

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        """The plane of a state [heads, d_k, d_v], and the state of a plane."""
        s = self.shape
        share = s.n_heads // s.n_groups
        if len(state) == s.n_groups:
            return state.unflatten(2, (share, -1)).transpose(1, 2).flatten(0, 1)
        return state.unflatten(0, (-1, share)).transpose(1, 2).flatten(2)

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        s = self.shape
        x, dt, _, B, C, D = _ssd_rows(parts)
        run = _operation("selective_scan", "scan_slots", self.backend)
        dt, A, D = (each.repeat_interleave(s.d_v, -1) for each in (dt, parts[0].A, D))
        of_groups = (each.chunk(s.n_groups, -1) for each in (x.flatten(2), dt, A, D))
        outputs = [
            run(
                *(x, dt, A.expand(s.d_k, -1), B[..., i, :], C[..., i, :], D),
                *(self.pool[:, i], read, write),
            )
            for i, (x, dt, A, D) in enumerate(zip(*of_groups, strict=True))
        ]
        return torch.cat(outputs, -1).view_as(x)


class _ConvSlots(_Slots):
    """Convolution over planes of windows, stored as [taps - 1, channels]."""

    turned = True

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        run = _operation("conv", "causal_conv_slots", self.backend)
        (x,), one = _stacked(parts, "x"), parts[0]
        # here the oldest window comes first
        return run(x, one.weight, self.pool, read, write.flip(1), one.bias)


class _Log:
    """The delta rule with a log of k, u and g; the accepted rows are folded into the state."""

    module = "delta_rule"

    def __init__(self, shape: Shape, memory: Memory, package: Package, backend: str = "") -> None:
        self.backend = backend
        size = _as_stored(self.module, torch.empty(shape.state)).shape
        self.states = memory.empty(shape.n_sequences, *size)
        self.logs: list[tuple[list[int], tuple[torch.Tensor, ...]]] = []

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.states[sequence] = _as_stored(self.module, state)

    def verify(self, rows: Rows) -> torch.Tensor:
        outputs: dict[int, torch.Tensor] = {}
        self.logs.clear()
        for at, ids, parts in _by_length(rows):
            made, log = self._run(parts, self.states[ids])
            self.logs.append((ids, log))
            outputs |= dict(zip(at, made, strict=True))
        return torch.cat([outputs[i] for i in range(len(rows.sequences))])

    def _run(self, parts: Sequence[Rows], states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        run = _operation("delta_rule", "gated_delta_log", self.backend)
        o, log = run(*_stacked(parts, _DELTA), states, grouped=True)
        return o, log

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        fold = _operation("delta_rule", "fold", self.backend)
        taken = dict(zip(sequences, counts, strict=True))
        for ids, log in self.logs:
            n = [taken.get(s, 0) for s in ids]
            parts = [part.clone() for part in log]
            for row, count in enumerate(n):
                for part in parts:
                    part[row, count:] = torch.nan
            folded = type(log)(*parts)
            n_tokens = torch.tensor(n, device=self.states.device)
            self.states[ids] = fold(self.states[ids], folded, n_tokens, grouped=True)

    decode = as_a_pass

    def state(self, sequence: int) -> torch.Tensor:
        return _as_stored(self.module, self.states[sequence])


def _as_stored(module: str, state: torch.Tensor) -> torch.Tensor:
    """The states of `ssd` are [heads, d_v, d_k]."""
    return state.transpose(-1, -2) if module == "ssd" else state


class _SsdLog(_Log):
    """Mamba-2 with a log of B, u and g."""

    module = "ssd"

    def _run(self, parts: Sequence[Rows], states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        o, log = _operation("ssd", "ssd_log", self.backend)(*_ssd_rows(parts), states)
        return o, log


class _Chunked(Prompts):
    """gated_delta_rule and ssd: one prompt at a time, of which the last state is kept."""

    def __init__(self, shape: Shape, memory: Memory, package: Package, backend: str = "") -> None:
        super().__init__(shape, memory, package)
        self.backend = backend

    def one(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        module = "ssd" if self.shape.recurrence == "mamba2" else "delta_rule"
        state = self.memory.zeros(*self.shape.state) if first is None else first
        state = _as_stored(module, state).unsqueeze(0)
        if module == "ssd":
            o, kept = _operation(module, "ssd", self.backend)(*_ssd_rows([rows]), state)
        else:
            run = _operation(module, "gated_delta_rule", self.backend)
            o, kept = run(*_stacked([rows], _DELTA), state, grouped=True)
        return o[0], _as_stored(module, kept[0, 0])


def _backends() -> list[str]:
    """Backends that this machine can run."""
    known = {"llvm": dispatch.has_llvm(), "triton": dispatch.has_triton()}
    return [name for name in dispatch.CHOICES if known.get(name, True)]


_KERNELS: tuple[tuple[str, Any, tuple[Recurrence, ...]], ...] = (
    ("gated_delta_slots", _Slots, ("gdn", "kda")),
    ("gated_delta_log", _Log, ("gdn", "kda")),
    ("gated_delta_rule", _Chunked, ("gdn", "kda")),
    ("ssd_slots", _SsdSlots, ("mamba2",)),
    ("ssd_log", _SsdLog, ("mamba2",)),
    ("ssd", _Chunked, ("mamba2",)),
    ("scan_slots", _ScanSlots, ("mamba2",)),
    ("causal_conv_slots", _ConvSlots, ("conv",)),
)
ENGINE = Engine(
    package="kernels",
    versions=(),
    kept=("kernels",),
    values={},
    kernels=tuple(
        Kernel(
            f"{name}.{backend}",
            recurrences,
            partial(make, backend=backend),
            least_d=4,
            log=issubclass(make, _Log),
            dtypes=("float32",),
            host=backend == "llvm",
            extras=("far slots",) * issubclass(make, _Slots),
            chunk=(16 if backend == "triton" else 32) if make is _Chunked else 0,
        )
        for name, make, recurrences in _KERNELS
        for backend in _backends()
        if (name, backend) != ("causal_conv_slots", "triton")  # without such a kernel
    ),
)
