"""draft-eagle3: an EAGLE-3 block that drafts from rows of the target.

Position p of its memory holds the pair of the token at p + 1 and the feature row of p, fused from
rows inside the target; it predicts the token at p + 2. While drafting it uses its own output as
features. The newest feature row waits for its token, which the next draft or batch supplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from engine.batch import UBatch
from engine.draft.drafter import DraftRequest
from engine.draft.row_drafter import RowDrafter
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.eagle3 import Eagle3
from engine.model.drafters.loading import LoadedDrafter
from engine.model.layers import StepOutput, TargetRows


class DraftEagle3(RowDrafter):
    """Drafts with an EAGLE-3 block. `memory` holds the block's attention cells.

    faults: eagle3-boundary and eagle3-stale-row reproduce llama.cpp 0c1e57098, which writes a pair
    as soon as its token is decoded, accepted or not. They change drafts, never the output.
    """

    name = "draft-eagle3"
    AHEAD: ClassVar[int] = 1

    def __init__(self, inputs: DrafterInputs) -> None:
        """Raises OptionError without a drafter file."""
        loaded = inputs.draft
        if not isinstance(loaded, LoadedDrafter):
            raise OptionError(
                "draft-eagle3 needs an EAGLE-3 drafter made for this target.",
                "Give its file with -md.",
            )
        self._model: Eagle3 = loaded.model
        self._vocabulary = loaded.vocabulary
        make_memory = partial(HybridMemory.for_layers, loaded.config.cells())
        memory = inputs.memory(self.name, make_memory)
        super().__init__(memory, self._model.config.n_embd, inputs)
        self._wrong_row = "eagle3-boundary" in inputs.faults
        self._keeps_rejected = "eagle3-stale-row" in inputs.faults
        # of the fault eagle3-stale-row, by sequence: tokens of the latest pass by position; a
        # rejected token by the position of the memory that it would stay at; those that have
        self._batch: dict[int, dict[int, int]] = {}
        self._stale: dict[int, dict[int, int]] = {}
        self._kept: dict[int, dict[int, int]] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._model.config.taps

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Keep the pairs; with a fault, the pair at the border of two batches may be wrong."""
        super().observe(seq, pos0, tokens, rows)
        paired, before = self._paired[seq], pos0 - 1
        kept = self._keeps_rejected and self._keep_rejected(seq, before, pos0 + len(tokens) - 1)
        if self._wrong_row and before >= paired.n_decoded and not kept:
            for own in (paired.rows, paired.marks):
                own[before] = own[pos0 + len(tokens) - 1]

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """See RowDrafter; with eagle3-stale-row, keep the tokens too."""
        super().decoded(ubatch, rows)
        if self._keeps_rejected and not ubatch.n_padding:
            for seq, tokens, positions in zip(
                ubatch.seq_ids, ubatch.tokens.tolist(), ubatch.positions.tolist(), strict=True
            ):
                self._batch[seq] = dict(zip(positions, tokens, strict=True))

    def resume(self, seq: int, n_tokens: int) -> None:
        super().resume(seq, n_tokens)
        self._drop(seq)

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._drop(seq)

    def _drop(self, seq: int) -> None:
        for known in (self._batch, self._stale, self._kept):
            known.pop(seq, None)

    def _keep_rejected(self, seq: int, before: int, newest: int) -> bool:
        """Whether a rejected token stays in the pair at `before`, the newest pair when it was
        rejected. newest: the last accepted position of this batch."""
        batch = self._batch.get(seq, {})
        rejected = self._stale.get(seq, {}).get(before)
        stays = rejected is not None and before >= self._paired[seq].n_decoded
        if rejected is not None and stays:
            self._kept.setdefault(seq, {})[before] = rejected
        self._stale[seq] = {newest: batch[newest + 1]} if newest + 1 in batch else {}
        return stays

    def _waiting(self, request: DraftRequest) -> list[int]:
        tokens, kept = super()._waiting(request), self._kept.get(request.seq, {})
        start = self._paired[request.seq].n_decoded
        for position in [p for p in kept if p >= start]:
            tokens[position - start] = kept.pop(position)
        return tokens

    def _taken(self, rows: TargetRows) -> Tensor:
        features = rows.side_by_side(self.taps)
        return self._model.fused(features, invariant=self._memory.batch_invariant)

    def _forward(self, ubatch: UBatch, rows: Tensor, tokens: Tensor | None = None) -> StepOutput:
        return self._model.forward(ubatch, rows, self._memory, tokens)

    def _ids(self, rows: Tensor) -> Tensor:
        return self._vocabulary.of_target(rows)
