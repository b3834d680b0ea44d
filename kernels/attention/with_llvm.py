"""Attention on a processor: chunks of visible cells read once for all query heads of a group.

After flash-decoding (Dao et al. 2023): a task takes the next CHUNK cells that a query sees, for up
to some tokens and the query heads of one key/value head, and leaves their largest score, the sum
of their weights and the weighted values; where there are several chunks, a second program adds
them up in order. Chunks count visible cells, and every sum goes along them one way: so a query's
bits depend neither on hidden cells nor on other queries, sequences and threads.
"""

from __future__ import annotations

import functools

import torch

from kernels.attention import with_torch
from kernels.attention.chunks_with_llvm import add_up, attend_chunks, block_tokens, find_starts
from kernels.attention.steps_with_llvm import CHUNK
from kernels.llvm import Program

# tokens at a time, which bounds what several chunks leave
TOKENS = 64
# query heads that share a key/value head; no model comes near
WIDEST_GROUP = 512
# multiplications below which other threads are not worth waking
LEAST_WORK = 1 << 17


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.attention.attend. A query that sees no cell gives zeros."""
    if _is_wide(q, k):
        return with_torch.attend(q, k, v, mask, scale, sinks)
    return attend_invariant(q, k, v, mask, scale, sinks)


def attend_invariant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """attend, with bits that depend on the query and its visible cells alone."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if _is_wide(q, k):
        return with_torch.attend_invariant(q, k, v, mask, scale, sinks)
    if q.shape[1] <= TOKENS:
        return _some(q, k, v, mask, scale, sinks)
    parts = zip(q.split(TOKENS, 1), mask.split(TOKENS, 1), strict=True)
    return torch.cat([_some(some, k, v, seen, scale, sinks) for some, seen in parts], 1)


def _is_wide(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the scores of a group of heads have no room on the stack of a thread."""
    return q.shape[2] // k.shape[1] > WIDEST_GROUP


def _some(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    q_b, q_t, q_h, q_d = q.stride()
    k_b, k_h, k_n, k_d = k.stride()
    v_b, v_h, v_n, v_d = v.stride()
    m_b, m_t, m_n = mask.stride()
    if not q_d == k_d == v_d == m_n == 1:
        q, k, v, mask = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, mask))
        return _some(q, k, v, mask, scale, sinks)
    n_batch, n_tokens, n_heads, head_dim = q.shape
    _, n_kv_heads, n_cells, v_dim = v.shape
    repeat, n_rows = n_heads // n_kv_heads, n_batch * n_tokens * n_heads
    threads = torch.get_num_threads() if n_rows * n_cells * head_dim > LEAST_WORK else 1
    y = torch.empty(n_batch, n_tokens, n_heads, v_dim)
    n_chunks, o, sums = -(-n_cells // CHUNK), y, y
    if n_chunks > 1:
        o, sums = torch.empty(n_chunks, n_rows, v_dim), torch.empty(n_chunks, n_rows, 2)
    starts = torch.empty(n_batch, n_tokens, n_chunks + 1, 2, dtype=torch.int64)
    n_blocks = -(-n_tokens // block_tokens(repeat))
    sunk = 0 if sinks is None else sinks.data_ptr()
    _chunks(head_dim, v_dim, repeat, scale, sunk > 0)(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        mask.data_ptr(),
        o.data_ptr(),
        sums.data_ptr(),
        starts.data_ptr(),
        n_batch,
        n_tokens,
        n_kv_heads,
        n_cells,
        n_chunks,
        4 * q_b,
        4 * q_t,
        4 * q_h,
        4 * k_b,
        4 * k_h,
        4 * k_n,
        4 * v_b,
        4 * v_h,
        4 * v_n,
        m_b,
        m_t,
        sunk,
        tasks=n_batch * n_kv_heads * n_blocks * n_chunks,
        chunk=1,
        threads=threads,
    )
    if n_chunks > 1:
        _total(v_dim, sunk > 0)(
            o.data_ptr(),
            sums.data_ptr(),
            y.data_ptr(),
            n_rows,
            n_chunks,
            sunk,
            n_heads,
            tasks=n_rows,
            chunk=max(1, n_rows // 16),
            threads=threads,
        )
    return y


@functools.cache
def _chunks(head_dim: int, v_dim: int, repeat: int, scale: float, sunk: bool) -> Program:
    body = functools.partial(attend_chunks, head_dim, v_dim, repeat, scale, sunk)
    return Program(body, 24, find_starts)


@functools.cache
def _total(v_dim: int, sunk: bool) -> Program:
    return Program(functools.partial(add_up, v_dim, sunk), 7)
