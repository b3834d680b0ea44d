"""What kernels.attention.with_llvm compiles: one chunk of visible cells, and the sum of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from kernels.llvm import F32, F32X16, Code, Value, vector
from kernels.llvm.code import I8, I32, I64
from kernels.llvm.program import has_feature

# visible cells of a chunk
CHUNK = 512
# 32 registers of 16 floats, or 16 of 8: what a product keeps in them
WIDE = has_feature("avx512f")
LANES, CELLS, COLUMNS = (16, 4, 4) if WIDE else (8, 2, 2)
HEADS = 4
# cells whose values are read while they are near, for all rows
NEAR = 32
# rows of scores, and tokens, that a task has on its stack
ROWS, MOST_TOKENS = 64, 16
# numbers in a row of scores, and in a list of cells: both are filled up to whole vectors
ROW = CHUNK + 16
# with one place in front, for what is in no list
LIST = 1 + CHUNK + CELLS


def block_tokens(repeat: int) -> int:
    """Tokens of one task, for so many query heads per key/value head."""
    return max(1, min(MOST_TOKENS, ROWS // repeat))


def attend_chunks(
    head_dim: int, repeat: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """A task is one chunk for a block of tokens and one key/value head of a sequence.

    Writes weighted values, not yet divided, to o f32 [n_chunks, B, T, H, hd], and (largest score,
    sum of weights) to sums f32 [n_chunks, B, T, H, 2]. A single chunk is divided at once and has
    no sums. Strides are in bytes.
    """
    (
        q, k, v, mask, o, sums, n_batch, n_tokens, n_kv_heads, n_cells, n_chunks,
        q_b, q_t, q_h, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_t,
    ) = args  # fmt: skip
    block = block_tokens(repeat)
    n_blocks = (n_tokens + (block - 1)) // block
    scores, lists = code.stack(4 * block * repeat * ROW), code.stack(4 * block * LIST)
    counts = code.stack(8 * block)
    with code.loop(first, last) as task:
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
        out = o + place * (4 * head_dim)

        most = code.variable(code.integer(0))
        with code.loop(0, n_here) as t:
            cells = lists + t * (4 * LIST) + 4
            count = _list_visible(code, seen + t * m_t, n_cells, chunk * CHUNK, cells)
            code.store(count, counts + t * 8)
            most.set(code.largest(count, most.value))

        with code.loop(0, most.value, CELLS) as j, code.loop(0, n_here) as t:
            cells = lists + t * (4 * LIST) + 4 + j * 4
            with code.when(j.less(code.load(counts + t * 8, I64))):
                at = [keys + _cell(code, cells, i) * k_n for i in range(CELLS)]
                for h, n in _tiles(repeat, HEADS):
                    rows = [queries + t * q_t + q_h * (h + i) for i in range(n)]
                    row = scores + (t * repeat + h) * (4 * ROW) + j * 4
                    _score(code, head_dim, rows, at, row)

        with code.loop(0, n_here) as t, code.loop(0, code.integer(repeat)) as h:
            row = scores + (t * repeat + h) * (4 * ROW)
            best, total = _weigh(code, row, code.load(counts + t * 8, I64))
            to = t * n_heads + h
            with code.when(code.integer(1).less(n_chunks)):
                code.store(best, sums + (place + to) * 8)
                code.store(total, sums + (place + to) * 8 + 4)
            # behind the row's weights, for the division
            code.store(total, row + 4 * CHUNK)
            for d, lanes in _columns(head_dim):
                code.store(code.constant(lanes, 0.0), out + to * (4 * head_dim) + 4 * d)

        with code.loop(0, most.value, NEAR) as j, code.loop(0, n_here) as t:
            count = code.load(counts + t * 8, I64)
            near = j + NEAR
            stop = code.choose(near.less(count), near, count)
            with code.when(j.less(count)):
                for h, n in _tiles(repeat, HEADS):
                    row = scores + (t * repeat + h) * (4 * ROW)
                    to = out + (t * n_heads + h) * (4 * head_dim)
                    cells = lists + t * (4 * LIST) + 4
                    _add_values(code, head_dim, n, (j, stop), cells, row, values, v_n, to)

        with (
            code.when(n_chunks.less(2)),
            code.loop(0, n_here) as t,
            code.loop(0, code.integer(repeat)) as h,
        ):
            total = code.load(scores + (t * repeat + h) * (4 * ROW) + 4 * CHUNK, F32)
            for d, lanes in _columns(head_dim):
                at_d = out + (t * n_heads + h) * (4 * head_dim) + 4 * d
                y = code.load(at_d, lanes) / code.splat(_divisor(code, total), lanes.count)
                code.store(y, at_d)


def add_up(head_dim: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """A task is one row of y: its chunks on the scale of the largest score, in their order."""
    o, sums, y, n_rows, n_chunks = args
    with code.loop(first, last) as row:
        best = code.variable(code.constant(F32, -float("inf")))
        with code.loop(0, n_chunks) as chunk:
            best.set(code.largest(code.load(sums + (chunk * n_rows + row) * 8, F32), best.value))
        columns = list(_columns(head_dim))
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
                    values = code.load(o + place * (4 * head_dim) + 4 * d, lanes)
                    x.set(code.fma(values, code.splat(scale, lanes.count), x.value))
            for (d, lanes), x in zip(group, out, strict=True):
                divisor = code.splat(_divisor(code, total.value), lanes.count)
                code.store(x.value / divisor, y + row * (4 * head_dim) + 4 * d)


def exp(code: Code, x: Value) -> Value:
    """e^x within 2 ulp, below e^-87 zero; x f32 or a vector of it, at most 88."""
    integer = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32

    def number(value: float) -> Value:
        return code.constant(x.type, value)

    # adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits
    shifted = code.fma(x, number(1.4426950408889634), number(12582912.0))
    n = shifted - 12582912.0
    r = code.fma(n, number(-0.693145751953125), x)
    r = code.fma(n, number(-1.42860682030941723212e-6), r)
    p = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = code.fma(p, r, number(c))
    y = code.fma(p, r * r, r) + 1.0
    y = (y.bits(integer) + (shifted.bits(integer) << 23)).bits(x.type)
    return code.choose(x.less(-87.0), number(0.0), y)


def _list_visible(code: Code, seen: Value, n_cells: Value, skip: Value, cells: Value) -> Value:
    """Writes the up to CHUNK cells that follow the first `skip` visible ones; returns how many."""
    at, n = code.variable(code.integer(0)), code.variable(code.integer(0))
    total = code.variable(code.integer(0))
    # words of eight cells as long as all that is seen in them is skipped
    with code.loop(0, n_cells // 8) as word:
        bytes_ = code.load(seen + word * 8, I64)
        total.set(total.value + code.call("llvm.ctpop.i64", I64, bytes_))
        over = skip.less(total.value)
        at.set(code.choose(over, at.value, (word + 1) * 8))
        n.set(code.choose(over, n.value, total.value))
    end = skip + CHUNK
    with code.repeat(lambda: at.value.less(n_cells) & n.value.less(end)):
        # those of an earlier chunk, in the last word that is not all skipped, go in front
        place = code.largest(n.value - skip, code.integer(-1))
        code.store(at.value.resize(I32), cells + place * 4)
        n.set(n.value + code.load(seen + at.value, I8).resize(I64))
        at.set(at.value + 1)
    count = code.largest(n.value - skip, code.integer(0))
    # the last one once more, up to a whole tile
    with code.when(code.integer(0).less(count)):
        final = code.load(cells + count * 4 - 4, I32)
        code.store(code.splat(final, CELLS), cells + count * 4)
    return count


def _score(code: Code, head_dim: int, rows: list[Value], at: list[Value], scores: Value) -> None:
    """Products of every row with the keys at every address, each along its own LANES."""
    lanes = _lanes(head_dim)
    sums = [code.variable(code.constant(lanes, 0.0)) for _ in rows for _ in at]
    with code.loop(0, code.integer(4 * head_dim), 4 * lanes.count) as place:
        queries = [code.load(row + place, lanes) for row in rows]
        keys = [code.load(key + place, lanes) for key in at]
        pairs = [(a, b) for a in queries for b in keys]
        for total, (a, b) in zip(sums, pairs, strict=True):
            total.set(code.fma(a, b, total.value))
    totals = _totals([total.value for total in sums])
    size = totals[0].type.count
    piece = min(size, CELLS)
    for i in range(len(rows) * CELLS // piece):
        head, cell = divmod(i * piece, CELLS)
        products = totals[i * piece // size].part(i * piece % size, piece)
        code.store(products * head_dim**-0.5, scores + head * (4 * ROW) + cell * 4)


def _totals(vectors: list[Value]) -> list[Value]:
    """The sums of the elements of each vector, in order, side by side in as few as they fill.

    Every sum adds halves to halves, whatever other vectors there are; a power of two of them.
    """
    groups = 1
    while (size := vectors[0].type.count // groups) > 1:
        low = [g * size + i for g in range(groups) for i in range(size // 2)]
        high = [lane + size // 2 for lane in low]
        if len(vectors) == 1:
            vectors = [vectors[0].take(low) + vectors[0].take(high)]
            continue
        count = vectors[0].type.count
        low, high = ([*lanes, *(lane + count for lane in lanes)] for lanes in (low, high))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.take(low, b) + a.take(high, b) for a, b in pairs]
        groups *= 2
    return vectors


def _weigh(code: Code, row: Value, count: Value) -> tuple[Value, Value]:
    """Scores become e^(score - largest); returns the largest and the sum of the weights."""
    low = code.constant(F32X16, -float("inf"))
    code.store(low, row + count * 4)
    best, total = code.variable(low), code.variable(code.constant(F32X16, 0.0))
    with code.loop(0, count, 16) as j:
        best.set(code.largest(code.load(row + j * 4, F32X16), best.value))
    top = best.value
    while top.type.count > 1:
        half = top.type.count // 2
        top = code.largest(top.part(0, half), top.part(half, half))
    top = code.sum(top)
    base = code.splat(top)
    with code.loop(0, count, 16) as j:
        weights = exp(code, code.load(row + j * 4, F32X16) - base)
        code.store(weights, row + j * 4)
        total.set(total.value + weights)
    return top, code.sum(total.value)


def _add_values(
    code: Code, head_dim: int, n_rows: int, span: tuple[Value, Value], cells: Value, row: Value,
    values: Value, v_n: Value, out: Value,
) -> None:  # fmt: skip
    """out += weights times values of the listed cells `span`, for rows side by side."""
    columns = list(_columns(head_dim))
    for start in range(0, len(columns), COLUMNS):
        group = columns[start : start + COLUMNS]
        places = [
            [(out + i * (4 * head_dim) + 4 * d, lanes) for d, lanes in group] for i in range(n_rows)
        ]
        sums = [[code.variable(code.load(*place)) for place in some] for some in places]
        with code.loop(*span) as j:
            at = values + code.load(cells + j * 4, I32).resize(I64) * v_n
            parts = [code.load(at + 4 * d, lanes) for d, lanes in group]
            for i, totals in enumerate(sums):
                weight = code.load(row + i * (4 * ROW) + j * 4, F32)
                for total, part in zip(totals, parts, strict=True):
                    total.set(code.fma(code.splat(weight, part.type.count), part, total.value))
        for totals, some in zip(sums, places, strict=True):
            for total, (address, _) in zip(totals, some, strict=True):
                code.store(total.value, address)


def _divisor(code: Code, total: Value) -> Value:
    """The sum of the weights; 1 where nothing was seen, which leaves zeros."""
    one = code.constant(F32, 1.0)
    return code.choose(total.less(0.5), one, total)


def _cell(code: Code, cells: Value, i: int) -> Value:
    return code.load(cells + 4 * i, I32).resize(I64)


def _lanes(head_dim: int) -> ir.VectorType:
    """The longest vector, at most LANES, of which a head has a whole number."""
    return vector(F32, min(LANES, head_dim & -head_dim))


def _columns(head_dim: int) -> Iterator[tuple[int, ir.VectorType]]:
    """Where the vectors of a head start, and their type."""
    lanes = _lanes(head_dim)
    return ((d, lanes) for d in range(0, head_dim, lanes.count))


def _tiles(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Powers of two up to `most` that make up n: (start, size)."""
    start = 0
    while start < n:
        size = most
        while size > n - start:
            size //= 2
        yield start, size
        start += size
