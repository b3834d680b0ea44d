"""This program's kernels: slots (planes), and a log of inputs that is folded, in the backend that
DRAFTSCOPE_KERNELS chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.conform.adapters import Engine
from engine.conform.cases import Rows, Shape
from engine.conform.packages import Package
from engine.conform.subject import Kernel, Memory
from kernels.recurrence import conv, delta_rule, selective_scan, ssd


class _Slots:
    """A plane for each row of a pass and sequence; the newest accepted one is read next."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory = shape, memory
        n, t = shape.n_sequences, shape.n_tokens
        self.pool = memory.empty(n * t, *self._plane(), dtype=shape.dtype)
        self.planes = memory.whole(range(n * t), torch.int64).view(n, t)
        self.live = [0] * n

    def _plane(self) -> tuple[int, ...]:
        return self.shape.state

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.pool[self.planes[sequence, 0]] = self._stored(state).to(self.pool)
        self.live[sequence] = 0

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def verify(self, rows: Rows) -> torch.Tensor:
        """Sequences of one length at a time, as the engine's ubatches are."""
        outputs: dict[int, torch.Tensor] = {}
        for length in sorted(set(rows.lengths)):
            chosen = [i for i, n in enumerate(rows.lengths) if n == length]
            ids = [rows.sequences[i] for i in chosen]
            read = torch.stack([self.planes[s, self.live[s]] for s in ids])
            # the newest state comes first, and the rows' states end in planes 0, 1, …
            write = self.planes[ids, :length].flip(1)
            parts = [rows.one(i) for i in chosen]
            outputs |= dict(zip(chosen, self._run(parts, read, write), strict=True))
        return torch.cat([outputs[i] for i in range(len(rows.sequences))])

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = (
            torch.stack([getattr(p, name) for p in parts])
            for name in ("q_normed", "k_normed", "v", "g", "beta")
        )
        return delta_rule.gated_delta_slots(q, k, v, g, beta, self.pool, read, write, grouped=True)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self.live[sequence] = count - 1

    def decode(self, rows: Rows) -> torch.Tensor:
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence: int) -> torch.Tensor:
        plane = self.pool[self.planes[sequence, self.live[sequence]]]
        return self._stored(plane.float())


class _SsdSlots(_Slots):
    """Mamba-2 over planes, which are stored as [heads, d_v, d_k]."""

    def _plane(self) -> tuple[int, ...]:
        heads, d_k, d_v = self.shape.state
        return heads, d_v, d_k

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2)

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        x, dt, B, C = (torch.stack([getattr(p, n) for p in parts]) for n in ("x", "dt", "B", "C"))
        first = parts[0]
        dt = torch.nn.functional.softplus(dt + first.dt_bias)
        return ssd.ssd_slots(x, dt, dt * first.A, B, C, first.D, self.pool, read, write)


class _ScanSlots(_Slots):
    """The selective scan over planes of [groups, d_k, channels of a group]: Mamba-2 is a scan for
    each group, in which all channels of a head decay alike."""

    def _plane(self) -> tuple[int, ...]:
        s = self.shape
        return s.n_groups, s.d_k, s.n_heads // s.n_groups * s.d_v

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        """The plane of a state [heads, d_k, d_v], and the state of a plane."""
        s = self.shape
        share = s.n_heads // s.n_groups
        if len(state) == s.n_groups:
            return state.unflatten(2, (share, -1)).transpose(1, 2).flatten(0, 1)
        return state.unflatten(0, (-1, share)).transpose(1, 2).flatten(2)

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        s = self.shape
        x, dt, B, C = (torch.stack([getattr(p, n) for p in parts]) for n in ("x", "dt", "B", "C"))
        first = parts[0]
        dt = torch.nn.functional.softplus(dt + first.dt_bias)
        dt, A, D = (each.repeat_interleave(s.d_v, -1) for each in (dt, first.A, first.D))
        of_groups = (each.chunk(s.n_groups, -1) for each in (x.flatten(2), dt, A, D))
        outputs = [
            selective_scan.scan_slots(
                x,
                dt,
                A.expand(s.d_k, -1),
                B[..., i, :],
                C[..., i, :],
                D,
                self.pool[:, i],
                read,
                write,
            )
            for i, (x, dt, A, D) in enumerate(zip(*of_groups, strict=True))
        ]
        return torch.cat(outputs, -1).view_as(x)


class _ConvSlots(_Slots):
    """Convolution over planes of windows, which are stored as [taps - 1, channels]."""

    def _plane(self) -> tuple[int, ...]:
        return self.shape.d_k - 1, self.shape.n_heads

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2)

    def _run(self, parts: Sequence[Rows], read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        x = torch.stack([p.x for p in parts])
        first = parts[0]
        # here the windows are listed with the oldest first
        return conv.causal_conv_slots(x, first.weight, self.pool, read, write.flip(1), first.bias)


class _Log:
    """The delta rule with a log of k, u and g; the accepted rows are folded into the state."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.states = memory.empty(shape.n_sequences, *shape.state)
        self.logs: dict[int, delta_rule.DeltaLog] = {}

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.states[sequence] = state

    def verify(self, rows: Rows) -> torch.Tensor:
        outputs = []
        for i, sequence in enumerate(rows.sequences):
            p = rows.one(i)
            q, k, v, g, beta = (t.unsqueeze(0) for t in (p.q_normed, p.k_normed, p.v, p.g, p.beta))
            state = self.states[sequence : sequence + 1]
            o, log = delta_rule.gated_delta_log(q, k, v, g, beta, state, grouped=True)
            self.logs[sequence] = log
            outputs.append(o[0])
        return torch.cat(outputs)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            state = self.states[sequence : sequence + 1]
            self.states[sequence] = delta_rule.fold(
                state, self.logs[sequence], count, grouped=True
            )[0]

    def decode(self, rows: Rows) -> torch.Tensor:
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence: int) -> torch.Tensor:
        return self.states[sequence]


_F32 = ("float32",)

ENGINE = Engine(
    package="kernels",
    versions=(),
    kept=("kernels",),
    values={},
    kernels=(
        Kernel("gated_delta_slots", ("gdn", "kda"), _Slots, least_d=4, dtypes=_F32),
        Kernel("gated_delta_log", ("gdn", "kda"), _Log, log=True, least_d=4, dtypes=_F32),
        Kernel("ssd_slots", ("mamba2",), _SsdSlots, least_d=4, dtypes=_F32),
        Kernel("scan_slots", ("mamba2",), _ScanSlots, least_d=4, dtypes=_F32),
        Kernel("causal_conv_slots", ("conv",), _ConvSlots, dtypes=_F32),
    ),
)
