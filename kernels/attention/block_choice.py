"""Which cells a query looks at where an indexer chooses among blocks of tokens (QSA)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.dispatch import pick, pick_invariant
from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import vectors
from kernels.llvm.values import I8, I32, I64
from kernels.norm import rms_norm
from kernels.rope import apply_rope


def choose_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """The cells of `mask` that lie in the best blocks of a query or after the last whole one.

    A block is `ratio` positions one after the other, whole for a query that sees all of them. Its
    key is the mean of its cells' keys, RMS-normed with `weight` and turned as the block's first
    position; its score is the sum over heads of what is positive of q . key. Of equal scores that
    of the earlier block is the larger one.

    q: f32 [B, T, H, d], turned; keys: f32 [B, N, d], neither normed nor turned; positions: int64
    [B, N], whatever they are in cells that the last of the tokens does not see; mask: bool
    [B, T, N]; weight: f32 [d]; table: f32 [n_positions, n_rot], cosines, then sines. Any strides.
    Returns bool [B, T, N]. On a CPU the host looks at no number.

    invariant: a token's choice is the same whatever the other tokens are.
    """
    given = q, keys, positions, mask, weight, table, indexer
    return (_invariant if invariant else _run)(*given)


class Indexer(NamedTuple):
    """ratio: tokens of a block. n_blocks: how many a query sees. eps: of the keys' norm."""

    ratio: int
    n_blocks: int
    eps: float


def choose_blocks_naive(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
) -> torch.Tensor:
    """The choice query by query. Keeps the dtype of its inputs."""
    ratio, n_blocks, _ = indexer
    seen = torch.zeros_like(mask)
    for b in range(len(q)):
        at = positions[b].tolist()
        for t in range(q.shape[1]):
            cells = {at[i]: i for i in mask[b, t].nonzero().flatten().tolist()}
            whole = (max(cells, default=-1) + 1) // ratio
            scores = []
            for block in range(whole):
                own = [keys[b, cells[block * ratio + i]] for i in range(ratio)]
                key = _turned(torch.stack(own).mean(0), weight, table[block * ratio], indexer.eps)
                scores.append(float((q[b, t] @ key).clamp(min=0).sum()))
            best = sorted(range(whole), key=lambda block: -scores[block])[:n_blocks]
            for position, cell in cells.items():
                seen[b, t, cell] = position >= whole * ratio or position // ratio in best
    return seen


def _turned(
    key: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor, eps: float
) -> torch.Tensor:
    key = key / ((key**2).mean() + eps) ** 0.5 * weight
    cos, sin = angles.chunk(2)
    half = len(cos)
    a, b = key[:half], key[half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, key[2 * half :]))


def choose_blocks_with_torch(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """The choice of all queries at once."""
    ratio, n_blocks, _ = indexer
    own = torch.where(mask, positions[:, None], -1).amax(2)
    positions = torch.where(mask[:, -1], positions, -1)  # of all that any token sees
    n_whole = (own + 1) // ratio
    most = int(n_whole.max())
    if most <= n_blocks:
        return mask
    scores = _scores(q, _block_keys(keys, positions, most, weight, table, indexer), invariant)
    is_whole = torch.arange(most, device=q.device) < n_whole[..., None]
    chosen = _best(scores.masked_fill(~is_whole, -torch.inf), n_blocks) & is_whole
    block = (positions // ratio).clamp(0, most - 1)
    in_chosen = chosen.gather(2, block[:, None].expand(-1, q.shape[1], -1))
    in_tail = positions[:, None] >= (n_whole * ratio)[..., None]
    return mask & (in_chosen | in_tail)


def _block_keys(
    raw: torch.Tensor,
    positions: torch.Tensor,
    n: int,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
) -> torch.Tensor:
    """Keys of the first n blocks [B, n, d] of cells' raw keys [B, N, d] at these positions, -1
    where a cell is not seen."""
    n_seqs, ratio = len(raw), indexer.ratio
    # the last place takes what belongs to no block
    place = torch.where(positions < 0, n * ratio, positions).clamp(max=n * ratio)
    cell_of = positions.new_zeros(n_seqs, n * ratio + 1)
    numbers = torch.arange(raw.shape[1], device=raw.device).expand(n_seqs, -1)
    cell_of.scatter_(1, place, numbers)
    rows = torch.arange(n_seqs, device=raw.device)[:, None]
    first, *others = raw[rows, cell_of[:, :-1]].unflatten(1, (n, ratio)).unbind(2)
    for other in others:  # in this order whatever the batch
        first = first + other
    normed = rms_norm((first / ratio)[:, :, None], weight, indexer.eps)
    cos, sin = table[: n * ratio : ratio].expand(n_seqs, -1, -1).chunk(2, -1)
    return apply_rope(normed, cos, sin)[:, :, 0]


def _scores(q: torch.Tensor, keys: torch.Tensor, invariant: bool) -> torch.Tensor:
    """q [B, T, H, d], keys [B, n, d] -> sums over heads of what is positive, [B, T, n]."""
    if invariant:  # the order of sums differs between batches by less than what float32 keeps
        q, keys = q.double(), keys.double()
    products = torch.einsum("bthd,bnd->bthn", q, keys)
    return products.relu().sum(2).float()


def _best(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Which of the last axis are the n largest, bool; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


# numbers that are multiplied before a second thread has woken up
_ALONE = 1 << 15


def choose_blocks_with_llvm(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
) -> torch.Tensor:
    """The choice on a CPU, in three programs: where the tokens of blocks are, the keys of blocks,
    and for every query scores, the best of them and the cells in these."""
    n_seqs, n_tokens, n_heads, d = q.shape
    n_cells = mask.shape[2]
    n = n_cells // indexer.ratio
    if n <= indexer.n_blocks:
        return mask
    n_rot = table.shape[1]
    q, positions, mask = q.contiguous(), positions.contiguous(), mask.contiguous()
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    cell_of = positions.new_empty(n_seqs, n * indexer.ratio)
    n_whole = positions.new_empty(n_seqs, n_tokens)
    sizes = n_tokens, n_cells, n
    _places(indexer.ratio).alone(
        n_seqs,
        *sizes,
        positions.data_ptr(),
        mask.data_ptr(),
        cell_of.data_ptr(),
        n_whole.data_ptr(),
    )
    of_blocks = keys.new_empty(n_seqs, n, d)
    _keys(d, n_rot, indexer.ratio, indexer.eps)(
        *sizes,
        keys.data_ptr(),
        4 * keys.stride(0),
        4 * keys.stride(1),
        cell_of.data_ptr(),
        n_whole.data_ptr(),
        weight.contiguous().data_ptr(),
        table.contiguous().data_ptr(),
        of_blocks.data_ptr(),
        tasks=n_seqs * n,
        chunk=8,
        threads=_threads(keys.shape[1] * d * n_seqs),
    )
    scores = keys.new_empty(n_seqs, n_tokens, n)
    seen = torch.empty_like(mask)
    _choice(n_heads, d, indexer.ratio, indexer.n_blocks)(
        *sizes,
        q.data_ptr(),
        of_blocks.data_ptr(),
        positions.data_ptr(),
        mask.data_ptr(),
        n_whole.data_ptr(),
        scores.data_ptr(),
        seen.data_ptr(),
        tasks=n_seqs * n_tokens,
        chunk=1,
        threads=_threads(q.numel() * n),
    )
    return seen


def _threads(work: int) -> int:
    return torch.get_num_threads() if work > _ALONE else 1


@functools.cache
def _places(ratio: int) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """A task is one sequence. Arguments: tokens, cells, blocks; positions, the mask; the cell
        of every position, how many blocks are whole for each token."""
        n_tokens, n_cells, n, positions, mask, cell_of, n_whole = args
        none = code.integer(0)
        with code.loop(first, last) as b:
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

    return Program(body, 7)


@functools.cache
def _keys(d: int, n_rot: int, ratio: int, eps: float) -> Program:
    return Program(functools.partial(_keys_body, d, n_rot, ratio, eps), 11)


def _keys_body(
    d: int,
    n_rot: int,
    ratio: int,
    eps: float,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """A task is one block. Arguments: tokens, cells, blocks; keys of cells and the bytes from
    sequence to sequence and from cell to cell; the cell of every position, how many blocks are
    whole for each token; weight, table; keys of blocks."""
    n_tokens, _, n, keys, keys_bytes, cell_bytes, cell_of, n_whole, weight, table, out = args
    with code.loop(first, last) as task:
        b, block = task // n, task % n
        most = code.variable(code.integer(0))
        with code.loop(0, n_tokens) as t:
            most.set(code.larger(code.load(n_whole + (b * n_tokens + t) * 8, I64), most.value))
        with code.when(block.less(most.value)):
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


@functools.cache
def _choice(n_heads: int, d: int, ratio: int, n_blocks: int) -> Program:
    return Program(functools.partial(_choice_body, n_heads, d, ratio, n_blocks), 10)


def _choice_body(
    n_heads: int,
    d: int,
    ratio: int,
    n_blocks: int,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """A task is one query. Arguments: tokens, cells, blocks; q, keys of blocks, positions, the
    mask, how many blocks are whole, room for scores; the cells that are seen."""
    n_tokens, n_cells, n, q, keys, positions, mask, n_whole, scores, seen = args
    zero = code.constant(F32, 0.0)
    with code.loop(first, last) as task:
        b, query, own = task // n_tokens, q + task * (4 * n_heads * d), scores + task * n * 4
        whole = code.load(n_whole + task * 8, I64)
        with code.loop(0, whole) as block:
            key, score = keys + (b * n + block) * (4 * d), code.variable(zero)
            with code.loop(0, code.integer(n_heads)) as head:
                total = code.variable(code.constant(F32X16, 0.0))
                for at, count in vectors(code, d):
                    x = code.load_first(query + head * (4 * d) + at, F32X16, count)
                    total.set(code.fma(x, code.load_first(key + at, F32X16, count), total.value))
                score.set(score.value + code.larger(zero, code.sum(total.value)))
            code.store(score.value, own + block * 4)
        least, n_least = _threshold(code, own, whole, n_blocks)
        # from here on a block's number in place of its score: whether it is seen
        left = code.variable(n_least)
        yes, no = code.constant(I32, 1), code.constant(I32, 0)
        with code.loop(0, whole) as block:
            bits = code.load(own + block * 4, I32)
            is_least = bits.equal(least) & code.integer(0).less(left.value)
            left.set(code.choose(is_least, left.value - 1, left.value))
            is_seen = least.less(bits) | is_least
            code.store(code.choose(is_seen, yes, no), own + block * 4)
        at, row, target = (
            positions + b * n_cells * 8,
            mask + task * n_cells,
            seen + task * n_cells,
        )
        with code.loop(0, n_cells) as j:
            found = code.variable(code.load(row + j, I8))
            position = code.load(at + j * 8, I64)
            before = position.less(whole * ratio) & code.integer(-1).less(position)
            with code.when(before):
                chosen = code.load(own + position // ratio * 4, I32).resize(I8)
                found.set(found.value & chosen)
            code.store(found.value, target + j)


def _threshold(code: Code, scores: Value, n: Value, n_best: int) -> tuple[Value, Value]:
    """Of scores that are not negative, whose bits are in their order, the smallest of the n_best
    largest as bits, and how many of this size are among them."""
    low, high = code.variable(code.constant(I32, -1)), code.variable(code.constant(I32, 0x7F800000))
    best = code.integer(n_best)

    def above(least: Value) -> Value:
        count = code.variable(code.integer(0))
        with code.loop(0, n) as i:
            is_above = least.less(code.load(scores + i * 4, I32))
            one = code.choose(is_above, code.integer(1), code.integer(0))
            count.set(count.value + one)
        return count.value

    # the smallest number with fewer than n_best scores above it lies above `low`, up to `high`
    with code.loop(0, code.integer(32)):
        middle = low.value + ((high.value - low.value) >> 1)
        is_few = above(middle).less(best)
        is_open = (low.value + 1).less(high.value)
        low.set(code.choose(is_few | (middle.equal(low.value)), low.value, middle))
        high.set(code.choose(is_few & is_open, middle, high.value))
    return high.value, best - above(high.value)


_run = pick(choose_blocks_naive, choose_blocks_with_torch, None, choose_blocks_with_llvm)
_invariant = pick_invariant(choose_blocks_with_torch, choose_blocks_with_llvm)
