"""State-space duality over a prompt on a GPU: chunks of tokens.

What a chunk's tokens read of one another is the same for all heads of a group up to the decays:
C B^T is formed once, for all chunks at once; then one pass takes the state, in registers, from
chunk to chunk. With c the running sum of g, M_ij = e^(c_i - c_j) for i >= j, S0 the state before:

    O = (C B^T * M) U + diag(e^c) C S0^T + D X,   S = e^(c_last) S0 + U^T diag(M_last) B

Products are plain f32. A token's bits do not depend on later tokens or on other sequences.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.recurrence.ssd.naive import SsdInputs
from kernels.triton_setup import LEAST_DEPTH, cdiv, jit, power_of_2

# Operands of plain f32 products pass through registers: longer chunks and wider tiles spill them.
CHUNK = 16
# rows of a state in one program; half of them where rows have more than 128 numbers
ROWS = 16
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
    inputs: SsdInputs, state: torch.Tensor, slot: torch.Tensor | None, *, log: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of the inputs from `state` on.

    The state after the last token goes into `slot`, if there is one; it may be `state` itself.
    Returns o and the rows u [B, T, H, P]; unless `log`, the second tensor is the first.
    """
    x, dt, g, B, C, D = inputs
    n_batch, n_tokens, n_heads, p = x.shape
    n_groups, n = B.shape[2:]
    n_chunks = cdiv(n_tokens, CHUNK)
    o = x.new_empty(x.shape)
    u = torch.empty_like(o) if log else o
    grams = x.new_empty(n_batch, n_groups, n_chunks, CHUNK, CHUNK)
    wide = max(power_of_2(n), 2 * LEAST_DEPTH)
    depth = min(wide // 2, DEPTH)
    _grams[(n_chunks, n_groups, n_batch)](
        B, C, grams, n_tokens, n_groups, n, *B.stride(), *C.stride(),
        T=CHUNK, BN=wide, BD=depth, num_warps=1, num_stages=1,
    )  # fmt: skip
    rows = ROWS if wide <= 128 else ROWS // 2
    _pass[(cdiv(p, rows), n_heads, n_batch)](
        x, dt, g, B, C, D, state, o, u, state if slot is None else slot, grams,
        n_tokens, n_heads, n_groups, p, n,
        *x.stride(), *dt.stride(), *g.stride(), *B.stride(), *C.stride(), *D.stride(),
        *state.stride(), *(state if slot is None else slot).stride(),
        STATE=slot is not None, LOG=log,
        T=CHUNK, BN=wide, BD=depth, BP=rows, num_warps=8, num_stages=1,
    )  # fmt: skip
    return o, u
