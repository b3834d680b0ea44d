"""Attention on a CPU: chunks of visible cells read once for all query heads of a group.

After flash-decoding (Dao et al. 2023): a task takes the next CHUNK cells that a query sees, for up
to some tokens and the query heads of one key/value head, and leaves their largest score, the sum
of their weights and the weighted values; where there are several chunks, a second program adds
them up in order. Chunks count visible cells, and every sum goes along them one way: so a query's
bits depend neither on hidden cells nor on other queries, sequences and threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import AttendArguments, attend_invariant_with_torch, attend_with_torch
from kernels.attention import steps_with_llvm as steps
from kernels.attention.steps_with_llvm import CHUNK, LIST, ROW
from kernels.llvm import F32, Code, Value, kernel
from kernels.llvm.functions import addresses, exp
from kernels.llvm.values import I64

# tokens at a time, which bounds what several chunks leave
TOKENS = 64
# query heads that share a key/value head; no model comes near
WIDEST_GROUP = 512
# multiplications below which other threads are not worth waking
LEAST_WORK = 1 << 17


def attend(*inputs: *AttendArguments) -> Tensor:
    """See kernels.attention.attend. A query that sees no cell gives zeros."""
    return attend_with_torch(*inputs) if _is_wide(*inputs[:2]) else attend_invariant(*inputs)


def attend_invariant(*inputs: *AttendArguments) -> Tensor:
    """attend, with bits that depend on the query and its visible cells alone."""
    q, k, v, mask, scale, sinks = inputs
    if _is_wide(q, k):
        return attend_invariant_with_torch(*inputs)
    if q.shape[1] <= TOKENS:
        return _some(*inputs)
    parts = zip(q.split(TOKENS, 1), mask.split(TOKENS, 1), strict=True)
    return torch.cat([_some(some, k, v, seen, scale, sinks) for some, seen in parts], 1)


def _is_wide(q: Tensor, k: Tensor) -> bool:
    """Whether the scores of a group of heads have no room on the stack of a thread."""
    return q.shape[2] // k.shape[1] > WIDEST_GROUP


def _some(*inputs: *AttendArguments) -> Tensor:
    q, k, v, mask, scale, sinks = inputs
    if any(x.stride(-1) != 1 for x in (q, k, v, mask)):
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
        *addresses(q, k, v, mask, o, sums, starts),
        n_batch,
        n_tokens,
        n_kv_heads,
        n_cells,
        n_chunks,
        *(4 * step for x in (q, k, v) for step in x.stride()[:3]),
        *mask.stride()[:2],
        sunk,
        tasks=n_batch * n_kv_heads * n_blocks * n_chunks,
        chunk=1,
        threads=threads,
    )
    if n_chunks > 1:
        _total(v_dim, sunk > 0)(
            *addresses(o, sums, y),
            n_rows,
            n_chunks,
            sunk,
            n_heads,
            tasks=n_rows,
            chunk=max(1, n_rows // 16),
            threads=threads,
        )
    return y


@kernel(7)
def _total(code: Code, args: Sequence[Value], row: Value, v_dim: int, sunk: bool) -> None:
    """A task is one row of y: its chunks on the scale of the largest score, in their order."""
    o, sums, y, n_rows, n_chunks, sinks, n_heads = args
    best = code.variable(code.constant(F32, -float("inf")))
    with code.loop(0, n_chunks) as chunk:
        best.set(code.larger(code.load(sums + (chunk * n_rows + row) * 8, F32), best.value))
    columns = list(steps.columns(v_dim))
    for group in (columns[i : i + 16] for i in range(0, len(columns), 16)):
        total = code.variable(code.constant(F32, 0.0))
        out = [code.variable(code.constant(lanes, 0.0)) for _, lanes in group]
        with code.loop(0, n_chunks) as chunk:
            place = chunk * n_rows + row
            part = code.load(sums + place * 8 + 4, F32)
            scale = exp(code, code.load(sums + place * 8, F32) - best.value)
            # a chunk of which the query sees nothing has no largest score
            empty = part.less(0.5)
            scale = code.choose(empty, code.constant(F32, 0.0), scale)
            total.set(code.fma(part, scale, total.value))
            for (d, lanes), x in zip(group, out, strict=True):
                values = code.load(o + place * (4 * v_dim) + 4 * d, lanes)
                x.set(code.fma(values, code.splat(scale, lanes.count), x.value))
        whole = total.value
        if sunk:
            whole = _with_sink(code, whole, best.value, sinks + row % n_heads * 4)
        for (d, lanes), x in zip(group, out, strict=True):
            divisor = code.splat(steps.divisor(code, whole), lanes.count)
            code.store(x.value / divisor, y + row * (4 * v_dim) + 4 * d)


# rows of scores, and tokens, that a task has on its stack
ROWS, MOST_TOKENS = 64, 16
# cells whose values are read while they are near, for all rows
NEAR = 32


def block_tokens(repeat: int) -> int:
    """How many tokens one task takes. repeat: query heads per key/value head."""
    return max(1, min(MOST_TOKENS, ROWS // repeat))


def find_starts(code: Code, args: Sequence[Value]) -> None:
    """Runs once before the tasks of `_chunks`: fills starts int64 [B, T, n_chunks + 1, 2]."""
    mask, starts, n_batch, n_tokens, n_cells, n_chunks, m_b, m_t = (
        args[i] for i in (3, 6, 7, 8, 10, 11, 21, 22)
    )
    with code.loop(0, n_batch) as b, code.loop(0, n_tokens) as t:
        to = starts + (b * n_tokens + t) * (n_chunks + 1) * steps.START
        steps.find_chunks(code, mask + b * m_b + t * m_t, n_cells, n_chunks, to)


@kernel(24, find_starts)
def _chunks(
    code: Code,
    args: Sequence[Value],
    task: Value,
    head_dim: int,
    v_dim: int,
    repeat: int,
    scale: float,
    sunk: bool,
) -> None:
    """A task is one chunk for a block of tokens and one key/value head of a sequence.

    Writes weighted values, not yet divided, to o f32 [n_chunks, B, T, H, hd_v], and (largest score,
    sum of weights) to sums f32 [n_chunks, B, T, H, 2]. A single chunk is divided at once and has
    no sums. Strides are in bytes. sunk: query heads have sinks.
    """
    q, k, v, mask, o, sums, starts, n_batch, n_tokens, n_kv_heads, n_cells, n_chunks = args[:12]
    q_b, q_t, q_h, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_t, sinks = args[12:]
    block = block_tokens(repeat)
    n_blocks = (n_tokens + (block - 1)) // block
    scores, lists = code.stack(4 * block * repeat * ROW), code.stack(4 * block * LIST)
    counts = code.stack(8 * block)
    chunk, rest = task % n_chunks, task // n_chunks
    start, pair = rest % n_blocks * block, rest // n_blocks
    head, b = pair % n_kv_heads, pair // n_kv_heads
    left = n_tokens - start
    n_here = code.choose(left.less(block), left, code.integer(block))
    queries = q + b * q_b + start * q_t + head * repeat * q_h
    keys, values = k + b * k_b + head * k_h, v + b * v_b + head * v_h
    seen = mask + b * m_b + start * m_t
    # of (chunk, b, start, head * repeat) among the rows of o
    n_heads = n_kv_heads * repeat
    place = ((chunk * n_batch + b) * n_tokens + start) * n_heads + head * repeat
    out = o + place * (4 * v_dim)

    most = code.variable(code.integer(0))
    with code.loop(0, n_here) as t:
        cells = lists + t * (4 * LIST) + 4
        row = b * n_tokens + start + t
        from_ = starts + (row * (n_chunks + 1) + chunk) * steps.START
        skip = chunk * CHUNK
        count = steps.list_visible(code, seen + t * m_t, n_cells, from_, skip, cells)
        code.store(count, counts + t * 8)
        most.set(code.larger(count, most.value))

    with code.loop(0, most.value, steps.CELLS) as j, code.loop(0, n_here) as t:
        cells = lists + t * (4 * LIST) + 4 + j * 4
        with code.when(j.less(code.load(counts + t * 8, I64))):
            at = [keys + steps.listed(code, cells, i) * k_n for i in range(steps.CELLS)]
            for base, n in steps.tiles(repeat):
                rows = [queries + t * q_t + q_h * (base + i) for i in range(n)]
                row = scores + (t * repeat + base) * (4 * ROW) + j * 4
                steps.score(code, head_dim, scale, rows, at, k_n, row)

    with code.loop(0, n_here) as t, code.loop(0, code.integer(repeat)) as h:
        row = scores + (t * repeat + h) * (4 * ROW)
        best, total = steps.weigh(code, row, code.load(counts + t * 8, I64))
        to = t * n_heads + h
        with code.when(code.integer(1).less(n_chunks)):
            code.store(best, sums + (place + to) * 8)
            code.store(total, sums + (place + to) * 8 + 4)
        if sunk:
            total = _with_sink(code, total, best, sinks + (head * repeat + h) * 4)
        # after the row's weights, for the division
        code.store(total, row + 4 * CHUNK)
        for d, lanes in steps.columns(v_dim):
            code.store(code.constant(lanes, 0.0), out + to * (4 * v_dim) + 4 * d)

    with code.loop(0, most.value, NEAR) as j, code.loop(0, n_here) as t:
        count = code.load(counts + t * 8, I64)
        near = j + NEAR
        stop = code.choose(near.less(count), near, count)
        with code.when(j.less(count)):
            for base, n in steps.tiles(repeat):
                row = scores + (t * repeat + base) * (4 * ROW)
                to = out + (t * n_heads + base) * (4 * v_dim)
                cells = lists + t * (4 * LIST) + 4
                steps.add_values(code, v_dim, n, (j, stop), cells, row, values, v_n, to)

    with (
        code.when(n_chunks.less(2)),
        code.loop(0, n_here) as t,
        code.loop(0, code.integer(repeat)) as h,
    ):
        total = code.load(scores + (t * repeat + h) * (4 * ROW) + 4 * CHUNK, F32)
        divisor = steps.divisor(code, total)
        for d, lanes in steps.columns(v_dim):
            to = out + (t * n_heads + h) * (4 * v_dim) + 4 * d
            code.store(code.load(to, lanes) / code.splat(divisor, lanes.count), to)


def _with_sink(code: Code, total: Value, best: Value, sink: Value) -> Value:
    """The sum of the weights and of a sink's; infinity if that one is all there is."""
    return total + exp(code, code.load(sink, F32) - best)
