"""State-space duality on a GPU: few tokens one by one, prompts in chunks.

Few tokens: a program owns BP rows [BP, N] of one state. Rows do not mix in the recurrence, so it
reads its tile once, runs through all tokens, and writes the tile where a token's state is asked
for. Where states are read and written comes from the host, as tensors, or from the device, as
numbers of rows of one pool (kernels.recurrence.delta_rule.with_triton says why).

Chunks: what a chunk's tokens read of one another is the same for all heads of a group up to the
decays: C B^T is formed once, for all chunks at once; then one pass takes the state, in registers,
from chunk to chunk. With c the running sum of g, M_ij = e^(c_i - c_j) for i >= j, S0 the state
before:

    O = (C B^T * M) U + diag(e^c) C S0^T + D X,   S = e^(c_last) S0 + U^T diag(M_last) B

Products are plain f32. A token's bits do not depend on later tokens or on other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from kernels.pointwise.with_triton import STEP_GATES
from kernels.recurrence import UpdateLog
from kernels.recurrence.ssd.naive import SsdArguments, SsdInputs, SsdSlotArguments
from kernels.recurrence.with_triton import FEW_TOKENS, numbers_of, run_into
from kernels.triton_setup import LEAST_DEPTH, cdiv, jit, power_of_2


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[Tensor, Tensor]:
    x, *_, state = inputs
    kept = state.new_empty(min(x.shape[1], n_snapshots), *state.shape)
    return ssd_into(*inputs, slots=kept.unbind(0)), kept.transpose(0, 1)


def ssd_into(*inputs: *SsdArguments, slots: Sequence[Tensor]) -> Tensor:
    return run_into(inputs[:6], inputs[6], slots, run_chunks, run_recurrence, (5,))


def ssd_slots(*inputs: *SsdSlotArguments, raw: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """See kernels.recurrence.ssd.ssd_slots. Every token by the recurrence."""
    return run_recurrence(inputs[:6], inputs[6], index=inputs[7:], raw=raw)[0]


def ssd_log(*inputs: *SsdArguments) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.ssd.ssd_log. The state is read once and never written."""
    x, _, g, B, *_, state = inputs
    o, u = (run_chunks if x.shape[1] > FEW_TOKENS else run_recurrence)(inputs[:6], state)
    return o, UpdateLog(u, B, g)


# rows of a state in one program: with N = 128, 32 registers in each thread of one warp
ROWS = 8


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _recurrence(
    x, dt, g, B, C, D, state, o, u_log, slots, index, raw,
    n_tokens, n_heads, n_groups, p_size, n_size,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, g_b, g_t, g_h,
    B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n, D_h,
    state_b, state_h, state_p, state_n, slot_b, slot_h, slot_p, slot_n,
    N_SLOTS: tl.constexpr, INDEXED: tl.constexpr, LOG: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = h // (n_heads // n_groups)
    p, n = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_rows, in_columns = p < p_size, n < n_size
    inside = in_rows[:, None] & in_columns[None, :]

    start, n_kept = b, N_SLOTS
    if INDEXED:
        read, write, n_kept, read_b, write_b, write_s = index
        start = tl.load(read + b * read_b)
        write += b * write_b
    tile = state + start * state_b + h * state_h
    S = tl.load(tile + p[:, None] * state_p + n[None, :] * state_n, inside, 0.0)
    slot_tile = p[:, None] * slot_p + n[None, :] * slot_n
    x += b * x_b + h * x_h + p * x_p
    dt += b * dt_b + h * dt_h
    g += b * g_b + h * g_h
    B += b * B_b + group * B_g + n * B_n
    C += b * C_b + group * C_g + n * C_n
    skip = tl.load(D + h * D_h)
    written = (b * n_tokens * n_heads + h) * p_size + p
    if len(raw) > 0:
        bias, a = tl.load(raw[0] + h), tl.load(raw[1] + h)
    for t in range(n_tokens):
        x_row = tl.load(x, in_rows, 0.0)
        B_row = tl.load(B, in_columns, 0.0)
        C_row = tl.load(C, in_columns, 0.0)
        if len(raw) > 0:
            step, gate = STEP_GATES(tl.load(dt), bias, a)
        else:
            step, gate = tl.load(dt), tl.load(g)
        u = step * x_row
        S = S * tl.exp(gate) + u[:, None] * B_row[None, :]
        tl.store(o + written, tl.sum(S * C_row[None, :], 1) + skip * x_row, in_rows)
        if LOG:
            tl.store(u_log + written, u, in_rows)
        if INDEXED or N_SLOTS > 0:
            back = n_tokens - 1 - t
            if back < n_kept:
                if INDEXED:
                    slot, row = state, tl.load(write + back * write_s)
                else:
                    slot, row = slots[0], b
                    for s in tl.static_range(1, N_SLOTS):
                        slot = tl.where(back == s, slots[s], slot)
                tl.store(slot + (row * slot_b + h * slot_h) + slot_tile, S, inside)
        x += x_t
        dt += dt_t
        g += g_t
        B += B_t
        C += C_t
        written += n_heads * p_size


def run_recurrence(
    inputs: SsdInputs,
    state: Tensor,
    slots: Sequence[Tensor] = (),
    *,
    index: tuple[Tensor, Tensor] | None = None,
    raw: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens of the inputs from `state` on; each slot receives a state, newest first.

    index, raw: of ssd_slots. Then `state` is the pool and `slots` is empty. Returns o and, where no
    state is written, the rows u [B, T, H, P]; else o again.
    """
    x, dt, g, B, C, D = inputs
    n_batch, n_tokens, n_heads, p = x.shape
    n_groups, n = B.shape[2:]
    o, log = x.new_empty(x.shape), not slots and index is None
    u = torch.empty_like(o) if log else o
    _recurrence[(cdiv(p, ROWS), n_heads, n_batch)](
        x, dt, g, B, C, D, state, o, u, tuple(slots), numbers_of(index), raw or (),
        n_tokens, n_heads, n_groups, p, n,
        *x.stride(), *dt.stride(), *g.stride(), *B.stride(), *C.stride(), *D.stride(),
        *state.stride(), *(slots[0] if slots else state).stride(),
        N_SLOTS=len(slots), INDEXED=index is not None, LOG=log,
        BP=ROWS, BN=power_of_2(n), num_warps=1,
    )  # fmt: skip
    return o, u


# Operands of plain f32 products pass through registers: longer chunks and wider tiles spill them.
CHUNK = 16
# rows of a state in one program; half of them where rows have more than 128 numbers
CHUNK_ROWS = 16
# numbers of a row that one product of tiles sums over
DEPTH = 32


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _grams(
    B, C, grams, n_tokens, n_groups, n_size, B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n,
    T: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """C B^T of one chunk and group."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    at = tl.arange(0, T)
    t = chunk * T + at
    B += b * B_b + group * B_g + t[:, None] * B_t
    C += b * C_b + group * C_g + t[:, None] * C_t
    total = tl.zeros((T, T), tl.float32)
    for start in range(0, BN, BD):
        n = (start + tl.arange(0, BD))[None, :]
        inside = (t < n_tokens)[:, None] & (n < n_size)
        written = tl.trans(tl.load(B + n * B_n, inside, 0.0))
        total = tl.dot(tl.load(C + n * C_n, inside, 0.0), written, total, input_precision="ieee")
    place = (b * n_groups + group) * tl.num_programs(0) + chunk
    tl.store(grams + place * T * T + at[:, None] * T + at[None, :], total)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _pass(
    x, dt, g, B, C, D, state, o, u_log, slot, grams,
    n_tokens, n_heads, n_groups, p_size, n_size,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, g_b, g_t, g_h,
    B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n, D_h,
    state_b, state_h, state_p, state_n, slot_b, slot_h, slot_p, slot_n,
    STATE: tl.constexpr, LOG: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """All chunks of one head, for BP rows of its state, as S^T [BN / BD, BD, BP]."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = h // (n_heads // n_groups)
    at, p = tl.arange(0, T), tl.program_id(0) * BP + tl.arange(0, BP)
    row, column = at[:, None], at[None, :]
    n = tl.arange(0, BN // BD)[:, None] * BD + tl.arange(0, BD)[None, :]
    in_rows = (p < p_size)[None, :]
    of_state = (n < n_size)[:, :, None] & in_rows[None]

    tile = state + b * state_b + h * state_h
    S = tl.load(tile + n[:, :, None] * state_n + p * state_p, of_state, 0.0)
    x += b * x_b + h * x_h + p[None, :] * x_p
    dt += b * dt_b + h * dt_h
    g += b * g_b + h * g_h
    B += b * B_b + group * B_g + n[:, None, :] * B_n
    C += b * C_b + group * C_g + n[:, None, :] * C_n
    skip = tl.load(D + h * D_h)
    place = (b * n_groups + group) * tl.cdiv(n_tokens, T)
    for start in range(0, n_tokens, T):
        t = start + at
        inside = t < n_tokens
        of_values = inside[:, None] & in_rows
        of_columns = inside[None, :, None] & (n < n_size)[:, None, :]
        # all on their way before the first is used; tokens beyond the last neither decay nor write
        x_rows = tl.load(x + t[:, None] * x_t, of_values, 0.0)
        step = tl.load(dt + t * dt_t, inside, 0.0)
        gate = tl.load(g + t * g_t, inside, 0.0)
        C_rows = tl.load(C + t[None, :, None] * C_t, of_columns, 0.0)
        B_rows = tl.load(B + t[None, :, None] * B_t, of_columns, 0.0)
        gram = tl.load(grams + place * T * T + row * T + column)

        # Each column's sum starts after its own token: numbers of one sign, no differences of
        # long sums, and no exponent above zero. Row i is c_i - c_column.
        M = tl.exp(tl.cumsum(tl.where(row > column, gate[:, None], 0.0), 0))
        decay = tl.exp(tl.cumsum(gate, 0))
        u = x_rows * step[:, None]
        read = tl.sum(tl.dot(C_rows, S, input_precision="ieee"), 0)
        read = read * decay[:, None] + skip * x_rows
        weights = tl.where(row >= column, gram * M, 0.0)
        outputs = tl.dot(weights, u, read, input_precision="ieee")
        written = ((b * n_tokens + t[:, None]) * n_heads + h) * p_size + p[None, :]
        tl.store(o + written, outputs, of_values)
        if LOG:
            tl.store(u_log + written, u, of_values)
        until_last = tl.sum(tl.where(row == T - 1, M, 0.0), 0)
        whole = tl.sum(tl.where(at == T - 1, decay, 0.0), 0)
        each = tl.broadcast_to((u * until_last[:, None])[None], (BN // BD, T, BP))
        S = tl.dot(tl.permute(B_rows, (0, 2, 1)), each, S * whole, input_precision="ieee")
        place += 1
    if STATE:
        tile = slot + b * slot_b + h * slot_h
        tl.store(tile + n[:, :, None] * slot_n + p * slot_p, S, of_state)


def run_chunks(
    inputs: SsdInputs, state: Tensor, slot: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All tokens of the inputs from `state` on.

    The state after the last token goes into `slot`, if there is one; it may be `state` itself.
    Returns o and, without a slot, the rows u [B, T, H, P]; else o again.
    """
    x, dt, g, B, C, D = inputs
    n_batch, n_tokens, n_heads, p = x.shape
    n_groups, n = B.shape[2:]
    n_chunks = cdiv(n_tokens, CHUNK)
    o = x.new_empty(x.shape)
    u = torch.empty_like(o) if slot is None else o
    grams = x.new_empty(n_batch, n_groups, n_chunks, CHUNK, CHUNK)
    wide = max(power_of_2(n), 2 * LEAST_DEPTH)
    depth = min(wide // 2, DEPTH)
    _grams[(n_chunks, n_groups, n_batch)](
        B, C, grams, n_tokens, n_groups, n, *B.stride(), *C.stride(),
        T=CHUNK, BN=wide, BD=depth, num_warps=1, num_stages=1,
    )  # fmt: skip
    rows = CHUNK_ROWS if wide <= 128 else CHUNK_ROWS // 2
    _pass[(cdiv(p, rows), n_heads, n_batch)](
        x, dt, g, B, C, D, state, o, u, state if slot is None else slot, grams,
        n_tokens, n_heads, n_groups, p, n,
        *x.stride(), *dt.stride(), *g.stride(), *B.stride(), *C.stride(), *D.stride(),
        *state.stride(), *(state if slot is None else slot).stride(),
        STATE=slot is not None, LOG=slot is None,
        T=CHUNK, BN=wide, BD=depth, BP=rows, num_warps=8, num_stages=1,
    )  # fmt: skip
    return o, u
