"""State-space duality for few tokens on a GPU, with the state in registers.

A program owns BP rows [BP, N] of one state. Rows do not mix in the recurrence, so it reads its
tile once, runs through all tokens, and writes the tile where a token's state is asked for. Where
states are read and written comes from the host, as tensors, or from the device, as numbers of rows
of one pool (kernels.recurrence.delta_rule.recurrence_with_triton says why).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.recurrence.ssd.naive import SsdInputs
from kernels.triton_setup import cdiv, jit, power_of_2

# rows of a state in one program: with N = 128, 32 registers in each thread of one warp
ROWS = 8


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _recurrence(
    x, dt, g, B, C, D, state, o, u_log, slots, index,
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
    for t in range(n_tokens):
        x_row = tl.load(x, in_rows, 0.0)
        B_row = tl.load(B, in_columns, 0.0)
        C_row = tl.load(C, in_columns, 0.0)
        u = tl.load(dt) * x_row
        S = S * tl.exp(tl.load(g)) + u[:, None] * B_row[None, :]
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
    state: torch.Tensor,
    slots: Sequence[torch.Tensor],
    *,
    log: bool = False,
    index: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of the inputs from `state` on; each slot receives a state, newest first.

    index: `read` and `write` of ssd_slots. Then `state` is the pool and `slots` is empty.
    Returns o and the rows u [B, T, H, P]; unless `log`, the second tensor is the first.
    """
    x, dt, g, B, C, D = inputs
    n_batch, n_tokens, n_heads, p = x.shape
    n_groups, n = B.shape[2:]
    o = x.new_empty(x.shape)
    u = torch.empty_like(o) if log else o
    places: tuple[torch.Tensor | int, ...] = ()
    if index is not None:
        read, write = index
        places = read, write, write.shape[1], *read.stride(), *write.stride()
    _recurrence[(cdiv(p, ROWS), n_heads, n_batch)](
        x, dt, g, B, C, D, state, o, u, tuple(slots), places,
        n_tokens, n_heads, n_groups, p, n,
        *x.stride(), *dt.stride(), *g.stride(), *B.stride(), *C.stride(), *D.stride(),
        *state.stride(), *(slots[0] if slots else state).stride(),
        N_SLOTS=len(slots), INDEXED=index is not None, LOG=log,
        BP=ROWS, BN=power_of_2(n), num_warps=1,
    )  # fmt: skip
    return o, u
