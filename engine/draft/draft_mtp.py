"""draft-mtp: drafts with the target's own multi-token-prediction head.

At position p the head reads the pair (token x_p, target hidden of p - 1) and predicts x_{p+1};
while drafting it reads its own hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.model_drafter import N_CANDIDATES, ModelDrafter
from engine.draft.row_drafter import RowDrafter
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.layers import StepOutput, TargetRows
from engine.model.mtp import DraftHead, LargestLogits


class DraftMtp(RowDrafter):
    """Drafts with an MTP head. `memory` holds the head's own attention cells.

    faults: with mtp-carried the cells stay when another prompt takes the slot, which changes drafts
    but never the text.
    """

    name = "draft-mtp"
    AHEAD: ClassVar[int] = 0

    def __init__(self, inputs: DrafterInputs) -> None:
        """Raises OptionError for a model without such a head."""
        config, head = inputs.target.config, inputs.target.head
        if head is None:
            has = "an unsupported kind of MTP block" if config.n_unused_mtp else "none"
            raise OptionError(
                f"draft-mtp needs an MTP head, and {config.name} has {has}.",
                "Give its MTP block as a separate file with -md, open a file with nextn tensors, "
                "or use draft-simple with a draft model.",
            )
        memory = inputs.memory(self.name, partial(HybridMemory.for_layers, config.mtp_cells()))
        super().__init__(memory, config.n_handed, inputs)
        self._head = head
        self._keeps_cells = "mtp-carried" in inputs.faults
        self._candidates: DraftHead | LargestLogits
        self._candidates = head.largest(N_CANDIDATES, invariant=memory.batch_invariant)
        at_once = not (self._looks or self._keeps_cells)
        if at_once and memory.records_launches and inputs.options.draft_head == "auto":
            self._candidates = head.draft_head or self._candidates

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See ModelDrafter; a whole draft that needs no look in between is one pass of the
        memory."""
        if len(requests) == 1 and not (self._looks or self._keeps_cells or self._tree):
            draft = self._at_once(requests[0])
            if draft is not None:
                return [draft]
        return super().draft(requests)

    def _at_once(self, request: DraftRequest) -> Draft | None:
        """The draft of ModelDrafter.draft. None, with nothing changed, if that one has to make it:
        if this cannot be recorded, or several tokens share the highest probability."""
        seq, n_more, paired = request.seq, self.n_max - 1, self._paired[request.seq]
        n_pairs = len(paired.waiting(request.last))
        if self._limit(request) < self.n_max or not self._memory.takes_parts(n_pairs + n_more):
            return None
        start, known = self._take_pairs(request)
        part, n = slice(start, start + n_pairs), n_pairs + n_more
        ubatch = UBatch(
            np.array([known + [0] * n_more]),
            np.arange(start, start + n)[None],
            (seq,),
            np.arange(n_pairs - 1, n),
        )
        rows = paired.rows[part].unsqueeze(0)
        tokens, logits, ids = self._head.draft(
            ubatch, rows, self.n_max, self._memory, self._candidates
        )
        if self._seen:
            self._n_wrong = self._wrong_rows(seq, part)[None]
        step = self._step([request] * self.n_max, logits, ids)
        is_sorted = isinstance(self._candidates, LargestLogits)
        if not is_sorted and not torch.equal(step.ids[:, 0], tokens):
            paired.n_decoded = start
            self._memory.seq_rm(seq, start)
            return None
        return self._hand_over([request], [step])[0]

    def resume(self, seq: int, n_tokens: int) -> None:
        """See RowDrafter; with the fault mtp-carried only the tokens are cut."""
        if not self._keeps_cells:
            super().resume(seq, n_tokens)
            return
        ModelDrafter.resume(self, seq, n_tokens)
        del self._of(seq).tokens[n_tokens:]

    def next_position(self, seq: int) -> int:
        """See RowDrafter; with the fault mtp-carried positions of cells do not count."""
        return len(self._of(seq).tokens) if self._keeps_cells else super().next_position(seq)

    def _first(self, requests: Sequence[DraftRequest]) -> Tensor:
        if self._keeps_cells:
            for request in requests:
                paired = self._of(request.seq)
                paired.n_decoded = min(paired.n_decoded, len(paired.tokens))
                self._memory.seq_rm(request.seq, paired.n_decoded)
        return super()._first(requests)

    def _taken(self, rows: TargetRows) -> Tensor:
        return rows.hidden

    def _forward(self, ubatch: UBatch, rows: Tensor, tokens: Tensor | None = None) -> StepOutput:
        return self._head.forward(ubatch, rows, self._memory, tokens)
