"""The gated delta rule on a CPU: the recurrence at every length.

A state is read once, stays in a cache meanwhile, and is written where it is kept. So 512 tokens
take half as long as the chunks of the torch version (two cores of Zen 4): those need about as many
operations, in products too small for what surrounds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.llvm.functions import addresses
from kernels.llvm.functions import rows_together as _rows
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
    v, strides = inputs[2], slots[0].stride()
    if any(slot.stride() != strides for slot in slots):
        raise ValueError("the slots of one call differ in their strides")
    if strides[3] != 1 and v.shape[3] > 1:
        raise ValueError("the numbers of a slot's rows do not lie side by side")
    table = array("q", [slot.data_ptr() for slot in slots])
    places = (table.buffer_info()[0], *strides[:3])
    o = torch.empty(v.shape)
    _run(inputs, grouped, places, len(slots), o, None, holds=table)
    return o


def gated_delta_slots(*inputs: *DeltaSlotArguments, grouped: bool) -> Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_slots; with the bits of gated_delta_into."""
    *tokens, pool, read, write = inputs
    q, k, v, g, beta = tokens
    if pool.stride(3) != 1 and v.shape[3] > 1:
        raise ValueError("the numbers of a state's rows do not lie side by side")
    q, k, v = _rows(q), _rows(k), _rows(v)
    channels = g.dim() == 4
    if channels:
        g = _rows(g)
    n_batch, n_tokens, n_heads, d_v = v.shape
    sides = Sides(k.shape[3], d_v, channels)
    o, read, write = torch.empty(v.shape), read.contiguous(), write.contiguous()
    programs.slots(sides, grouped)(
        *_where(q, k, v, g, beta, pool),
        *addresses(read, write, o),
        write.shape[1],
        n_tokens,
        n_heads,
        k.shape[2],
        _is_large(v, sides, write.shape[1]),
        tasks=n_batch * n_heads * (d_v // sides.width),
        chunk=_chunk(sides, n_tokens),
        threads=torch.get_num_threads(),
    )
    return o


def gated_delta_log(*inputs: *DeltaArguments, grouped: bool) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log; always invariant. The state after the
    last token is never made."""
    _, k, v, g, *_ = inputs
    o, u = torch.empty(v.shape), torch.empty(v.shape)
    _run(inputs, grouped, (0, 0, 0, 0), 0, o, u)
    return o, UpdateLog(k, u, g)


def _run(
    inputs: DeltaArguments,
    grouped: bool,
    slots: tuple[int, ...],
    n_slots: int,
    o: Tensor,
    u: Tensor | None,
    holds: object = None,
) -> None:
    """slots: the address of their addresses, which `holds` holds, and their strides."""
    q, k, v, g, beta, state = inputs
    channels = g.dim() == 4
    q, k, v, state = _rows(q), _rows(k), _rows(v), _rows(state)
    if channels:
        g = _rows(g)
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    sides = Sides(d_k, d_v, channels)
    programs.recurrence(sides, grouped, u is not None)(
        *_where(q, k, v, g, beta, state),
        *slots,
        o.data_ptr(),
        0 if u is None else u.data_ptr(),
        n_slots,
        n_tokens,
        n_heads,
        n_k_heads,
        _is_large(v, sides, n_slots),
        tasks=n_batch * n_heads * (d_v // sides.width),
        chunk=_chunk(sides, n_tokens),
        threads=torch.get_num_threads(),
        holds=holds,
    )


def fold(*inputs: *FoldArguments, grouped: bool, out: Tensor | None = None) -> Tensor:
    """See kernels.recurrence.delta_rule.fold; token by token, with the states of
    gated_delta_into and ssd_into."""
    state, log, n_tokens = inputs
    left, right, state, channels = (*map(_rows, (*log[:2], state)), log.g.dim() == 4)
    g = _rows(log.g) if channels else log.g
    n_batch, n_heads, *size = state.shape
    if out is None:
        out = torch.empty(state.shape)
    counts = n_tokens if isinstance(n_tokens, int) else n_tokens.contiguous()
    sides = Sides(*size, channels)
    programs.fold(sides, grouped, not isinstance(counts, int))(
        *_where(state, left, right, g, out),
        counts if isinstance(counts, int) else counts.data_ptr(),
        n_heads,
        left.shape[2],
        right.shape[2],
        tasks=n_batch * n_heads * (sides.d_v // sides.width),
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
