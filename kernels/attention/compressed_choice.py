"""Which cells queries of attention with compressed rows see: those of tokens in a window, and those
of tokens that end a block, all of them or the ones an indexer chooses (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.block_choice_with_llvm import threshold
from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import addresses, stepped, vectors
from kernels.llvm.values import I8, I32, I64
from kernels.rows import join


class BlockScores(NamedTuple):
    """How an indexer scores blocks: the sum over heads of weight times max(q . key, 0).

    q: f32 [B, T, H, d]; weights: f32 [B, T, H]; keys: f32 [B, N, d], any strides, of each block in
    the cell of its last token. n_best: how many blocks a query sees; of equal ones the first.
    """

    q: Tensor
    weights: Tensor
    keys: Tensor
    n_best: int


@operation(llvm=__name__, any_type=True)
def see_blocks(
    window: Tensor,
    seen: Tensor,
    positions: Tensor,
    ratio: int,
    scores: BlockScores | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """The cells that tokens see, and after them the cells with rows of blocks.

    window, seen: bool [B, T, N], what tokens see by themselves, and with no window; positions:
    int64 [B, N], of cells, any number where no token sees one. A block ends where position mod
    ratio is ratio - 1. scores: None to see all blocks. Returns bool [B, T, 2 N]. On a CPU the host
    looks at no number.

    invariant: a token's choice is the same whatever the other tokens are.
    """
    blocks = seen & (positions % ratio == ratio - 1)[:, None]
    if scores is not None and scores.n_best < seen.shape[2]:
        q, weights, keys, n_best = scores
        if invariant:  # in f64, a different order of sums has no effect on the f32 result
            q, weights, keys = q.double(), weights.double(), keys.double()
        products = torch.einsum("bthd,bnd->bthn", q, keys).relu()
        found = torch.einsum("bthn,bth->btn", products, weights).float()
        found = found.masked_fill(~blocks, -torch.inf)
        order = found.sort(dim=-1, descending=True, stable=True).indices[..., :n_best]
        blocks &= torch.zeros_like(blocks).scatter_(-1, order, True)
    return torch.cat((window, blocks), 2)


def see_blocks_naive(
    window: Tensor, seen: Tensor, positions: Tensor, ratio: int, scores: BlockScores | None = None
) -> Tensor:
    """The choice query by query."""
    blocks = torch.zeros_like(seen)
    for b, t in torch.cartesian_prod(*(torch.arange(n) for n in seen.shape[:2])).tolist():
        cells = [
            cell
            for cell in seen[b, t].nonzero().flatten().tolist()
            if int(positions[b, cell]) % ratio == ratio - 1
        ]
        if scores is not None:
            q, weights, keys, n_best = scores
            found = {cell: weights[b, t] @ (q[b, t] @ keys[b, cell]).clamp(min=0) for cell in cells}
            cells = sorted(cells, key=lambda cell: -float(found[cell]))[:n_best]
        blocks[b, t, cells] = True
    return torch.cat((window, blocks), 2)


# multiplications below which other threads are not worth waking
_ALONE = 1 << 15


def see_blocks_with_llvm(
    window: Tensor, seen: Tensor, positions: Tensor, ratio: int, scores: BlockScores | None = None
) -> Tensor:
    """The choice on a CPU; scores are computed for queries with more blocks than they may see."""
    n_seqs, n_tokens, n_cells = window.shape
    window, seen, positions = window.contiguous(), seen.contiguous(), positions.contiguous()
    visible = seen.new_empty(n_seqs, n_tokens, 2 * n_cells)
    work, of_index = n_tokens * n_cells, [0] * 6
    n_heads = d = n_best = 0
    if scores is not None:
        q, weights, keys, n_best = scores
        n_heads, d = q.shape[2:]
        # by kernels, because a recorded pass consists of nothing else
        q, weights = (x if x.is_contiguous() else join((x,)) for x in (q, weights))
        if keys.stride(2) != 1:
            keys = join((keys,))
        room = q.new_empty(n_seqs, n_tokens, n_cells)
        of_index = [*addresses(q, weights), *stepped(keys, 2), *addresses(room)]
        work = q.numel() * n_cells // ratio
    _program(ratio, n_heads, d, n_best)(
        n_tokens,
        n_cells,
        *addresses(window, seen, positions, visible),
        *of_index,
        tasks=n_seqs * n_tokens,
        chunk=1,
        threads=torch.get_num_threads() if work > _ALONE else 1,
    )
    return visible


@kernel(12)
def _program(
    code: Code, args: Sequence[Value], task: Value, ratio: int, n_heads: int, d: int, n_best: int
) -> None:
    """A task is one query. Arguments: tokens, cells; both masks, positions, what is seen; of an
    indexer queries, weights, keys and the bytes from sequence to sequence and from cell to cell,
    and room for scores."""
    n_tokens, n, window, seen, positions, visible = args[:6]
    q, weights, keys, keys_bytes, cell_bytes, room = args[6:]
    no = code.integer(0)
    b, own, all_ = task // n_tokens, window + task * n, seen + task * n
    at, tokens = positions + b * n * 8, visible + task * n * 2
    blocks, found = tokens + n, code.variable(no)
    with code.loop(0, n) as j:
        code.store(code.load(own + j, I8), tokens + j)
        position = code.load(at + j * 8, I64)
        ends = (position % ratio).equal(ratio - 1)
        is_block = code.choose(ends, code.load(all_ + j, I8).resize(I64), no)
        code.store(is_block.resize(I8), blocks + j)
        found.set(found.value + is_block)
    if n_heads:
        with code.when(code.integer(n_best).less(found.value)):
            key = keys + b * keys_bytes, cell_bytes
            of_query = q + task * (4 * n_heads * d), weights + task * (4 * n_heads)
            _leave_out(code, (n_heads, d, n_best), n, of_query, key, blocks, room + task * n * 4)


def _leave_out(
    code: Code,
    sizes: tuple[int, int, int],
    n: Value,
    of_query: tuple[Value, Value],
    keys: tuple[Value, Value],
    blocks: Value,
    room: Value,
) -> None:
    """Clear those of n flags that are not for the best blocks. sizes: heads, numbers of a key,
    blocks to keep. of_query: queries, weights. keys: their address, and bytes from one to the next.
    room: for scores."""
    (n_heads, d, n_best), (query, weights) = sizes, of_query
    yes, no = code.integer(1), code.integer(0)
    n_scored = code.variable(no)
    with code.loop(0, n) as j, code.when(no.less(code.load(blocks + j, I8).resize(I64))):
        key, score = keys[0] + j * keys[1], code.variable(code.constant(F32, 0.0))
        with code.loop(0, code.integer(n_heads)) as head:
            total = code.variable(code.constant(F32X16, 0.0))
            for place, count in vectors(code, d):
                x = code.load_first(query + head * (4 * d) + place, F32X16, count)
                y = code.load_first(key + place, F32X16, count)
                total.set(code.fma(x, y, total.value))
            positive = code.larger(code.constant(F32, 0.0), code.sum(total.value))
            score.set(score.value + positive * code.load(weights + head * 4, F32))
        bits = (score.value + 0.0).bits(I32)  # minus zero is zero
        # as integers in the order of the numbers, negative ones too
        ordered = bits ^ (bits.down_signed(31) & 0x7FFFFFFF)
        code.store(ordered, room + n_scored.value * 4)
        n_scored.set(n_scored.value + 1)
    least, n_least = threshold(code, room, n_scored.value, n_best, signed=True)
    left = code.variable(n_least)
    n_scored.set(no)
    with code.loop(0, n) as j, code.when(no.less(code.load(blocks + j, I8).resize(I64))):
        ordered = code.load(room + n_scored.value * 4, I32)
        is_least = ordered.equal(least) & no.less(left.value)
        left.set(code.choose(is_least, left.value - 1, left.value))
        stays = code.choose(least.less(ordered) | is_least, yes, no)
        code.store(stays.resize(I8), blocks + j)
        n_scored.set(n_scored.value + 1)
