"""The choice of blocks on a CPU, in LLVM: programs for the places of tokens, the keys of blocks,
and the scores with the best of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.block_choice import BlockArguments, Indexer, PoolArguments
from kernels.llvm import F32, F32X16, Code, Program, Value, kernel
from kernels.llvm.functions import addresses, exp, stepped, vectors
from kernels.llvm.values import I8, I32, I64

# numbers that are multiplied before a second thread has woken up
_ALONE = 1 << 15


def choose_blocks(*inputs: *BlockArguments) -> Tensor:
    q, keys, positions, mask, weight, table, indexer = inputs
    d, n_rot = q.shape[3], table.shape[1]
    program = _keys(d, n_rot, indexer.ratio, indexer.eps)
    given = weight, table
    return _choose_with_llvm(q, None, keys, positions, mask, indexer, program, given)


def choose_pools(*inputs: *PoolArguments) -> Tensor:
    q, weights, rows, positions, mask, bias, indexer = inputs
    program = _pooled_keys(q.shape[3], indexer.ratio)
    return _choose_with_llvm(q, weights, rows, positions, mask, indexer, program, (bias,))


def _choose_with_llvm(
    q: Tensor,
    weights: Tensor | None,
    keys: Tensor,
    positions: Tensor,
    mask: Tensor,
    indexer: Indexer,
    keys_program: Program,
    given: Sequence[Tensor],
) -> Tensor:
    """The choice on a CPU, in three programs: where the tokens of blocks are, the keys of blocks
    (keys_program, which takes `given` as well), and for every query scores, the best of them and
    the cells in these."""
    n_seqs, n_tokens, n_heads, d = q.shape
    n_cells = mask.shape[2]
    n = n_cells // indexer.ratio
    if n <= indexer.n_blocks:
        return mask
    weighted = weights is not None
    given = [tensor.contiguous() for tensor in given]
    weights = q if weights is None else weights.contiguous()
    q, positions, mask = q.contiguous(), positions.contiguous(), mask.contiguous()
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    cell_of = positions.new_empty(n_seqs, n * indexer.ratio)
    n_whole = positions.new_empty(n_seqs, n_tokens)
    sizes = n_tokens, n_cells, n
    _places(indexer.ratio).alone(n_seqs, *sizes, *addresses(positions, mask, cell_of, n_whole))
    of_blocks = keys.new_empty(n_seqs, n, d)
    keys_program(
        *sizes,
        *stepped(keys, 2),
        *addresses(cell_of, n_whole, *given, of_blocks),
        tasks=n_seqs * n,
        chunk=8,
        threads=_threads(keys.shape[1] * d * n_seqs),
    )
    scores = keys.new_empty(n_seqs, n_tokens, n)
    seen = torch.empty_like(mask)
    _choice(n_heads, d, indexer.ratio, indexer.n_blocks, weighted)(
        *sizes,
        *addresses(q, weights, of_blocks, positions, mask, n_whole, scores, seen),
        tasks=n_seqs * n_tokens,
        chunk=1,
        threads=_threads(q.numel() * n),
    )
    return seen


def _threads(work: int) -> int:
    return torch.get_num_threads() if work > _ALONE else 1


@kernel(7)
def _places(code: Code, args: Sequence[Value], b: Value, ratio: int) -> None:
    """A task is one sequence. Arguments: tokens, cells, blocks; positions, the mask; the cell
    of every position, how many blocks are whole for each token."""
    n_tokens, n_cells, n, positions, mask, cell_of, n_whole = args
    none = code.integer(0)
    at, cells = positions + b * n_cells * 8, cell_of + b * n * (8 * ratio)
    with code.loop(0, n * ratio) as i:
        code.store(none, cells + i * 8)
    with code.loop(0, n_tokens) as t:
        row = mask + (b * n_tokens + t) * n_cells
        highest = code.variable(none - 1)
        with code.loop(0, n_cells) as j:
            is_seen = none.less(code.load(row + j, I8).resize(I64))
            position = code.choose(is_seen, code.load(at + j * 8, I64), none - 1)
            highest.set(code.larger(position, highest.value))
            with code.when(position.less(n * ratio) & (none - 1).less(position)):
                code.store(j, cells + position * 8)
        whole = code.smaller((highest.value + 1) // ratio, n)
        code.store(whole, n_whole + (b * n_tokens + t) * 8)


def _most_whole(code: Code, n_whole: Value, b: Value, n_tokens: Value) -> Value:
    """How many blocks of a sequence are whole for the last of its tokens."""
    most = code.variable(code.integer(0))
    with code.loop(0, n_tokens) as t:
        most.set(code.larger(code.load(n_whole + (b * n_tokens + t) * 8, I64), most.value))
    return most.value


@kernel(11)
def _keys(
    code: Code, args: Sequence[Value], task: Value, d: int, n_rot: int, ratio: int, eps: float
) -> None:
    """A task is one block. Arguments: tokens, cells, blocks; keys of cells and the bytes from
    sequence to sequence and from cell to cell; the cell of every position, how many blocks are
    whole for each token; weight, table; keys of blocks."""
    n_tokens, _, n, keys, keys_bytes, cell_bytes, cell_of, n_whole, weight, table, out = args
    b, block = task // n, task % n
    with code.when(block.less(_most_whole(code, n_whole, b, n_tokens))):
        source, target = keys + b * keys_bytes, out + task * (4 * d)
        cells = cell_of + task * (8 * ratio)
        squares = code.variable(code.constant(F32X16, 0.0))
        for at, count in vectors(code, d):
            total = code.variable(code.constant(F32X16, 0.0))
            with code.loop(0, code.integer(ratio)) as i:
                cell = source + code.load(cells + i * 8, I64) * cell_bytes
                total.set(total.value + code.load_first(cell + at, F32X16, count))
            mean = total.value / float(ratio)
            squares.set(code.fma(mean, mean, squares.value))
            code.store_first(mean, target + at, count)
        square = code.sum(squares.value) / float(d)
        scale = code.splat(code.constant(F32, 1.0) / code.sqrt(square + eps))
        for at, count in vectors(code, d):
            factor = code.load_first(weight + at, F32X16, count) * scale
            mean = code.load_first(target + at, F32X16, count)
            code.store_first(mean * factor, target + at, count)
        half = 2 * n_rot  # bytes
        angles = table + block * (4 * n_rot * ratio)
        for at, count in vectors(code, n_rot // 2):
            cos, sin = (code.load_first(angles + i * half + at, F32X16, count) for i in (0, 1))
            x, y = (code.load_first(target + i * half + at, F32X16, count) for i in (0, 1))
            code.store_first(x * cos - y * sin, target + at, count)
            code.store_first(y * cos + x * sin, target + half + at, count)


@kernel(10)
def _pooled_keys(code: Code, args: Sequence[Value], task: Value, d: int, ratio: int) -> None:
    """A task is one block. Arguments: tokens, cells, blocks; rows of cells, key and gate, and the
    bytes from sequence to sequence and from cell to cell; the cell of every position, how many
    blocks are whole for each token; the bias; keys of blocks."""
    n_tokens, _, n, rows, seq_bytes, cell_bytes, cell_of, n_whole, bias, out = args
    b, block = task // n, task % n
    with code.when(block.less(_most_whole(code, n_whole, b, n_tokens))):
        source, cells = rows + b * seq_bytes, cell_of + task * (8 * ratio)
        for at, count in vectors(code, d):

            def gate(i: Value, at: Value = at, count: int = count) -> tuple[Value, Value]:
                """Address of a cell's key, and its gate."""
                key = source + code.load(cells + i * 8, I64) * cell_bytes + at
                added = code.load_first(bias + i * (4 * d) + at, F32X16, count)
                return key, code.load_first(key + 4 * d, F32X16, count) + added

            largest = code.variable(code.constant(F32X16, -math.inf))
            with code.loop(0, code.integer(ratio)) as i:
                largest.set(code.larger(gate(i)[1], largest.value))
            zero = code.constant(F32X16, 0.0)
            total, pooled = code.variable(zero), code.variable(zero)
            with code.loop(0, code.integer(ratio)) as i:
                key, of_cell = gate(i)
                share = exp(code, of_cell - largest.value)
                total.set(total.value + share)
                number = code.load_first(key, F32X16, count)
                pooled.set(code.fma(number, share, pooled.value))
            mean = pooled.value / total.value
            code.store_first(mean, out + task * (4 * d) + at, count)


@kernel(11)
def _choice(
    code: Code,
    args: Sequence[Value],
    task: Value,
    n_heads: int,
    d: int,
    ratio: int,
    n_blocks: int,
    weighted: bool,
) -> None:
    """A task is one query. Arguments: tokens, cells, blocks; q, weights of its heads, keys of
    blocks, positions, the mask, how many blocks are whole, room for scores; the cells that are
    seen."""
    n_tokens, n_cells, n, q, weights, keys, positions, mask, n_whole, scores, seen = args
    zero = code.constant(F32, 0.0)
    b, query, own = task // n_tokens, q + task * (4 * n_heads * d), scores + task * n * 4
    whole = code.load(n_whole + task * 8, I64)
    with code.loop(0, whole) as block:
        key, score = keys + (b * n + block) * (4 * d), code.variable(zero)
        with code.loop(0, code.integer(n_heads)) as head:
            total = code.variable(code.constant(F32X16, 0.0))
            for at, count in vectors(code, d):
                x = code.load_first(query + head * (4 * d) + at, F32X16, count)
                total.set(code.fma(x, code.load_first(key + at, F32X16, count), total.value))
            product = code.larger(zero, code.sum(total.value))
            if weighted:
                at_head = weights + (task * n_heads + head) * 4
                product = product * code.load(at_head, F32)
            score.set(score.value + product)
        bits = (score.value + 0.0).bits(I32)  # minus zero is zero
        if weighted:  # integers in the order of the scores, negative ones too
            bits = bits ^ (bits.down_signed(31) & 0x7FFFFFFF)
        code.store(bits, own + block * 4)
    least, n_least = threshold(code, own, whole, n_blocks, signed=weighted)
    # scores are replaced by whether a block is seen
    left = code.variable(n_least)
    yes, no = code.constant(I32, 1), code.constant(I32, 0)
    with code.loop(0, whole) as block:
        bits = code.load(own + block * 4, I32)
        is_least = bits.equal(least) & code.integer(0).less(left.value)
        left.set(code.choose(is_least, left.value - 1, left.value))
        is_seen = least.less(bits) | is_least
        code.store(code.choose(is_seen, yes, no), own + block * 4)
    at, row, target = (positions + b * n_cells * 8, mask + task * n_cells, seen + task * n_cells)
    with code.loop(0, n_cells) as j:
        found = code.variable(code.load(row + j, I8))
        position = code.load(at + j * 8, I64)
        before = position.less(whole * ratio) & code.integer(-1).less(position)
        with code.when(before):
            chosen = code.load(own + position // ratio * 4, I32).resize(I8)
            found.set(found.value & chosen)
        code.store(found.value, target + j)


def threshold(
    code: Code, scores: Value, n: Value, n_best: int, *, signed: bool
) -> tuple[Value, Value]:
    """Of n integers ordered as the scores, infinity the largest: the smallest of the n_best
    largest, and how many of these equal it. signed: whether some may be negative."""
    below = code.constant(I32, -(2**31) if signed else -1)
    low, high = code.variable(below), code.variable(code.constant(I32, 0x7F800000))
    best = code.integer(n_best)

    def above(least: Value) -> Value:
        count = code.variable(code.integer(0))
        with code.loop(0, n) as i:
            is_above = least.less(code.load(scores + i * 4, I32))
            one = code.choose(is_above, code.integer(1), code.integer(0))
            count.set(count.value + one)
        return count.value

    # the smallest number with fewer than n_best scores above it lies above `low`, up to `high`
    with code.loop(0, code.integer(33 if signed else 32)):
        middle = low.value + ((high.value - low.value) >> 1)
        is_few = above(middle).less(best)
        is_open = (low.value + 1).less(high.value)
        low.set(code.choose(is_few | (middle.equal(low.value)), low.value, middle))
        high.set(code.choose(is_few & is_open, middle, high.value))
    return high.value, best - above(high.value)
