"""Heads of the DFlash family: DFlash2's selector and DSpark's Markov head.

The selector says which of a row's best candidates follows which of the row before: a candidate's
score is its logit plus a product of three: the token before it, a gate from the row's hidden state,
and the candidate. The Markov head is a bias of low rank on every row's logits by the token before;
its chain is greedy, and confidences come from each row and the token before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.machine.device import inference_mode
from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.weights import Embedding, Weights
from kernels.pointwise import add
from kernels.rows import copy_rows, join, take_rows
from kernels.rows.reductions import argmax, top_k


class Lattice(NamedTuple):
    """Candidates of the rows 1 .. m - 1 of blocks, best first by their logits.

    ids: int64 [B, m - 1, T]. scores: f32 [B, m - 1, T, T], by the predecessor and the candidate;
    in the first row all predecessors are the last chosen token.
    """

    ids: torch.Tensor
    scores: torch.Tensor


class Selector:
    """Scores of neighbours. ids: as in MarkovHead."""

    def __init__(self, weights: Weights, config: DFlashConfig, ids: torch.Tensor | None) -> None:
        assert config.selector is not None
        self._sizes, self._ids = config.selector, ids
        self._predecessor = weights.table("selector_predecessor.weight")
        self._successor = weights.table("selector_successor.weight")
        self._gate = weights.project("selector_hidden.weight")

    @inference_mode
    def base(self, logits: torch.Tensor) -> torch.Tensor:
        """The head's logits, scaled and perhaps capped, which leaves their order as it is."""
        base = logits * self._sizes.logit_scale
        cap = self._sizes.softcap
        return cap * torch.tanh(base / cap) if cap else base

    @inference_mode
    def lattice(
        self, logits: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, *, invariant: bool
    ) -> Lattice:
        """logits: f32 [B, m, n_drafted], the head's; hidden: f32 [B, m, n_embd]; last: int64 [B],
        the chosen tokens that the blocks begin with."""
        n_best = min(self._sizes.top_k, logits.shape[-1])
        values, ids = top_k(logits[:, 1:], n_best)
        if self._ids is not None:
            ids = self._ids[ids]
        gate = self._gate(hidden[:, 1:], invariant=invariant)
        first = last[:, None, None].expand(-1, 1, n_best)
        before = torch.cat((first, ids[:, :-1]), 1)
        known = self._rows(self._predecessor, before) * gate.unsqueeze(2)
        # not a product of matrices, whose bits would depend on how many blocks there are
        pairs = known.unsqueeze(3) * self._rows(self._successor, ids).unsqueeze(2)
        return Lattice(ids, self.base(values).unsqueeze(2) + pairs.sum(-1))

    @staticmethod
    def _rows(table: Embedding, ids: torch.Tensor) -> torch.Tensor:
        rows = table(ids.flatten(1))
        return rows.view(*ids.shape, -1)


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
