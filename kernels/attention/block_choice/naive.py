"""The choice query by query."""

from __future__ import annotations

import torch

from kernels.attention.block_choice.indexer import Indexer


def choose_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
) -> torch.Tensor:
    """See kernels.attention.block_choice.choose_blocks. Keeps the dtype of its inputs."""
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
