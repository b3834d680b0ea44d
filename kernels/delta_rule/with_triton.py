"""The gated delta rule on a GPU: one pass over few tokens with the state in registers.

Prompts with one gate per head run in chunks, by kernels.delta_rule.chunks_with_triton.

A program owns the columns [d_k, BV] of one state. Columns do not mix in the recurrence, so it
reads its tile once, runs through all tokens, and writes the tile where a token's state is asked
for. A token's bits do not depend on the tokens that came with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.delta_rule.chunks_with_triton import Inputs, run_chunks
from kernels.delta_rule.log import DeltaLog
from kernels.triton_setup import cdiv, jit, power_of_2

# 128 rows by 8 columns are 32 registers in each thread of one warp, and 32 bytes of a row are one
# sector of memory. Wider tiles read longer runs; they pay once there are programs enough.
NARROW, WIDE = 8, 16
MANY_PROGRAMS = 2048
# With more tokens the chunks should pay (not yet measured): the recurrence waits for each token's
# sums, a chunk for four products of tiles.
FEW_TOKENS = 16
# slots are arguments of their own, so each of their numbers is a kernel of its own
MAX_SLOTS = 32


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _recurrence(
    q, k, v, g, beta, state, o, u_log, slots,
    n_tokens, n_heads, n_k_heads, d_k, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    g_b, g_t, g_h, g_d, beta_b, beta_t, beta_h,
    state_b, state_h, state_k, state_v, slot_b, slot_h, slot_k, slot_v,
    N_SLOTS: tl.constexpr, GROUPED: tl.constexpr, CHANNELS: tl.constexpr, LOG: tl.constexpr,
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
    slot_tile = b * slot_b + j * slot_h + rows[:, None] * slot_k + columns[None, :] * slot_v
    q += b * q_b + i * q_h + rows * q_d
    k += b * k_b + i * k_h + rows * k_d
    v += b * v_b + j * v_h + columns * v_d
    g += b * g_b + j * g_h
    beta += b * beta_b + j * beta_h
    written = (b * n_tokens * n_heads + j) * d_v + columns
    for t in range(n_tokens):
        q_t_row = tl.load(q, in_rows, 0.0)
        k_t_row = tl.load(k, in_rows, 0.0)
        v_t_row = tl.load(v, in_columns, 0.0)
        if CHANNELS:
            S *= tl.exp(tl.load(g + rows * g_d, in_rows, 0.0))[:, None]
        else:
            S *= tl.exp(tl.load(g))
        u = tl.load(beta) * (v_t_row - tl.sum(S * k_t_row[:, None], 0))
        S += k_t_row[:, None] * u[None, :]
        tl.store(o + written, tl.sum(S * q_t_row[:, None], 0) * scale, in_columns)
        if LOG:
            tl.store(u_log + written, u, in_columns)
        if N_SLOTS > 0:
            back = n_tokens - 1 - t
            if back < N_SLOTS:
                slot = slots[0]
                for s in tl.static_range(1, N_SLOTS):
                    slot = tl.where(back == s, slots[s], slot)
                tl.store(slot + slot_tile, S, inside)
        q += q_t
        k += k_t
        v += v_t
        g += g_t
        beta += beta_t
        written += n_heads * d_v


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    grouped: bool,
    n_snapshots: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.delta_rule.gated_delta_rule."""
    kept = state.new_empty(min(v.shape[1], n_snapshots), *state.shape)
    o = gated_delta_into(q, k, v, g, beta, state, grouped=grouped, slots=kept.unbind(0))
    return o, kept.transpose(0, 1)


def gated_delta_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    grouped: bool,
    slots: Sequence[torch.Tensor],
) -> torch.Tensor:
    """See kernels.delta_rule.gated_delta_into."""
    strides = slots[0].stride()
    if any(slot.stride() != strides for slot in slots):
        raise ValueError("the slots of one call differ in their strides")
    inputs, n_tokens = (q, k, v, g, beta), v.shape[1]
    outputs, start = [], 0
    # one state leaves the chunks, the oldest that is kept: the recurrence leads on from it
    n_before = n_tokens - len(slots) + 1
    if _in_chunks(g, n_before):
        o, _ = run_chunks(_part(inputs, 0, n_before), state, slots[-1], grouped=grouped, log=False)
        outputs.append(o)
        start, state, slots = n_before, slots[-1], slots[:-1]
    while start < n_tokens:
        # of more slots than one kernel takes, the oldest first; then on from the newest of those
        n_later = (len(slots) - 1) // MAX_SLOTS * MAX_SLOTS
        mine, slots = slots[n_later:], slots[:n_later]
        part = _part(inputs, start, n_tokens - n_later)
        o, _ = _run(part, state, mine, grouped=grouped, log=False)
        outputs.append(o)
        start, state = n_tokens - n_later, mine[0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _in_chunks(g: torch.Tensor, n_tokens: int) -> bool:
    return n_tokens > FEW_TOKENS and g.dim() == 3


def _part(inputs: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, g, beta = (x[:, start:stop] for x in inputs)
    return q, k, v, g, beta


def gated_delta_log(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    grouped: bool,
) -> tuple[torch.Tensor, DeltaLog]:
    """See kernels.delta_rule.gated_delta_log. The state is read once and never written."""
    inputs = q, k, v, g, beta
    if _in_chunks(g, v.shape[1]):
        o, u = run_chunks(inputs, state, None, grouped=grouped, log=True)
    else:
        o, u = _run(inputs, state, (), grouped=grouped, log=True)
    return o, DeltaLog(k, u, g)


def _run(
    inputs: Inputs,
    state: torch.Tensor,
    slots: Sequence[torch.Tensor],
    *,
    grouped: bool,
    log: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and, if asked for, the rows u; without, the second tensor is the first."""
    q, k, v, g, beta = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    o = v.new_empty(v.shape)
    u = torch.empty_like(o) if log else o
    channels = g.dim() == 4
    width = columns_per_program(n_batch * n_heads, d_v)
    _recurrence[(cdiv(d_v, width), n_heads, n_batch)](
        q, k, v, g, beta, state, o, u, tuple(slots),
        n_tokens, n_heads, n_k_heads, d_k, d_v, d_k**-0.5,
        *q.stride(), *k.stride(), *v.stride(),
        *g.stride(), *(() if channels else (0,)), *beta.stride(),
        *state.stride(), *(slots[0].stride() if slots else (0, 0, 0, 0)),
        N_SLOTS=len(slots), GROUPED=grouped, CHANNELS=channels, LOG=log,
        BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return o, u


def columns_per_program(n_states: int, d_v: int) -> int:
    """Columns of a state in one program: few while there are too few programs for the device."""
    return WIDE if n_states * cdiv(d_v, WIDE) >= MANY_PROGRAMS else NARROW


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _fold(
    state, k, u, g, out, counts, n_tokens, n_heads, n_k_heads, d_k, d_v,
    state_b, state_h, state_k, state_v, k_b, k_t, k_h, k_d, u_b, u_t, u_h, u_d, g_b, g_t, g_h,
    GROUPED: tl.constexpr, COUNTED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
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
    u += b * u_b + j * u_h + columns * u_d
    g += b * g_b + j * g_h
    last = tl.load(counts + b) if COUNTED else n_tokens
    for _ in range(last):
        S *= tl.exp(tl.load(g))
        S += tl.load(k, in_rows, 0.0)[:, None] * tl.load(u, in_columns, 0.0)[None, :]
        k += k_t
        u += u_t
        g += g_t
    whole = out + (b * n_heads + j) * d_k * d_v
    tl.store(whole + rows[:, None] * d_v + columns[None, :], S, inside)


def fold(
    state: torch.Tensor,
    log: DeltaLog,
    n_tokens: int | torch.Tensor,
    *,
    grouped: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.delta_rule.fold. The recurrence with u known, so each column runs by itself."""
    k, u, g = log
    if out is None:
        out = state.new_empty(state.shape)
    n_batch, n_heads, d_k, d_v = state.shape
    counted = isinstance(n_tokens, torch.Tensor)
    width = columns_per_program(n_batch * n_heads, d_v)
    _fold[(cdiv(d_v, width), n_heads, n_batch)](
        state, k, u, g, out, n_tokens if counted else out, 0 if counted else n_tokens,
        n_heads, k.shape[2], d_k, d_v,
        *state.stride(), *k.stride(), *u.stride(), *g.stride(),
        GROUPED=grouped, COUNTED=counted, BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return out
