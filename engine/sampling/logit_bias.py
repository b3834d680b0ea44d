"""Logit bias: numbers added to the logits of some tokens before anything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class LogitBias:
    """Biases of one run.

    biases: token id and what is added to its logit; those of one token add up. banned: token ids
    that get -inf, which is how llama.cpp ignores end tokens.
    """

    def __init__(self, biases: Sequence[tuple[int, float]], banned: Collection[int] = ()) -> None:
        entries = [*biases, *((token, -torch.inf) for token in sorted(banned))]
        self._ids = torch.tensor([token for token, _ in entries], dtype=torch.int64)
        self._values = torch.tensor([bias for _, bias in entries])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Biased logits [n, n_vocab]; the logits given are not changed."""
        if not self._ids.numel():
            return logits
        if self._ids.device != logits.device:
            self._ids, self._values = self._ids.to(logits.device), self._values.to(logits)
        return logits.index_add(1, self._ids, self._values.expand(logits.shape[0], -1))
