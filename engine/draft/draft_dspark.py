"""draft-dspark: a block drafted in one pass, with a Markov chain over its rows.

The chain is greedy at any temperature: a draft has no distribution of its own, as if the drafter
were certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.draft.block_drafter import BlockDrafter
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.machine.device import read
from engine.model.drafters.dflash import BlockOutput


class DraftDspark(BlockDrafter):
    """p_min is a floor on the confidence head's output: a draft ends before the first token below
    it. The probabilities shown are those of the ten best of a row."""

    name = "draft-dspark"

    def __init__(self, inputs: DrafterInputs) -> None:
        """Raises OptionError without a file, or for p_min if the file has no confidence head."""
        super().__init__(inputs)
        config = self._model.config
        if self._p_min > 0 and not config.confident:
            raise OptionError(
                f"p_min needs a confidence head, and {config.name} has none.",
                "Leave --spec-draft-p-min at 0.",
            )

    def _choose(self, requests: Sequence[DraftRequest], out: BlockOutput) -> list[Draft]:
        first = self._block_length - self.n_max
        ids, values, probs = self._best(out.logits[:, first:])
        sure = read(torch.sigmoid(out.confidence[:, first:]))[0].tolist()
        drafts = []
        for i in range(len(requests)):
            draft = Draft(drafter=self.name)
            for row in range(self.n_max):
                if not draft.is_finite(values[i][row][0]):
                    break
                if sure[i]:
                    if sure[i][row] < self._p_min:
                        draft.reason = "confidence"
                        break
                    draft.sure.append(sure[i][row])
                draft.add(ids[i][row], probs[i][row])
            drafts.append(draft)
        return drafts
