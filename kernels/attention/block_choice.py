"""Which cells a query attends to if an indexer chooses among blocks of tokens (QSA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import operation
from kernels.norm import rms_norm
from kernels.pointwise.with_torch import pointwise
from kernels.rope import apply_rope

_LLVM = "kernels.attention.block_choice_with_llvm"


class Indexer(NamedTuple):
    """ratio: tokens of a block. n_blocks: how many a query sees. eps: of the keys' norm, if they
    are normed."""

    ratio: int
    n_blocks: int
    eps: float = 0.0


BlockArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Indexer]
"""q, keys, positions, mask, weight, table and the indexer, as choose_blocks describes them."""
PoolArguments = BlockArguments
"""q, weights, rows, positions, mask, bias and the indexer, as choose_pools describes them."""


@operation(llvm=_LLVM)
def choose_blocks(*inputs: *BlockArguments, invariant: bool = False) -> Tensor:
    """The cells of `mask` that lie in the best blocks of a query or after the last whole one.

    A block is `ratio` consecutive positions; it is whole for a query that sees all of them. Its key
    is the mean of its cells' keys, RMS-normed with `weight` and rotated as the block's first
    position; its score is the sum over heads of max(q . key, 0). Of equal scores the earlier block
    wins.

    q: f32 [B, T, H, d], rotated; keys: f32 [B, N, d], neither normed nor rotated; positions: int64
    [B, N], any value in cells that the last token does not see; mask: bool [B, T, N]; weight: f32
    [d]; table: f32 [n_positions, n_rot], cosines, then sines. Any strides. Returns bool [B, T, N].
    On a CPU the host reads no number.

    invariant: a token's choice is the same whatever the other tokens are.
    """
    q, keys, positions, mask, weight, table, indexer = inputs

    def keys_of(own: Tensor) -> Tensor:
        return _block_keys(own, weight, table, indexer)

    # no position is beyond the table
    most = min(keys.shape[1], len(table)) // indexer.ratio
    return _choose_with_torch(q, None, keys, positions, mask, indexer, keys_of, most, invariant)


@operation(llvm=_LLVM)
def choose_pools(*inputs: *PoolArguments, invariant: bool = False) -> Tensor:
    """The same with a block's key pooled from keys and gates of its cells (glm5-next).

    Each of its numbers is the sum of that number in the cells' keys, weighted by the softmax of
    their gates plus the bias of the place in the block. The block's score is the sum over heads of
    weight times max(q . key, 0), and may be negative.

    q: f32 [B, T, H, d]; weights: [B, T, H]; rows: f32 [B, N, 2d], key and gate of a cell; bias: f32
    [ratio, d]; others and result: see choose_blocks.
    """
    q, weights, rows, positions, mask, bias, indexer = inputs

    def keys_of(own: Tensor) -> Tensor:
        keys, gates = own.chunk(2, 3)
        gates = gates + bias
        shares = pointwise(torch.exp, gates - gates.amax(2, keepdim=True), invariant=invariant)
        return _in_order(shares * keys) / _in_order(shares)

    most = rows.shape[1] // indexer.ratio
    return _choose_with_torch(q, weights, rows, positions, mask, indexer, keys_of, most, invariant)


# Query by query. Keeps the dtype of its inputs.


def choose_blocks_naive(*inputs: *BlockArguments) -> Tensor:
    q, keys, positions, mask, weight, table, indexer = inputs

    def key_of(own: Tensor, block: int) -> Tensor:
        return _turned(own.mean(0), weight, table[block * indexer.ratio], indexer.eps)

    return _choose_naive(q, q.new_ones(q.shape[:3]), keys, positions, mask, indexer, key_of)


def choose_pools_naive(*inputs: *PoolArguments) -> Tensor:
    q, weights, rows, positions, mask, bias, indexer = inputs

    def key_of(own: Tensor, block: int) -> Tensor:
        keys, gates = own.chunk(2, 1)
        return ((gates + bias).softmax(0) * keys).sum(0)

    return _choose_naive(q, weights, rows, positions, mask, indexer, key_of)


def _choose_naive(
    q: Tensor,
    weights: Tensor,
    rows: Tensor,
    positions: Tensor,
    mask: Tensor,
    indexer: Indexer,
    key_of: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """key_of: the key of a block, from the rows of its cells and its number."""
    ratio, n_blocks, _ = indexer
    seen = torch.zeros_like(mask)
    for b in range(len(q)):
        at = positions[b].tolist()
        for t in range(q.shape[1]):
            cells = {at[i]: i for i in mask[b, t].nonzero().flatten().tolist()}
            whole = (max(cells, default=-1) + 1) // ratio
            scores = []
            for block in range(whole):
                own = [rows[b, cells[block * ratio + i]] for i in range(ratio)]
                products = (q[b, t] @ key_of(torch.stack(own), block)).clamp(min=0)
                scores.append(float((products * weights[b, t]).sum()))
            best = sorted(range(whole), key=lambda block: -scores[block])[:n_blocks]
            for position, cell in cells.items():
                seen[b, t, cell] = position >= whole * ratio or position // ratio in best
    return seen


def _turned(key: Tensor, weight: Tensor, angles: Tensor, eps: float) -> Tensor:
    key = key / ((key**2).mean() + eps) ** 0.5 * weight
    cos, sin = angles.chunk(2)
    half = len(cos)
    a, b = key[:half], key[half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, key[2 * half :]))


def _choose_with_torch(
    q: Tensor,
    weights: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    mask: Tensor,
    indexer: Indexer,
    keys_of: Callable[[Tensor], Tensor],
    most: int,
    invariant: bool,
) -> Tensor:
    """keys_of: keys of blocks [B, n, d], from the rows of their cells [B, n, ratio, _]. most: upper
    bound of whole blocks, because the host reads no number."""
    ratio, n_blocks, _ = indexer
    if most <= n_blocks:
        return mask
    own = torch.where(mask, positions[:, None], -1).amax(2)
    positions = torch.where(mask[:, -1], positions, -1)  # the last token sees all cells in use
    n_whole = (own + 1) // ratio
    scores = _scores(q, weights, keys_of(_in_blocks(rows, positions, most, ratio)), invariant)
    is_whole = torch.arange(most, device=q.device) < n_whole[..., None]
    chosen = _best(scores.masked_fill(~is_whole, -torch.inf), n_blocks) & is_whole
    block = (positions // ratio).clamp(0, most - 1)
    in_chosen = chosen.gather(2, block[:, None].expand(-1, q.shape[1], -1))
    in_tail = positions[:, None] >= (n_whole * ratio)[..., None]
    return mask & (in_chosen | in_tail)


def _in_blocks(rows: Tensor, positions: Tensor, n: int, ratio: int) -> Tensor:
    """Rows of the cells of the first n blocks [B, n, ratio, _], of cells' rows [B, N, _] at these
    positions, -1 where a cell is not seen."""
    n_seqs = len(rows)
    # cells outside all blocks go to the last place
    place = torch.where(positions < 0, n * ratio, positions).clamp(max=n * ratio)
    cell_of = positions.new_zeros(n_seqs, n * ratio + 1)
    numbers = torch.arange(rows.shape[1], device=rows.device).expand(n_seqs, -1)
    cell_of.scatter_(1, place, numbers)
    which = torch.arange(n_seqs, device=rows.device)[:, None]
    return rows[which, cell_of[:, :-1]].unflatten(1, (n, ratio))


def _in_order(x: Tensor) -> Tensor:
    """The sum over the third axis, in the same order whatever the batch."""
    first, *others = x.unbind(2)
    for other in others:
        first = first + other
    return first


def _block_keys(own: Tensor, weight: Tensor, table: Tensor, indexer: Indexer) -> Tensor:
    """Keys of blocks [B, n, d] from the raw keys of their cells [B, n, ratio, d]."""
    n, ratio = own.shape[1:3]
    normed = rms_norm((_in_order(own) / ratio)[:, :, None], weight, indexer.eps)
    cos, sin = table[: n * ratio : ratio].expand(len(own), -1, -1).chunk(2, -1)
    return apply_rope(normed, cos, sin)[:, :, 0]


def _scores(q: Tensor, weights: Tensor | None, keys: Tensor, invariant: bool) -> Tensor:
    """q [B, T, H, d], weights [B, T, H], keys [B, n, d] -> sums over heads of weight times max(q .
    key, 0), [B, T, n]."""
    if invariant:  # in f64, a different order of sums has no effect on the f32 result
        q, keys = q.double(), keys.double()
    products = torch.einsum("bthd,bnd->bthn", q, keys).relu()
    if weights is not None:
        products = products * weights[..., None]
    return products.sum(2).float()


def _best(scores: Tensor, n: int) -> Tensor:
    """Which of the last axis are the n largest, bool; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
