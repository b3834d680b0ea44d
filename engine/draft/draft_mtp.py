"""draft-mtp: the target's own multi-token-prediction head drafts.

The head reads the pair (token x_p, target hidden of p - 1) at position p and predicts x_{p+1};
while drafting it feeds on its own hidden rows.
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
from engine.model.layers import StepOutput
from engine.model.mtp import MtpHead
from engine.model.taps import TargetRows


class DraftMtp(RowDrafter):
    """Drafts with an MTP head. `memory` holds the head's own attention cells."""

    name = "draft-mtp"
    AHEAD: ClassVar[int] = 0

    def __init__(
        self,
        head: MtpHead,
        memory: HybridMemory,
        n_embd: int,
        n_ubatch: int,
        options: ModelDraftOptions,
        draws: TokenDraws | None = None,
    ) -> None:
        super().__init__(memory, n_embd, n_ubatch, options, draws)
        self._head = head

    def _taken(self, rows: TargetRows) -> torch.Tensor:
        return rows.hidden

    def _forward(
        self, ubatch: UBatch, rows: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> StepOutput:
        return self._head.forward(ubatch, rows, self._memory, tokens)


def make(inputs: DrafterInputs) -> DraftMtp:
    """A drafter with an attention memory of its own for the MTP head.

    Raises OptionError for a model without such a head.
    """
    config, head = inputs.target.config, inputs.target.head
    if head is None:
        raise OptionError(
            f"draft-mtp needs an MTP head, and {config.name} has none.",
            "Choose draft-simple with a draft model, or a file with nextn tensors.",
        )
    memory = HybridMemory.for_head(
        config,
        inputs.n_slots,
        inputs.n_ctx,
        inputs.target.device,
        batch_invariant=inputs.batch_invariant,
    )
    return DraftMtp(head, memory, config.n_embd, inputs.n_ubatch, inputs.options, inputs.draws)
