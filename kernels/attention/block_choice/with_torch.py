"""The choice of all queries at once."""

from __future__ import annotations

import torch

from kernels.attention.block_choice.indexer import Indexer
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
    """See kernels.attention.block_choice.choose_blocks."""
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


def choose_blocks_invariant(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
) -> torch.Tensor:
    """choose_blocks, with each token's choice independent of the tokens beside it."""
    given = q, keys, positions, mask, weight, table, indexer
    return choose_blocks(*given, invariant=True)


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
