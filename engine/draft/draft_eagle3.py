"""draft-eagle3: an EAGLE-3 block beside the target drafts.

Position p of its memory holds the pair of the token at p + 1 and the feature row of p, fused of
rows inside the target; it gives the token at p + 2. While drafting, it feeds on what its block
gives. The newest feature row waits for its token, which the next draft or the next batch brings.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.batch import UBatch
from engine.draft.row_drafter import RowDrafter
from engine.draft.spec import DrafterInputs
from engine.draft.with_model import ModelDraftOptions, TokenDraws
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.eagle3 import Eagle3
from engine.model.drafters.loading import LoadedDrafter
from engine.model.drafters.vocabulary import DraftVocabulary
from engine.model.layers import StepOutput
from engine.model.taps import TargetRows


class DraftEagle3(RowDrafter):
    """Drafts with an EAGLE-3 block. `memory` holds the block's attention cells."""

    name = "draft-eagle3"
    AHEAD: ClassVar[int] = 1

    def __init__(
        self,
        model: Eagle3,
        vocabulary: DraftVocabulary,
        memory: HybridMemory,
        n_ubatch: int,
        options: ModelDraftOptions,
        draws: TokenDraws | None = None,
    ) -> None:
        super().__init__(memory, model.config.n_embd, n_ubatch, options, draws)
        self._model, self._vocabulary = model, vocabulary

    @property
    def taps(self) -> tuple[int, ...]:
        """See engine.draft.drafter.ReadsTaps."""
        return self._model.config.taps

    def _taken(self, rows: TargetRows) -> torch.Tensor:
        features = rows.side_by_side(self.taps)
        return self._model.fused(features, invariant=self._memory.batch_invariant)

    def _forward(
        self, ubatch: UBatch, rows: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> StepOutput:
        return self._model.forward(ubatch, rows, self._memory, tokens)

    def _ids(self, rows: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.of_target(rows)


def make(inputs: DrafterInputs) -> DraftEagle3:
    """A drafter with an attention memory of its own. Raises OptionError without a drafter file."""
    loaded = inputs.draft
    if not isinstance(loaded, LoadedDrafter):
        raise OptionError(
            "draft-eagle3 needs an EAGLE-3 drafter made for this target.", "Give its file with -md."
        )
    memory = HybridMemory.for_layers(
        loaded.config.cells(),
        inputs.n_slots,
        inputs.n_ctx,
        inputs.target.device,
        batch_invariant=inputs.batch_invariant,
    )
    return DraftEagle3(
        loaded.model, loaded.vocabulary, memory, inputs.n_ubatch, inputs.options, inputs.draws
    )
