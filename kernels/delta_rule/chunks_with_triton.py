"""The gated delta rule over a prompt on a GPU: chunks of tokens in the WY form.

Everything about a chunk that does not need a state is solved for all chunks at once; then one
pass takes the state, in registers, from chunk to chunk. With c the running sum of g, D_ij =
e^(c_i - c_j) for i >= j and S0 the state before the chunk (as kernels.delta_rule.wy has it):

    U = W (V - diag(e^c) K S0),   W = (I + strictly lower(diag(beta) (K K^T * D)))^-1 diag(beta)
    O = scale diag(e^c) Q S0 + P U,   P = scale lower(Q K^T * D)
    S = e^(c_last) S0 + (diag(D_last) K)^T U

Products are plain f32. A token's bits do not depend on later tokens or on other sequences.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import cdiv, jit, power_of_2

# Operands of plain f32 products pass through registers: longer chunks and wider tiles spill them.
CHUNK = 16
# columns of a state in one program; half of them where keys have more than 128 numbers
COLUMNS = 16
# numbers of a key that one product of tiles sums over
DEPTH = 32

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _solve(
    q, k, g, beta, solved, grams, decays,
    n_tokens, n_heads, n_k_heads, d_k, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    GROUPED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """W, P and the decays e^c and D_last of one chunk and value head."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = j // (n_heads // n_k_heads) if GROUPED else j % n_k_heads
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    t = chunk * C + at
    # tokens beyond the last neither decay nor write
    gate = tl.load(g + b * g_b + j * g_h + t * g_t, t < n_tokens, 0.0)
    strength = tl.load(beta + b * beta_b + j * beta_h + t * beta_t, t < n_tokens, 0.0)
    # Each column's sum starts behind its own token: numbers of one sign, no differences of long
    # sums, and no exponent above zero. Row s is c_s - c_column.
    D = tl.exp(tl.cumsum(tl.where(row > column, gate[:, None], 0.0), 0))

    q += b * q_b + i * q_h + t[:, None] * q_t
    k += b * k_b + i * k_h + t[:, None] * k_t
    keys = tl.zeros((C, C), tl.float32)
    queries = tl.zeros((C, C), tl.float32)
    for start in range(0, BK, BC):
        d = (start + tl.arange(0, BC))[None, :]
        inside = (t < n_tokens)[:, None] & (d < d_k)
        k_rows = tl.load(k + d * k_d, inside, 0.0)
        q_rows = tl.load(q + d * q_d, inside, 0.0)
        k_columns = tl.trans(k_rows)
        keys = tl.dot(k_rows, k_columns, keys, input_precision="ieee")
        queries = tl.dot(q_rows, k_columns, queries, input_precision="ieee")
    P = tl.where(row >= column, queries * D, 0.0) * scale
    M = tl.where(row > column, keys * D, 0.0) * strength[:, None]

    # forward substitution: row s is done when all rows before it are taken off
    inverse = tl.where(row == column, 1.0, 0.0)
    for s in range(C - 1):
        done = tl.sum(tl.where(row == s, inverse, 0.0), 0)
        inverse -= tl.sum(tl.where(column == s, M, 0.0), 1)[:, None] * done[None, :]

    place = (b * n_heads + j) * tl.num_programs(0) + chunk
    tile = place * C * C + row * C + column
    tl.store(solved + tile, inverse * strength[None, :])
    tl.store(grams + tile, P)
    tl.store(decays + place * 2 * C + at, tl.exp(tl.cumsum(gate, 0)))
    tl.store(decays + place * 2 * C + C + at, tl.sum(tl.where(row == C - 1, D, 0.0), 0))


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _pass(
    q, k, v, state, o, u_log, slot, solved, grams, decays,
    n_tokens, n_heads, n_k_heads, d_k, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    state_b, state_h, state_k, state_v, slot_b, slot_h, slot_k, slot_v,
    GROUPED: tl.constexpr, STATE: tl.constexpr, LOG: tl.constexpr,
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
        decay = tl.load(decays + place * 2 * C + at)[:, None]
        q_rows = tl.load(q + t[None, :, None] * q_t, of_keys, 0.0)
        P = tl.load(grams + place * C * C + tile)
        until_last = tl.load(decays + place * 2 * C + C + at)[None, :, None]
        whole = tl.load(decays + place * 2 * C + C - 1)

        k_read = tl.sum(tl.dot(k_rows, S, input_precision="ieee"), 0)
        u = tl.dot(W, v_rows - decay * k_read, input_precision="ieee")
        q_read = tl.sum(tl.dot(q_rows, S, input_precision="ieee"), 0)
        outputs = tl.dot(P, u, q_read * decay * scale, input_precision="ieee")
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
    inputs: Inputs, state: torch.Tensor, slot: torch.Tensor | None, *, grouped: bool, log: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of q, k, v, g, beta, one gate per head, from `state` on.

    The state after the last token goes into `slot`, if there is one; it may be `state` itself.
    Returns o and the rows u [B, T, H_v, d_v]; unless `log`, the second tensor is the first.
    """
    q, k, v, g, beta = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    n_k_heads, d_k = k.shape[2:]
    n_chunks = cdiv(n_tokens, CHUNK)
    o = v.new_empty(v.shape)
    u = torch.empty_like(o) if log else o
    solved, grams = v.new_empty(2, n_batch, n_heads, n_chunks, CHUNK, CHUNK).unbind(0)
    decays = v.new_empty(n_batch, n_heads, n_chunks, 2, CHUNK)
    deep = max(power_of_2(d_k), 16)
    depth = min(deep // 2, DEPTH)
    _solve[(n_chunks, n_heads, n_batch)](
        q, k, g, beta, solved, grams, decays,
        n_tokens, n_heads, n_k_heads, d_k, d_k**-0.5,
        *q.stride(), *k.stride(), *g.stride(), *beta.stride(),
        GROUPED=grouped, C=CHUNK, BK=deep, BC=depth, num_warps=1, num_stages=1,
    )  # fmt: skip
    width = COLUMNS if deep <= 128 else COLUMNS // 2
    _pass[(cdiv(d_v, width), n_heads, n_batch)](
        q, k, v, state, o, u, state if slot is None else slot, solved, grams, decays,
        n_tokens, n_heads, n_k_heads, d_k, d_v, d_k**-0.5,
        *q.stride(), *k.stride(), *v.stride(),
        *state.stride(), *(state if slot is None else slot).stride(),
        GROUPED=grouped, STATE=slot is not None, LOG=log,
        C=CHUNK, BK=deep, BC=depth, BV=width, num_warps=8, num_stages=1,
    )  # fmt: skip
    return o, u
