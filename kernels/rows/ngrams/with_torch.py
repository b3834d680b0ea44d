"""The formulas on whole tensors."""

from __future__ import annotations

import torch

from kernels.rows.ngrams.hashing import LEAST, NgramHash
from kernels.whole_vectors import pointwise


def recent_tokens(tokens: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rows.ngrams.recent_tokens."""
    history = torch.cat((window, (tokens + 1).to(torch.float32)[..., None]), 1)
    newest_last = history[..., 0].unfold(1, window.shape[1] + 1, 1)
    return newest_last.flip(-1).to(torch.int64) - 1, history


def hash_rows(context: torch.Tensor, hashing: NgramHash) -> torch.Tensor:
    """See kernels.rows.ngrams.hash_rows."""

    def of(numbers: tuple[int, ...]) -> torch.Tensor:
        # the same bits with a sign
        return torch.tensor([(x ^ 2**63) - 2**63 for x in numbers], device=context.device)

    cut = (context < 0) | (context == hashing.end_id)
    cut[..., 0] = False  # a token that is the end itself still follows what came before it
    tokens = torch.where(cut.cumsum(-1) > 0, hashing.end_id, context)
    products = (tokens * of(hashing.multipliers)).unbind(-1)
    mixed, found = products[0], []
    for product in products[1:]:
        mixed = mixed ^ product
        found.extend([mixed] * hashing.n_heads)
    sizes, numbers = of(hashing.sizes), torch.stack(found, -1)
    # a negative number stands for 2^64 more
    more = of(tuple(2**64 % size for size in hashing.sizes)) * (numbers < 0)
    return (numbers.remainder(sizes) + more).remainder(sizes) + of(hashing.offsets)


def agreeing(
    key: torch.Tensor, query: torch.Tensor, value: torch.Tensor, *, invariant: bool = False
) -> torch.Tensor:
    """See kernels.rows.ngrams.agreeing."""
    score = (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
    score = score.sign() * score.abs().clamp_min(LEAST).sqrt()
    return pointwise(torch.sigmoid, score, invariant=invariant) * value.unsqueeze(-2)


def agreeing_invariant(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """agreeing, with each row's bits independent of the rows around it."""
    return agreeing(key, query, value, invariant=True)
