"""draft-simple: drafts with a smaller model of the same vocabulary.

The draft model has a memory of its own, with a ring of states if it is recurrent: it decodes its
guesses one by one, and wrong ones are rolled back.

Either model may have more ids than the other (engine.draft.draft_files). Only common ids are
drafted. After a token that the draft model lacks there is no draft; further back in the text it
reads STAND_IN instead of such a token, which costs accuracy but never changes the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.batch import Span
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.model_drafter import ModelDrafter, single_tokens
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows

STAND_IN = 0
"""Read by the draft model for ids that it lacks; `<unk>` in vocabularies that have one."""


@dataclass(slots=True)
class _DecodedSoFar:
    """Progress of the draft model.

    tokens: those decoded by the target. n_decoded: how many of them are in this memory too.
    guessed: tokens decoded here beyond them, starting with `last`; n_guessed: how many.
    """

    tokens: list[int] = field(default_factory=list)
    n_decoded: int = 0
    guessed: list[int] = field(default_factory=list)
    n_guessed: int = 0


class DraftSimple(ModelDrafter):
    """Drafts with a second model of the same vocabulary."""

    name = "draft-simple"

    def __init__(self, inputs: DrafterInputs) -> None:
        """Raises OptionError without a draft model."""
        super().__init__(inputs)
        model = inputs.draft
        if not isinstance(model, HybridModel):
            raise OptionError("draft-simple needs a draft model.", "Give one with -md or open one.")
        make_memory = partial(
            HybridMemory.for_model, model.config, policy="ring", n_rs_seq=inputs.options.n_max
        )
        self._model, self._n_ubatch = model, inputs.n_ubatch
        self._memory = inputs.memory(self.name, make_memory)
        self._progress: dict[int, _DecodedSoFar] = {}
        self._n_own = model.config.n_vocab
        self._n_both = min(inputs.target.config.n_vocab, self._n_own)

    def take_text(self, other: Any) -> bool:
        known = other._progress.items()
        self._progress = {seq: _DecodedSoFar(one.tokens.copy()) for seq, one in known}
        return True

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, empty if the draft model lacks the newest token."""
        known = [request for request in requests if request.last < self._n_own]
        drafts = iter(super().draft(known) if known else ())
        return [
            next(drafts)
            if request.last < self._n_own
            else Draft(drafter=self.name, reason="unknown-token")
            for request in requests
        ]

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Keep correct guesses, roll back the others, queue missing tokens."""
        progress = self._progress.setdefault(seq, _DecodedSoFar())
        n_true = 0
        for guess, token in zip(progress.guessed, tokens, strict=False):
            if guess != token:
                break
            n_true += 1
        if n_true < len(progress.guessed):
            self._memory.seq_rm(seq, progress.n_decoded + n_true)
        progress.n_decoded += n_true
        progress.tokens.extend(tokens)
        progress.guessed = []

    def resume(self, seq: int, n_tokens: int) -> None:
        """Remove everything after these tokens; if snapshots do not reach back that far, the draft
        model decodes all of them again, which is cheaper than checkpoints would be in memory."""
        super().resume(seq, n_tokens)
        progress = self._progress.setdefault(seq, _DecodedSoFar())
        progress.n_decoded = min(progress.n_decoded, n_tokens)
        if not self._memory.seq_rm(seq, progress.n_decoded):
            self._memory.clear(seq)
            progress.n_decoded = 0
        del progress.tokens[n_tokens:]
        progress.guessed = []

    def next_position(self, seq: int) -> int:
        progress = self._progress.get(seq, _DecodedSoFar())
        return max(len(progress.tokens), progress.n_decoded)

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._progress.pop(seq, None)

    def _first(self, requests: Sequence[DraftRequest]) -> Tensor:
        spans = []
        for request in requests:
            progress = self._progress[request.seq]
            missing = progress.tokens[progress.n_decoded :]
            tokens = [*(t if t < self._n_own else STAND_IN for t in missing), request.last]
            spans.append(Span(request.seq, progress.n_decoded, tokens, [len(tokens) - 1]))
            progress.n_decoded = len(progress.tokens)
            progress.guessed, progress.n_guessed = [request.last], 1
        logits = {}
        for ubatch in self._memory.split(spans, self._n_ubatch, "equal"):
            out = self._model.forward(ubatch, self._memory)
            for i, row in enumerate(ubatch.outputs.tolist()):
                logits[ubatch.seq_ids[row // ubatch.n_seq_tokens]] = out.logits[i]
        return torch.stack([logits[request.seq] for request in requests])[:, : self._n_both]

    def _next(
        self, requests: Sequence[DraftRequest], n_drafted: int, tokens: Tensor, rows: Sequence[int]
    ) -> Tensor:
        for request in requests:
            self._progress[request.seq].n_guessed = 1 + n_drafted
        ubatch = single_tokens(requests, n_drafted)
        logits = self._model.forward(ubatch, self._memory, tokens.unsqueeze(1)).logits
        return logits[:, : self._n_both]

    def _drafted(self, drafts: Mapping[int, Draft]) -> None:
        for seq, draft in drafts.items():
            progress = self._progress[seq]
            progress.guessed = [*progress.guessed, *draft.tokens][: progress.n_guessed]
