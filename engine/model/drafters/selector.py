"""DFlash2's selector: which of a row's best candidates follows which of the row before.

A candidate's score is its logit plus a product of three: the token before it, a gate from the row's
hidden state, and the candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.weights import Embedding, Weights
from kernels.rows.top_k import top_k


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

    @torch.inference_mode()
    def base(self, logits: torch.Tensor) -> torch.Tensor:
        """The head's logits, scaled and perhaps capped, which leaves their order as it is."""
        base = logits * self._sizes.logit_scale
        cap = self._sizes.softcap
        return cap * torch.tanh(base / cap) if cap else base

    @torch.inference_mode()
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
