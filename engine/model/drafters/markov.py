"""DSpark's Markov head: a bias on every row's logits by the token before, of low rank.

The chain is greedy: each row's best token is the one before the next row. Confidences come from the
same pass, from each row and the token before it.
"""

from __future__ import annotations

import torch

from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.weights import Weights
from kernels.pointwise import add
from kernels.rows import copy_rows, join, take_rows
from kernels.rows.argmax import argmax


class MarkovHead:
    """The chain over a block. ids: int64 [n_drafted], the target's id of every row of the head;
    None where they are the same."""

    def __init__(self, weights: Weights, config: DFlashConfig, ids: torch.Tensor | None) -> None:
        self._first = 0 if config.anchor else 1
        self._before = weights.table("markov_w1.weight")
        self._bias = weights.project("markov_w2.weight")
        self._confidence = weights.biased("conf_proj") if config.confident else None
        self._ids, self._rank = ids, config.markov

    def __call__(
        self, logits: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits f32 [B, m, n_drafted], hidden f32 [B, m, n_embd] and the last chosen tokens int64
        [B] -> logits with the bias, and confidences before the sigmoid [B, m], or [B, 0] without a
        head for them. Row 0 of a block that does not draft from its anchor has neither."""
        n_seqs, m, n_drafted = logits.shape
        columns = logits.new_empty(n_seqs, m, n_drafted)
        before = logits.new_empty(n_seqs, m, self._rank)
        previous = last.unsqueeze(1)
        if self._first:
            copy_rows(columns[:, :1], logits[:, :1])
            copy_rows(before[:, :1], self._before(previous))
        for row in range(self._first, m):
            here = slice(row, row + 1)
            known = self._before(previous)
            copy_rows(before[:, here], known)
            column = add(logits[:, here], self._bias(known, invariant=invariant))
            copy_rows(columns[:, here], column)
            previous = argmax(column)
            if self._ids is not None:
                previous = take_rows(self._ids, previous)
        if self._confidence is None:
            return columns, logits.new_empty(n_seqs, 0)
        sure = self._confidence(join((hidden, before)), invariant=invariant)
        return columns, sure.view(n_seqs, m)
