"""The formulas as they read, tokens one by one."""

from __future__ import annotations

import torch

from kernels.rows.ngrams.hashing import LEAST, NgramHash


def recent_tokens(tokens: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rows.ngrams.recent_tokens."""
    n, contexts = window.shape[1] + 1, []
    history = [
        [*(int(x) for x in old.flatten()), *(int(x) + 1 for x in new)]
        for old, new in zip(window, tokens, strict=True)
    ]
    for line in history:
        ends = range(n - 1, len(line))
        contexts.append([[line[end - back] - 1 for back in range(n)] for end in ends])
    return torch.tensor(contexts), torch.tensor(history, dtype=torch.float32)[..., None]


def hash_rows(context: torch.Tensor, hashing: NgramHash) -> torch.Tensor:
    """See kernels.rows.ngrams.hash_rows."""
    rows = [_rows(line, hashing) for line in context.flatten(0, -2).tolist()]
    return torch.tensor(rows).view(*context.shape[:-1], -1)


def _rows(context: list[int], hashing: NgramHash) -> list[int]:
    tokens = list(context)
    for back in range(1, len(tokens)):
        if tokens[back] in (-1, hashing.end_id):
            tokens[back:] = [hashing.end_id] * len(tokens[back:])
    found: list[int] = []
    heads = hashing.n_heads
    for n in range(2, len(tokens) + 1):
        mixed = 0
        for token, factor in zip(tokens[:n], hashing.multipliers, strict=False):
            mixed ^= token * factor % 2**64
        ranges = list(zip(hashing.sizes, hashing.offsets, strict=True))[(n - 2) * heads :]
        found.extend(mixed % size + offset for size, offset in ranges[:heads])
    return found


def agreeing(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.ngrams.agreeing."""
    score = (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
    score = score.sign() * score.abs().clamp(min=LEAST) ** 0.5
    return value.unsqueeze(-2) / (1 + torch.exp(-score))
