"""The gated delta rule on a GPU, and the fold of its log: few tokens one by one, prompts in chunks.

Few tokens: a program owns the columns [d_k, BV] of one state. Columns do not mix in the recurrence,
so it reads its tile once, runs through all tokens, and writes the tile where a token's state is
asked for. A token's bits do not depend on the tokens that came with it. Where states are read and
written comes from the host, as tensors, or from the device, as numbers of rows of one pool: then
the host knows nothing about a call that changes from call to call, and a CUDA graph can repeat it.

Chunks, in the WY form: everything about a chunk that does not need a state is solved for all chunks
at once; then one pass takes the state, in registers, from chunk to chunk. With c the running sum of
g, D_ij = e^(c_i - c_j) for i >= j and S0 the state before the chunk (as
kernels.recurrence.delta_rule.with_torch has it):

    U = W (V - diag(e^c) K S0),   W = (I + strictly lower(diag(beta) (K K^T * D)))^-1 diag(beta)
    O = scale diag(e^c) Q S0 + P U,   P = scale lower(Q K^T * D)
    S = e^(c_last) S0 + (diag(D_last) K)^T U

With a gate per key channel c_i is a row as long as a key and is inside the sums: K K^T * D
becomes sum over d of k_id k_jd e^(c_id - c_jd), no exponent above zero however strong the decay,
which costs a product of tiles; diag(e^c) K becomes e^c * K.

Products are plain f32. A token's bits do not depend on later tokens or on other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from kernels.recurrence import FoldArguments, UpdateLog
from kernels.recurrence.channel_gates import RawGates
from kernels.recurrence.delta_rule.naive import DeltaArguments, DeltaSlotArguments
from kernels.recurrence.with_triton import FEW_TOKENS, numbers_of, opened_gate, run_into
from kernels.triton_setup import LEAST_DEPTH, cdiv, jit, power_of_2


def gated_delta_rule(
    *inputs: *DeltaArguments, grouped: bool, n_snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    v, state = inputs[2], inputs[5]
    kept = state.new_empty(min(v.shape[1], n_snapshots), *state.shape)
    o = gated_delta_into(*inputs, grouped=grouped, slots=kept.unbind(0))
    return o, kept.transpose(0, 1)


def gated_delta_into(*inputs: *DeltaArguments, grouped: bool, slots: Sequence[Tensor]) -> Tensor:
    chunks, steps = (partial(run, grouped=grouped) for run in (run_chunks, run_recurrence))
    return run_into(inputs[:5], inputs[5], slots, chunks, steps)


def gated_delta_slots(
    *inputs: *DeltaSlotArguments, grouped: bool, raw: RawGates | None = None
) -> Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_slots. Every token by the recurrence."""
    return run_recurrence(inputs[:5], inputs[5], grouped=grouped, index=inputs[6:], raw=raw)[0]


def gated_delta_log(*inputs: *DeltaArguments, grouped: bool) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log. The state is read once and never
    written."""
    _, k, _, g, _, state = inputs
    run = run_chunks if g.shape[1] > FEW_TOKENS else run_recurrence
    o, u = run(inputs[:5], state, grouped=grouped)
    return o, UpdateLog(k, u, g)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _fold(
    state, k, u, g, out, counts, n_tokens, n_heads, n_k_heads, n_groups, d_k, d_v,
    state_b, state_h, state_k, state_v, k_b, k_t, k_h, k_d, u_b, u_t, u_h, u_d, g_b, g_t, g_h, g_d,
    GROUPED: tl.constexpr, CHANNELS: tl.constexpr, COUNTED: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    rows, columns = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_rows, in_columns = rows < d_k, columns < d_v
    inside = in_rows[:, None] & in_columns[None, :]

    tile = state + b * state_b + j * state_h
    S = tl.load(tile + rows[:, None] * state_k + columns[None, :] * state_v, inside, 0.0)
    k += b * k_b + i * k_h + rows * k_d
    u += b * u_b + j // (n_heads // n_groups) * u_h + columns * u_d
    g += b * g_b + j * g_h
    last = tl.load(counts + b) if COUNTED else n_tokens
    for _ in range(last):
        if CHANNELS:
            S *= tl.exp(tl.load(g + rows * g_d, in_rows, 0.0))[:, None]
        else:
            S *= tl.exp(tl.load(g))
        S += tl.load(k, in_rows, 0.0)[:, None] * tl.load(u, in_columns, 0.0)[None, :]
        k += k_t
        u += u_t
        g += g_t
    whole = out + (b * n_heads + j) * d_k * d_v
    tl.store(whole + rows[:, None] * d_v + columns[None, :], S, inside)


def fold(*inputs: *FoldArguments, grouped: bool, out: Tensor | None = None) -> Tensor:
    """See kernels.recurrence.delta_rule.fold. The recurrence with u known, so each column runs by
    itself."""
    state, log, n_tokens = inputs
    k, u, g = log
    if out is None:
        out = state.new_empty(state.shape)
    n_batch, n_heads, d_k, d_v = state.shape
    counted, channels = isinstance(n_tokens, Tensor), g.dim() == 4
    width = columns_per_program(n_batch * n_heads, d_v)
    _fold[(cdiv(d_v, width), n_heads, n_batch)](
        state, k, u, g, out, n_tokens if counted else out, 0 if counted else n_tokens,
        n_heads, k.shape[2], u.shape[2], d_k, d_v,
        *state.stride(), *k.stride(), *u.stride(), *g.stride(), *(() if channels else (0,)),
        GROUPED=grouped, CHANNELS=channels, COUNTED=counted,
        BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return out


# 128 rows by 8 columns are 32 registers in each thread of one warp, and 32 bytes of a row are one
# sector of memory. Wider tiles read longer runs; they pay once there are programs enough.
NARROW, WIDE = 8, 16
MANY_PROGRAMS = 2048


def columns_per_program(n_states: int, d_v: int) -> int:
    """Columns of a state in one program: few while there are too few programs for the device."""
    return WIDE if n_states * cdiv(d_v, WIDE) >= MANY_PROGRAMS else NARROW


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _recurrence(
    q, k, v, g, beta, state, o, u_log, slots, index, raw,
    n_tokens, n_heads, n_k_heads, d_k, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    g_b, g_t, g_h, g_d, beta_b, beta_t, beta_h,
    state_b, state_h, state_k, state_v, slot_b, slot_h, slot_k, slot_v,
    N_SLOTS: tl.constexpr, INDEXED: tl.constexpr, GROUPED: tl.constexpr, CHANNELS: tl.constexpr,
    LOG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """raw: eps, dt and a of each gate, and the bound, where q, k, g and beta are a layer's own."""
    j = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    rows, columns = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_rows, in_columns = rows < d_k, columns < d_v
    inside = in_rows[:, None] & in_columns[None, :]

    start, n_kept = b, N_SLOTS
    if INDEXED:
        read, write, n_kept, read_b, write_b, write_s = index
        start = tl.load(read + b * read_b)
        write += b * write_b
    tile = state + start * state_b + j * state_h
    S = tl.load(tile + rows[:, None] * state_k + columns[None, :] * state_v, inside, 0.0)
    slot_tile = rows[:, None] * slot_k + columns[None, :] * slot_v
    q += b * q_b + i * q_h + rows * q_d
    k += b * k_b + i * k_h + rows * k_d
    v += b * v_b + j * v_h + columns * v_d
    g += b * g_b + j * g_h
    beta += b * beta_b + j * beta_h
    written = (b * n_tokens * n_heads + j) * d_v + columns
    if len(raw) > 0:
        eps, bias, a, bound = raw
        if CHANNELS:
            bias = tl.load(bias + j * d_k + rows, in_rows, 0.0)
            a = tl.load(a + j * d_k + rows, in_rows, 0.0)
        else:
            bias, a = tl.load(bias + j), tl.load(a + j)
    for t in range(n_tokens):
        q_t_row = tl.load(q, in_rows, 0.0)
        k_t_row = tl.load(k, in_rows, 0.0)
        v_t_row = tl.load(v, in_columns, 0.0)
        if CHANNELS:
            gate = tl.load(g + rows * g_d, in_rows, 0.0)
        else:
            gate = tl.load(g)
        strength = tl.load(beta)
        if len(raw) > 0:
            q_t_row = q_t_row / tl.sqrt(tl.sum(q_t_row * q_t_row, 0) + eps)
            k_t_row = k_t_row / tl.sqrt(tl.sum(k_t_row * k_t_row, 0) + eps)
            gate, strength = opened_gate(gate + bias, a, bound), tl.sigmoid(strength)
        if CHANNELS:
            S *= tl.exp(gate)[:, None]
        else:
            S *= tl.exp(gate)
        u = strength * (v_t_row - tl.sum(S * k_t_row[:, None], 0))
        S += k_t_row[:, None] * u[None, :]
        tl.store(o + written, tl.sum(S * q_t_row[:, None], 0) * scale, in_columns)
        if LOG:
            tl.store(u_log + written, u, in_columns)
        if INDEXED or N_SLOTS > 0:
            back = n_tokens - 1 - t
            if back < n_kept:
                if INDEXED:
                    slot, row = state, tl.load(write + back * write_s)
                else:
                    slot, row = slots[0], b
                    for s in tl.static_range(1, N_SLOTS):
                        slot = tl.where(back == s, slots[s], slot)
                tl.store(slot + (row * slot_b + j * slot_h) + slot_tile, S, inside)
        q += q_t
        k += k_t
        v += v_t
        g += g_t
        beta += beta_t
        written += n_heads * d_v


def run_recurrence(
    inputs: Inputs,
    state: Tensor,
    slots: Sequence[Tensor] = (),
    *,
    grouped: bool,
    index: tuple[Tensor, Tensor] | None = None,
    raw: RawGates | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens of q, k, v, g, beta from `state` on; each slot receives a state, newest first.

    index, raw: of gated_delta_slots. Then `state` is the pool and `slots` is empty. Returns o and,
    where no state is written, the rows u [B, T, H_v, d_v]; else o again.
    """
    q, k, v, g, beta = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    o, log = v.new_empty(v.shape), not slots and index is None
    u = torch.empty_like(o) if log else o
    channels = g.dim() == 4
    width = columns_per_program(n_batch * n_heads, d_v)
    _recurrence[(cdiv(d_v, width), n_heads, n_batch)](
        q, k, v, g, beta, state, o, u, tuple(slots), numbers_of(index), raw or (),
        n_tokens, n_heads, n_k_heads, d_k, d_v, d_k**-0.5,
        *q.stride(), *k.stride(), *v.stride(),
        *g.stride(), *(() if channels else (0,)), *beta.stride(),
        *state.stride(), *(slots[0] if slots else state).stride(),
        N_SLOTS=len(slots), INDEXED=index is not None, GROUPED=grouped, CHANNELS=channels,
        LOG=log, BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return o, u


# Operands of plain f32 products pass through registers: longer chunks and wider tiles spill them.
CHUNK = 16
# columns of a state in one program; half of them where keys have more than 128 numbers
COLUMNS = 16
# numbers of a key that one product of tiles sums over
DEPTH = 32

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _solve(
    q, k, g, beta, solved, grams, decays,
    n_tokens, n_heads, n_k_heads, d_k, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, g_b, g_t, g_h, g_d, beta_b, beta_t, beta_h,
    GROUPED: tl.constexpr, CHANNELS: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """W, P and, of a gate per head, the decays e^c and D_last of one chunk and value head."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    t = chunk * C + at
    # tokens beyond the last neither decay nor write
    strength = tl.load(beta + b * beta_b + j * beta_h + t * beta_t, t < n_tokens, 0.0)
    g += b * g_b + j * g_h

    q += b * q_b + i * q_h + t[:, None] * q_t
    k += b * k_b + i * k_h
    keys = tl.zeros((C, C), tl.float32)
    queries = tl.zeros((C, C), tl.float32)
    for start in range(0, BK, BC):
        d = (start + tl.arange(0, BC))[None, :]
        inside = (t < n_tokens)[:, None] & (d < d_k)
        k_rows = tl.load(k + t[:, None] * k_t + d * k_d, inside, 0.0)
        q_rows = tl.load(q + d * q_d, inside, 0.0)
        if CHANNELS:
            # c of every row since token s, from the last s on: numbers of one sign are added
            since = tl.zeros((C, BC), tl.float32)
            for back in range(C):
                s = chunk * C + C - 1 - back
                of_s = (d < d_k) & (s + tl.zeros_like(d) < n_tokens)
                k_s = tl.load(k + s * k_t + d * k_d, of_s, 0.0) * tl.exp(since)
                here = column == C - 1 - back
                keys += tl.where(here, tl.sum(k_rows * k_s, 1)[:, None], 0.0)
                queries += tl.where(here, tl.sum(q_rows * k_s, 1)[:, None], 0.0)
                gate_s = tl.load(g + s * g_t + d * g_d, of_s, 0.0)
                since += tl.where(t[:, None] >= s, gate_s, 0.0)
        else:
            k_columns = tl.trans(k_rows)
            keys = tl.dot(k_rows, k_columns, keys, input_precision="ieee")
            queries = tl.dot(q_rows, k_columns, queries, input_precision="ieee")
    place = (b * n_heads + j) * tl.num_programs(0) + chunk
    if not CHANNELS:
        gate = tl.load(g + t * g_t, t < n_tokens, 0.0)
        # Each column's sum starts after its own token: numbers of one sign, no differences of
        # long sums, and no exponent above zero. Row s is c_s - c_column.
        D = tl.exp(tl.cumsum(tl.where(row > column, gate[:, None], 0.0), 0))
        keys *= D
        queries *= D
        tl.store(decays + place * 2 * C + at, tl.exp(tl.cumsum(gate, 0)))
        tl.store(decays + place * 2 * C + C + at, tl.sum(tl.where(row == C - 1, D, 0.0), 0))
    P = tl.where(row >= column, queries, 0.0) * scale
    M = tl.where(row > column, keys, 0.0) * strength[:, None]

    # forward substitution: row s is done when all rows before it are taken off
    inverse = tl.where(row == column, 1.0, 0.0)
    for s in range(C - 1):
        done = tl.sum(tl.where(row == s, inverse, 0.0), 0)
        inverse -= tl.sum(tl.where(column == s, M, 0.0), 1)[:, None] * done[None, :]

    tile = place * C * C + row * C + column
    tl.store(solved + tile, inverse * strength[None, :])
    tl.store(grams + tile, P)


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _pass(
    q, k, v, g, state, o, u_log, slot, solved, grams, decays,
    n_tokens, n_heads, n_k_heads, d_k, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d,
    state_b, state_h, state_k, state_v, slot_b, slot_h, slot_k, slot_v,
    GROUPED: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr, LOG: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """All chunks of one value head, for BV columns of its state [BK / BC, BC, BV]."""
    j = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    at, columns = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    d = tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]
    in_columns = (columns < d_v)[None, :]
    of_state = (d < d_k)[:, :, None] & in_columns[None]

    tile = state + b * state_b + j * state_h
    S = tl.load(tile + d[:, :, None] * state_k + columns * state_v, of_state, 0.0)
    q += b * q_b + i * q_h + d[:, None, :] * q_d
    k += b * k_b + i * k_h + d[:, None, :] * k_d
    v += b * v_b + j * v_h + columns[None, :] * v_d
    g += b * g_b + j * g_h + d[:, None, :] * g_d
    place = (b * n_heads + j) * tl.cdiv(n_tokens, C)
    tile = at[:, None] * C + at[None, :]
    for start in range(0, n_tokens, C):
        t = start + at
        inside = t < n_tokens
        of_keys = inside[None, :, None] & (d < d_k)[:, None, :]
        of_values = inside[:, None] & in_columns
        # all on their way before the first is used
        k_rows = tl.load(k + t[None, :, None] * k_t, of_keys, 0.0)
        v_rows = tl.load(v + t[:, None] * v_t, of_values, 0.0)
        W = tl.load(solved + place * C * C + tile)
        q_rows = tl.load(q + t[None, :, None] * q_t, of_keys, 0.0)
        P = tl.load(grams + place * C * C + tile)
        if CHANNELS:
            gates = tl.load(g + t[None, :, None] * g_t, of_keys, 0.0)
            behind = (at < C - 1) & (t + 1 < n_tokens)
            later = tl.load(
                g + (t + 1)[None, :, None] * g_t,
                behind[None, :, None] & (d < d_k)[:, None, :], 0.0,
            )  # fmt: skip
            decay = tl.exp(tl.cumsum(gates, 1))
            # from the last token back: numbers of one sign are added
            until_last = tl.exp(tl.cumsum(later, 1, reverse=True))
            whole = tl.exp(tl.sum(gates, 1))[:, :, None]
        else:
            decay = tl.load(decays + place * 2 * C + at)[None, :, None]
            until_last = tl.load(decays + place * 2 * C + C + at)[None, :, None]
            whole = tl.load(decays + place * 2 * C + C - 1)

        k_read = tl.sum(tl.dot(k_rows * decay, S, input_precision="ieee"), 0)
        u = tl.dot(W, v_rows - k_read, input_precision="ieee")
        q_read = tl.sum(tl.dot(q_rows * decay, S, input_precision="ieee"), 0)
        outputs = tl.dot(P, u, q_read * scale, input_precision="ieee")
        written = ((b * n_tokens + t[:, None]) * n_heads + j) * d_v + columns[None, :]
        tl.store(o + written, outputs, of_values)
        if LOG:
            tl.store(u_log + written, u, of_values)
        weighted = tl.permute(k_rows * until_last, (0, 2, 1))
        each = tl.broadcast_to(u[None], (BK // BC, C, BV))
        S = tl.dot(weighted, each, S * whole, input_precision="ieee")
        place += 1
    if STATE:
        tile = slot + b * slot_b + j * slot_h
        tl.store(tile + d[:, :, None] * slot_k + columns * slot_v, S, of_state)


def run_chunks(
    inputs: Inputs, state: Tensor, slot: Tensor | None = None, *, grouped: bool
) -> tuple[Tensor, Tensor]:
    """All tokens of q, k, v, g, beta from `state` on.

    The state after the last token goes into `slot`, if there is one; it may be `state` itself.
    Returns o and, without a slot, the rows u [B, T, H_v, d_v]; else o again.
    """
    q, k, v, g, beta = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    channels = g.dim() == 4
    gate_strides = g.stride() if channels else (*g.stride(), 0)
    n_chunks = cdiv(n_tokens, CHUNK)
    o = v.new_empty(v.shape)
    u = torch.empty_like(o) if slot is None else o
    solved, grams = v.new_empty(2, n_batch, n_heads, n_chunks, CHUNK, CHUNK).unbind(0)
    decays = v.new_empty(n_batch, n_heads, n_chunks, 2, CHUNK)
    deep = max(power_of_2(d_k), 2 * LEAST_DEPTH)
    depth = min(deep // 2, DEPTH)
    _solve[(n_chunks, n_heads, n_batch)](
        q, k, g, beta, solved, grams, decays,
        n_tokens, n_heads, n_k_heads, d_k, d_k**-0.5,
        *q.stride(), *k.stride(), *gate_strides, *beta.stride(),
        GROUPED=grouped, CHANNELS=channels, C=CHUNK, BK=deep, BC=depth, num_warps=1, num_stages=1,
    )  # fmt: skip
    width = COLUMNS if deep <= 128 else COLUMNS // 2
    _pass[(cdiv(d_v, width), n_heads, n_batch)](
        q, k, v, g, state, o, u, state if slot is None else slot, solved, grams, decays,
        n_tokens, n_heads, n_k_heads, d_k, d_v, d_k**-0.5,
        *q.stride(), *k.stride(), *v.stride(), *gate_strides,
        *state.stride(), *(state if slot is None else slot).stride(),
        GROUPED=grouped, CHANNELS=channels, STATE=slot is not None, LOG=slot is None,
        C=CHUNK, BK=deep, BC=depth, BV=width, num_warps=8, num_stages=1,
    )  # fmt: skip
    return o, u
