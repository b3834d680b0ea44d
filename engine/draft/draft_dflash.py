"""draft-dflash: a block of mask tokens filled in one pass; DFlash and DFlash2.

DFlash takes the best token of every row independently. DFlash2 walks through candidates: each is
the best one after its predecessor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.draft.block_drafter import BlockDrafter
from engine.draft.drafter import Draft, DraftRequest
from engine.machine.device import read, upload
from engine.model.drafters.dflash import BlockOutput
from engine.sampling.distribution import softmax


class DraftDflash(BlockDrafter):
    """p_min is a floor on a token's probability: among the ten best of its row, or for DFlash2
    among the candidates that follow the previous token."""

    name = "draft-dflash"

    def _choose(self, requests: Sequence[DraftRequest], out: BlockOutput) -> list[Draft]:
        if self._model.selector is not None:
            return self._walk_all(requests, out)
        ids, values, probs = self._best(out.logits[:, 1:])
        drafts = []
        for i, request in enumerate(requests):
            draft = Draft(drafter=self.name)
            for row in zip(ids[i], values[i], probs[i], strict=True):
                if not draft.take(request.seq, *row, self._p_min, self._draws):
                    break
            drafts.append(draft)
        return drafts

    def _walk_all(self, requests: Sequence[DraftRequest], out: BlockOutput) -> list[Draft]:
        selector = self._model.selector
        assert selector is not None
        last = upload([request.last for request in requests], out.logits.device)
        invariant = self._memory.batch_invariant
        lattice = selector.lattice(out.logits, out.hidden, last, invariant=invariant)
        ids, scores = read(*lattice)
        pairs = zip(requests, ids, scores, strict=True)
        return [self._walk(request.seq, *found) for request, *found in pairs]

    def _walk(self, seq: int, ids: np.ndarray, scores: np.ndarray) -> Draft:
        """ids: [n, T]; scores: [n, T, T], by predecessor and candidate."""
        draft, before = Draft(drafter=self.name), 0
        for candidates, by_predecessor in zip(ids, scores, strict=True):
            found = by_predecessor[before]
            order = np.argsort(-found, kind="stable")
            row = candidates[order].tolist(), found[order].tolist(), softmax(found[order], 1.0)
            if not draft.take(seq, *row, self._p_min, self._draws):
                break
            before = int(np.flatnonzero(candidates == draft.tokens[-1])[0])
        return draft
