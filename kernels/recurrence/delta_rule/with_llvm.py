"""The gated delta rule on a CPU: the recurrence at every length.

A state is read once, stays in a cache meanwhile, and is written where it is kept. So 512 tokens
take half as long as the chunks of the torch version (two cores of Zen 4): those need about as many
operations, in products too small for what surrounds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.llvm.functions import rows_together as _rows
from kernels.llvm.functions import slot_rows, slot_table
from kernels.llvm.functions import strided as _where
from kernels.recurrence import FoldArguments, UpdateLog
from kernels.recurrence.delta_rule import programs_with_llvm as programs
from kernels.recurrence.delta_rule.naive import DeltaArguments, DeltaSlotArguments
from kernels.recurrence.delta_rule.programs_with_llvm import Sides

# numbers of a state times tokens that are worth a second thread
GRAIN = 32768
# bytes of states, the newest apart, that one layer writes: with several such layers they leave the
# caches anyway
LARGE = 1 << 20


def gated_delta_rule(
    *inputs: *DeltaArguments, grouped: bool, n_snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    kept = torch.empty(min(inputs[2].shape[1], n_snapshots), *inputs[5].shape)
    o = gated_delta_into(*inputs, grouped=grouped, slots=kept.unbind(0))
    return o, kept.transpose(0, 1)


def gated_delta_into(*inputs: *DeltaArguments, grouped: bool, slots: Sequence[Tensor]) -> Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_into; always invariant, as every token goes
    through the same operations, whatever other tokens there are."""
    where, table = slot_table(slots)
    return _run(inputs, _rows(inputs[5]), grouped, len(slots), where, indexed=False, holds=table)


def gated_delta_slots(*inputs: *DeltaSlotArguments, grouped: bool) -> Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_slots; with the bits of gated_delta_into."""
    pool, read, write = inputs[5:]
    where = slot_rows(pool, read, write)
    return _run(inputs, pool, grouped, write.shape[1], where, indexed=True)


def gated_delta_log(*inputs: *DeltaArguments, grouped: bool) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log; always invariant. The state after the
    last token is never made."""
    _, k, v, g, *_, state = inputs
    u = torch.empty(v.shape)
    o = _run(inputs, _rows(state), grouped, 0, (0, 0, 0, 0, 0), indexed=False, u=u)
    return o, UpdateLog(k, u, g)


def _run(
    inputs: DeltaArguments | DeltaSlotArguments,
    states: Tensor,
    grouped: bool,
    n_slots: int,
    where: tuple[int, ...],
    *,
    indexed: bool,
    u: Tensor | None = None,
    holds: object = None,
) -> Tensor:
    """where: the last arguments of the program; holds: what they point to, tensors apart. u: memory
    for the rows of the log, if any."""
    q, k, v, g, beta = inputs[:5]
    channels = g.dim() == 4
    q, k, v = _rows(q), _rows(k), _rows(v)
    if channels:
        g = _rows(g)
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    sides, o = Sides(d_k, d_v, channels), torch.empty(v.shape)
    programs.recurrence(sides, grouped, indexed, u is not None)(
        *_where(q, k, v, g, beta, states),
        o.data_ptr(),
        0 if u is None else u.data_ptr(),
        n_slots,
        n_tokens,
        n_heads,
        n_k_heads,
        _is_large(v, sides, n_slots),
        *where,
        tasks=n_batch * n_heads * (d_v // sides.width),
        chunk=_chunk(sides, n_tokens),
        threads=torch.get_num_threads(),
        holds=holds,
    )
    return o


def fold(*inputs: *FoldArguments, grouped: bool, out: Tensor | None = None) -> Tensor:
    """See kernels.recurrence.delta_rule.fold; token by token, with the states of
    gated_delta_into and ssd_into."""
    state, log, n_tokens = inputs
    left, right, state, channels = (*map(_rows, (*log[:2], state)), log.g.dim() == 4)
    g = _rows(log.g) if channels else log.g
    n_batch, n_heads, d_k, d_v = state.shape
    if out is None:
        out = torch.empty(state.shape)
    counts = n_tokens if isinstance(n_tokens, int) else n_tokens.contiguous()
    sides = Sides(d_k, d_v, channels)
    programs.fold(sides, grouped, not isinstance(counts, int))(
        *_where(state, left, right, g, out),
        counts if isinstance(counts, int) else counts.data_ptr(),
        n_heads,
        left.shape[2],
        right.shape[2],
        tasks=n_batch * n_heads * (d_v // sides.width),
        chunk=_chunk(sides, left.shape[1]),
        threads=torch.get_num_threads(),
    )
    return out


def _is_large(v: Tensor, sides: Sides, n_slots: int) -> bool:
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_older = min(n_slots, n_tokens) - 1
    return n_batch * n_older * n_heads * sides.d_k * d_v * 4 >= LARGE


def _chunk(sides: Sides, n_tokens: int) -> int:
    """Tasks that a thread takes at a time."""
    return -(-GRAIN // (max(n_tokens, 1) * sides.d_k * sides.width))
