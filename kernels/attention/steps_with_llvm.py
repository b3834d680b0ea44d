"""Attention over one chunk of cells step by step: list the visible ones, score, weigh, add up."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from kernels.llvm import F32, F32X16, Code, Value, vector
from kernels.llvm.functions import exp
from kernels.llvm.values import I8, I32, I64
from kernels.processor import has_feature

# visible cells of a chunk
CHUNK = 512
# 32 registers of 16 floats, or 16 of 8: what a product keeps in them
LANES, CELLS, COLUMNS = (16, 4, 4) if has_feature("avx512f") else (8, 2, 2)
HEADS = 4
# in cells: the CPU's own prefetching does not follow tiles
KEYS_AHEAD, VALUES_AHEAD = 8, 16
# numbers in a row of scores, and in a list of cells: both are filled up to whole vectors
ROW = CHUNK + 16
# with one place in front, for what is in no list
LIST = 1 + CHUNK + CELLS
# bytes of what is written of the start of a chunk
START = 16


def find_chunks(code: Code, seen: Value, n_cells: Value, n_chunks: Value, starts: Value) -> None:
    """Writes where each chunk of visible cells starts, all in one pass: the first cell of a word
    of eight, and the visible cells in front of it; int64 [n_chunks + 1, 2]. Chunks without cells,
    and the one after them all, start after the last visible cell."""
    n, chunk = code.variable(code.integer(0)), code.variable(code.integer(0))
    n_words = n_cells // 8
    end = code.variable(code.integer(0))

    def write(cell: Value) -> None:
        to = starts + chunk.value * START
        code.store(cell, to)
        code.store(n.value, to + 8)
        chunk.set(chunk.value + 1)

    with code.loop(0, n_words) as word:
        total = n.value + code.call("llvm.ctpop.i64", I64, code.load(seen + word * 8, I64))
        with code.when(n.value.less(total)):
            end.set(word * 8 + 8)
        with code.when((chunk.value * CHUNK).less(total)):
            write(word * 8)
        n.set(total)
    # cells after the last whole word are not counted yet
    end.set(code.choose((n_cells % 8).less(1), end.value, n_words * 8))
    with code.repeat(lambda: chunk.value.less(n_chunks + 1)):
        write(end.value)


def list_visible(
    code: Code, seen: Value, n_cells: Value, start: Value, skip: Value, cells: Value
) -> Value:
    """Writes the up to CHUNK cells that follow the first `skip` visible ones; returns how many.

    start: what find_chunks has written of this chunk, and after it of the next one. Cells after
    the last visible one are not looked at, however many there are.
    """
    at, n = code.variable(code.load(start, I64)), code.variable(code.load(start + 8, I64))
    end, stop = skip + CHUNK, code.smaller(code.load(start + START, I64) + 8, n_cells)
    with code.repeat(lambda: at.value.less(stop) & n.value.less(end)):
        # what this word still has of an earlier chunk goes in front
        place = code.larger(n.value - skip, code.integer(-1))
        code.store(at.value.resize(I32), cells + place * 4)
        n.set(n.value + code.load(seen + at.value, I8).resize(I64))
        at.set(at.value + 1)
    count = code.larger(n.value - skip, code.integer(0))
    # the last one once more, up to a whole tile
    with code.when(code.integer(0).less(count)):
        final = code.load(cells + count * 4 - 4, I32)
        code.store(code.splat(final, CELLS), cells + count * 4)
    return count


def score(
    code: Code,
    head_dim: int,
    scale: float,
    rows: list[Value],
    at: list[Value],
    k_n: Value,
    scores: Value,
) -> None:
    """Products of every row with the keys at every address, each along its own LANES."""
    lanes = _lanes(head_dim)
    sums = [code.variable(code.constant(lanes, 0.0)) for _ in rows for _ in at]
    with code.loop(0, code.integer(4 * head_dim), 4 * lanes.count) as place:
        queries = [code.load(row + place, lanes) for row in rows]
        keys = [code.load(key + place, lanes) for key in at]
        for key in at:
            code.prefetch(key + place + k_n * KEYS_AHEAD)
        pairs = [(a, b) for a in queries for b in keys]
        for total, (a, b) in zip(sums, pairs, strict=True):
            total.set(code.fma(a, b, total.value))
    totals = _totals([total.value for total in sums])
    size = totals[0].type.count
    piece = min(size, CELLS)
    for i in range(len(rows) * CELLS // piece):
        head, cell = divmod(i * piece, CELLS)
        products = totals[i * piece // size].part(i * piece % size, piece)
        code.store(products * scale, scores + head * (4 * ROW) + cell * 4)


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


def weigh(code: Code, row: Value, count: Value) -> tuple[Value, Value]:
    """Scores become e^(score - largest); returns the largest and the sum of the weights."""
    low = code.constant(F32X16, -float("inf"))
    code.store(low, row + count * 4)
    best, total = code.variable(low), code.variable(code.constant(F32X16, 0.0))
    with code.loop(0, count, 16) as j:
        best.set(code.larger(code.load(row + j * 4, F32X16), best.value))
    top = best.value
    while top.type.count > 1:
        half = top.type.count // 2
        top = code.larger(top.part(0, half), top.part(half, half))
    top = code.sum(top)
    base = code.splat(top)
    with code.loop(0, count, 16) as j:
        weights = exp(code, code.load(row + j * 4, F32X16) - base)
        code.store(weights, row + j * 4)
        total.set(total.value + weights)
    return top, code.sum(total.value)


def add_values(
    code: Code,
    v_dim: int,
    n_rows: int,
    span: tuple[Value, Value],
    cells: Value,
    row: Value,
    values: Value,
    v_n: Value,
    out: Value,
) -> None:
    """out += weights times values of the listed cells `span`, for rows side by side."""
    vectors = list(columns(v_dim))
    for start in range(0, len(vectors), COLUMNS):
        group = vectors[start : start + COLUMNS]
        places = [
            [(out + i * (4 * v_dim) + 4 * d, lanes) for d, lanes in group] for i in range(n_rows)
        ]
        sums = [[code.variable(code.load(*place)) for place in some] for some in places]
        with code.loop(*span) as j:
            at = values + listed(code, cells + j * 4, 0) * v_n
            parts = [code.load(at + 4 * d, lanes) for d, lanes in group]
            for d, _ in group:
                code.prefetch(at + 4 * d + v_n * VALUES_AHEAD)
            for i, totals in enumerate(sums):
                weight = code.load(row + i * (4 * ROW) + j * 4, F32)
                for total, part in zip(totals, parts, strict=True):
                    total.set(code.fma(code.splat(weight, part.type.count), part, total.value))
        for totals, some in zip(sums, places, strict=True):
            for total, (address, _) in zip(totals, some, strict=True):
                code.store(total.value, address)


def divisor(code: Code, total: Value) -> Value:
    """The sum of the weights; 1 if nothing was seen, which gives zeros."""
    one = code.constant(F32, 1.0)
    return code.choose(total.less(0.5), one, total)


def listed(code: Code, cells: Value, i: int) -> Value:
    """A cell out of a list, as an i64."""
    return code.load(cells + 4 * i, I32).resize(I64)


def _lanes(head_dim: int) -> ir.VectorType:
    """The longest vector, up to LANES, that divides a head."""
    return vector(F32, min(LANES, head_dim & -head_dim))


def columns(head_dim: int) -> Iterator[tuple[int, ir.VectorType]]:
    """Where the vectors of a head start, and their type."""
    lanes = _lanes(head_dim)
    return ((d, lanes) for d in range(0, head_dim, lanes.count))


def tiles(n: int) -> Iterator[tuple[int, int]]:
    """Powers of two up to HEADS that make up n: (start, size)."""
    start = 0
    while start < n:
        size = HEADS
        while size > n - start:
            size //= 2
        yield start, size
        start += size
