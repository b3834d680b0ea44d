"""State-space duality on a CPU: the recurrence at every length.

A row of a state takes three operations a number, with what a token brings in the nearest cache:
chunks would need more of them, in products too small for what surrounds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.recurrence.ssd import programs_with_llvm as programs
from kernels.recurrence.ssd.naive import SsdArguments, SsdInputs, SsdLog, SsdSlotArguments
from kernels.recurrence.ssd.programs_with_llvm import SsdSides

# numbers of a state times tokens that are worth a second thread
GRAIN = 32768


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.ssd.ssd."""
    kept = torch.empty(min(inputs[0].shape[1], n_snapshots), *inputs[6].shape)
    return ssd_into(*inputs, slots=kept.unbind(0)), kept.transpose(0, 1)


def ssd_into(*inputs: *SsdArguments, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """See kernels.recurrence.ssd.ssd_into; always invariant, as every token goes through the same
    operations, whatever other tokens there are."""
    strides = slots[0].stride()
    if any(slot.stride() != strides for slot in slots):
        raise ValueError("the slots of one call differ in their strides")
    if strides[3] != 1 and slots[0].shape[3] > 1:
        raise ValueError("the numbers of a slot's rows do not lie side by side")
    table = array("q", [slot.data_ptr() for slot in slots])
    where = table.buffer_info()[0], *strides[:3]
    return _run(inputs[:6], _rows(inputs[6]), len(slots), where, indexed=False, holds=table)


def ssd_slots(*inputs: *SsdSlotArguments) -> torch.Tensor:
    """See kernels.recurrence.ssd.ssd_slots."""
    pool, read, write = inputs[6:]
    if pool.stride(3) != 1 and pool.shape[3] > 1:
        raise ValueError("the numbers of the pool's rows do not lie side by side")
    where = read.data_ptr(), read.stride(0), write.data_ptr(), *write.stride()
    return _run(inputs[:6], pool, write.shape[1], where, indexed=True)


def ssd_log(*inputs: *SsdArguments) -> tuple[torch.Tensor, SsdLog]:
    """See kernels.recurrence.ssd.ssd_log; always invariant."""
    x, _, g, B, *_ = inputs
    u = torch.empty(x.shape)
    o = _run(inputs[:6], _rows(inputs[6]), 0, (0, 0, 0, 0), indexed=False, u=u)
    return o, SsdLog(u, B, g)


def _run(
    inputs: SsdInputs,
    states: torch.Tensor,
    n_slots: int,
    where: tuple[int, ...],
    *,
    indexed: bool,
    u: torch.Tensor | None = None,
    holds: object = None,
) -> torch.Tensor:
    """where: the last arguments of the program; holds: what they point to, tensors apart. u: memory
    for the rows of the log, if any."""
    x, dt, g, B, C, D = inputs
    x, B, C, D = _rows(x), _rows(B), _rows(C), D.contiguous()
    n_batch, n_tokens, n_heads, p = x.shape
    sides = SsdSides(p, B.shape[3])
    o = torch.empty(x.shape)
    programs.recurrence(sides, indexed=indexed, log=u is not None)(
        *_where(x),
        *_where(dt),
        *_where(g),
        *_where(B),
        *_where(C),
        *_where(states),
        D.data_ptr(),
        o.data_ptr(),
        0 if u is None else u.data_ptr(),
        n_slots,
        n_tokens,
        n_heads,
        B.shape[2],
        *where,
        tasks=n_batch * n_heads * (p // sides.rows),
        chunk=_chunk(sides, n_tokens),
        threads=torch.get_num_threads(),
        holds=holds,
    )
    return o


def fold(
    state: torch.Tensor,
    log: SsdLog,
    n_tokens: int | torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.recurrence.ssd.fold. Here the very states of ssd_into."""
    u, B, state = _rows(log.u), _rows(log.B), _rows(state)
    n_batch, n_heads, p, n = state.shape
    if out is None:
        out = torch.empty(state.shape)
    counts = n_tokens if isinstance(n_tokens, int) else n_tokens.contiguous()
    sides = SsdSides(p, n)
    programs.fold(sides, counted=not isinstance(counts, int))(
        *_where(state),
        *_where(u),
        *_where(B),
        *_where(log.g),
        *_where(out),
        counts if isinstance(counts, int) else counts.data_ptr(),
        n_heads,
        B.shape[2],
        tasks=n_batch * n_heads * (p // sides.rows),
        chunk=_chunk(sides, u.shape[1]),
        threads=torch.get_num_threads(),
    )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _where(x: torch.Tensor) -> tuple[int, ...]:
    return x.data_ptr(), *x.stride()[:3]


def _chunk(sides: SsdSides, n_tokens: int) -> int:
    """Tasks that a thread takes at a time."""
    return -(-GRAIN // (max(n_tokens, 1) * sides.n * sides.rows))
