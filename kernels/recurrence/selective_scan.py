"""The selective scan: the recurrent core of a Mamba layer (Gu & Dao 2023, arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import (
    StateSlots,
    addresses,
    exp,
    slot_rows,
    slot_table,
    strided,
    strided_tensors,
    vectors,
)
from kernels.pointwise.with_torch import pointwise

_TRITON = "kernels.recurrence.with_triton"

Slots = Sequence[Tensor]
ScanArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, A, B, C, D and the state, as scan_into describes them."""
ScanSlotArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, A, B, C and D, pool, read and write."""


@operation(triton=_TRITON, llvm=__name__)
def scan_into(*inputs: *ScanArguments, slots: Slots, invariant: bool = False) -> Tensor:
    """Runs T tokens through the recurrence and keeps the newest states.

    Per channel, with a row of N numbers:  S_n <- e^(dt A_n) S_n + dt x B_n;  o = sum of C_n S_n +
    D x, read after the write.

    inputs: x, dt, A, B, C, D, state. x, dt: [B, T, C], dt > 0. A: [N, C], log decay for a step of
    1, <= 0. B, C: [B, T, N]. D: [C]. state: [B, N, C]. slots: 1 .. T tensors [B, N, C], strided
    alike, whose [N, C] are contiguous; slots[s] receives the state s tokens before the last one,
    and one of them may be `state` itself. All f32. Returns o [B, T, C]. invariant: outputs and
    states have the same bits in whatever portions tokens and sequences come.
    """
    x, dt, A, B, C, D, S = inputs
    n_tokens, outputs = x.shape[1], []
    u, kept = dt * x, [*slots]
    for t in range(n_tokens):
        decay = pointwise(torch.exp, dt[:, t, None] * A, invariant=invariant)
        S = torch.addcmul(decay * S, u[:, t, None], B[:, t, :, None])
        y = D * x[:, t]
        # in one order for every channel, which a sum of PyTorch's does not promise
        for n in range(A.shape[0]):
            y = torch.addcmul(y, S[:, n], C[:, t, n, None])
        outputs.append(y)
        if (back := n_tokens - t - 1) < len(kept):
            kept[back].copy_(S)
    return torch.stack(outputs, 1)


@operation(triton=_TRITON, llvm=__name__)
def scan_slots(*inputs: *ScanSlotArguments) -> Tensor:
    """scan_into from and to rows of a pool [n_rows, N, C], each contiguous: see
    kernels.recurrence.ssd.ssd_slots, whose promises hold here too."""
    return _slots_of(torch_version(scan_into), *inputs)


# Channel by channel.


def scan_into_naive(*inputs: *ScanArguments, slots: Slots) -> Tensor:
    x, dt, A, B, C, D, state = inputs
    o, states = torch.empty_like(x), [state.clone()]
    for t in range(x.shape[1]):
        S = states[-1].clone()
        for b in range(x.shape[0]):
            for c in range(x.shape[2]):
                step, value = dt[b, t, c], x[b, t, c]
                S[b, :, c] = torch.exp(step * A[:, c]) * S[b, :, c] + step * value * B[b, t]
                o[b, t, c] = torch.dot(S[b, :, c], C[b, t]) + D[c] * value
        states.append(S)
    for back, slot in enumerate(slots):
        slot.copy_(states[-1 - back])
    return o


def scan_slots_naive(*inputs: *ScanSlotArguments) -> Tensor:
    return _slots_of(scan_into_naive, *inputs)


def _slots_of(run: Callable[..., Tensor], *inputs: *ScanSlotArguments) -> Tensor:
    x, dt, A, B, C, D, pool, read, write = inputs
    states = pool.new_empty(write.shape[1], x.shape[0], *pool.shape[1:])
    o = run(x, dt, A, B, C, D, pool[read], slots=states.unbind(0))
    pool[write.t()] = states
    return o


# On a CPU: a task takes some channels of a sequence through all tokens, and what it does to a
# channel depends on nothing else. States before the kept ones lie where the oldest of these will.

_WIDTH, _GRAIN = 64, 8192
"""Channels of a task, where they divide all; numbers of states and tokens worth a thread."""


def scan_into_with_llvm(*inputs: *ScanArguments, slots: Slots) -> Tensor:
    state = inputs[6]
    if not all(slot[:1].is_contiguous() for slot in slots):
        raise ValueError("a slot of the call is not contiguous")
    where, table = slot_table(slots)
    states = state if state[:1].is_contiguous() else state.contiguous()
    return _scan(inputs[:6], states, len(slots), where, holds=table)


def scan_slots_with_llvm(*inputs: *ScanSlotArguments) -> Tensor:
    pool, read, write = inputs[6:]
    if not pool[:1].is_contiguous():
        raise ValueError("the numbers of a state do not lie side by side")
    return _scan(inputs[:6], pool, write.shape[1], slot_rows(pool, read, write))


def _scan(
    inputs: tuple[Tensor, ...],
    states: Tensor,
    n_slots: int,
    where: tuple[int, ...],
    holds: object = None,
) -> Tensor:
    """where: the last arguments of the program; holds: what they point to, tensors apart."""
    x, dt, A, B, C, D = inputs
    of_tokens = [each if each.stride(2) == 1 else each.contiguous() for each in (x, dt, B, C)]
    A, D, o = A.contiguous(), D.contiguous(), torch.empty(x.shape)
    n_batch, n_tokens, n_channels = x.shape
    width = _WIDTH if n_channels % _WIDTH == 0 else n_channels
    n_state = A.shape[0]
    places = [n for each in of_tokens for n in (each.data_ptr(), *each.stride()[:2])]
    _program(n_channels, width, n_state, holds is None)(
        *places,
        *addresses(A, D, o),
        n_tokens,
        n_slots,
        *strided(states),
        *where,
        tasks=n_batch * (n_channels // width),
        chunk=-(-_GRAIN // (n_tokens * n_state * width)),
        threads=torch.get_num_threads(),
        holds=holds,
    )
    return o


@kernel(26)
def _program(
    code: Code,
    args: Sequence[Value],
    task: Value,
    n_channels: int,
    width: int,
    n_state: int,
    indexed: bool,
) -> None:
    """Arguments: x, dt, B and C, addresses with two strides; A, D and o; n_tokens, n_slots; the
    states, a tensor; then those of StateSlots."""
    tokens = [(args[i], args[i + 1] * 4, args[i + 2] * 4) for i in range(0, 12, 3)]
    A, D, o, n_tokens, n_slots = args[12:17]
    (states,) = strided_tensors(args[17:], 1)
    row, n_parts = 4 * n_channels, n_channels // width

    def load_row(place: Value, count: int) -> Value:
        return code.load_first(place, F32X16, count)

    b, column = task // n_parts, task % n_parts * (4 * width)
    x, dt, B, C = ((at + b * steps, step) for at, steps, step in tokens)

    places = StateSlots(code, states, args[21:], b, indexed)
    for at, count in vectors(code, width):
        place = column + at
        source = code.variable(places.begin.address + place)
        skip = load_row(D + place, count)
        with code.loop(0, n_tokens) as t:
            kept = places.slot(code.smaller(n_tokens - t - 1, n_slots - 1))
            target = kept.address + place
            value = load_row(x[0] + t * x[1] + place, count)
            step = load_row(dt[0] + t * dt[1] + place, count)
            written, total = value * step, code.variable(value * skip)
            with code.loop(0, code.integer(n_state)) as n:
                decay = exp(code, step * load_row(A + n * row + place, count))
                at_n = code.splat(code.load(B[0] + t * B[1] + n * 4, F32))
                s = load_row(source.value + n * row, count)
                s = code.fma(written, at_n, s * decay)
                code.store_first(s, target + n * row, count)
                read_by = code.splat(code.load(C[0] + t * C[1] + n * 4, F32))
                total.set(code.fma(s, read_by, total.value))
            source.set(target)
            code.store_first(total.value, o + (b * n_tokens + t) * row + place, count)
