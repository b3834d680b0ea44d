"""One pass over few tokens on a GPU, with the state in registers.

A program owns the columns [d_k, BV] of one state. Columns do not mix in the recurrence, so it
reads its tile once, runs through all tokens, and writes the tile where a token's state is asked
for. A token's bits do not depend on the tokens that came with it.

Where states are read and written comes from the host, as tensors, or from the device, as numbers
of rows of one pool: then the host knows nothing about a call that changes from call to call, and
a CUDA graph can repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.recurrence.delta_rule.chunks_with_triton import Inputs
from kernels.triton_setup import cdiv, jit, power_of_2

# 128 rows by 8 columns are 32 registers in each thread of one warp, and 32 bytes of a row are one
# sector of memory. Wider tiles read longer runs; they pay once there are programs enough.
NARROW, WIDE = 8, 16
MANY_PROGRAMS = 2048


def columns_per_program(n_states: int, d_v: int) -> int:
    """Columns of a state in one program: few while there are too few programs for the device."""
    return WIDE if n_states * cdiv(d_v, WIDE) >= MANY_PROGRAMS else NARROW


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _recurrence(
    q, k, v, g, beta, state, o, u_log, slots, index,
    n_tokens, n_heads, n_k_heads, d_k, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    g_b, g_t, g_h, g_d, beta_b, beta_t, beta_h,
    state_b, state_h, state_k, state_v, slot_b, slot_h, slot_k, slot_v,
    N_SLOTS: tl.constexpr, INDEXED: tl.constexpr, GROUPED: tl.constexpr, CHANNELS: tl.constexpr,
    LOG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
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
    state: torch.Tensor,
    slots: Sequence[torch.Tensor],
    *,
    grouped: bool,
    log: bool = False,
    index: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of q, k, v, g, beta from `state` on; each slot receives a state, newest first.

    index: `read` and `write` of gated_delta_slots. Then `state` is the pool and `slots` is empty.
    Returns o and the rows u [B, T, H_v, d_v]; unless `log`, the second tensor is the first.
    """
    q, k, v, g, beta = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    o = v.new_empty(v.shape)
    u = torch.empty_like(o) if log else o
    channels = g.dim() == 4
    width = columns_per_program(n_batch * n_heads, d_v)
    places: tuple[torch.Tensor | int, ...] = ()
    if index is not None:
        read, write = index
        places = read, write, write.shape[1], *read.stride(), *write.stride()
    _recurrence[(cdiv(d_v, width), n_heads, n_batch)](
        q, k, v, g, beta, state, o, u, tuple(slots), places,
        n_tokens, n_heads, n_k_heads, d_k, d_v, d_k**-0.5,
        *q.stride(), *k.stride(), *v.stride(),
        *g.stride(), *(() if channels else (0,)), *beta.stride(),
        *state.stride(), *(slots[0] if slots else state).stride(),
        N_SLOTS=len(slots), INDEXED=index is not None, GROUPED=grouped, CHANNELS=channels,
        LOG=log, BK=power_of_2(d_k), BV=width, num_warps=1,
    )  # fmt: skip
    return o, u
