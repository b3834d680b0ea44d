"""The lanes that others are measured by: reference, reference of another mode, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.batch import Span
from engine.compare.lane import EngineFollower, EngineLane
from engine.compare.rounds import Round, SequenceRound
from engine.draft.chain import Asked


class ReferenceLane(EngineLane):
    """Decodes each sequence alone: prompts in the usual ubatches, every further token by itself.

    `round` is what it did last, set by whoever chooses the tokens.
    """

    round: Round

    def decode(
        self, number: int, seq_id: int, span: Span, *, is_prompt: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [1, n_vocab] behind the last of the tokens, hidden rows of all."""
        self._holders[span.seq] = seq_id
        logits, hidden = self._run(number, [span], is_prompt=is_prompt)
        return logits[span.seq], hidden[span.seq]

    def record_drafts(self, number: int, asked: Sequence[Asked]) -> None:
        """Every drafter that was asked on behalf of all lanes."""
        self._recorder.drafts(number, asked, self._holders)

    def close(self, round_: Round) -> None:
        """Record what was chosen."""
        rows = {part.seq: part.logits for part in round_.parts}
        self._record_plain(round_, rows, self.memory, wide=False)
        self.round = round_


class ModeLane(EngineFollower):
    """The reference lane of another compute mode: it leads the lanes of its mode.

    It decodes the reference lane's tokens one by one, so its differences are those of the mode.
    """

    round: Round

    def _follow(self, round_: Round) -> None:
        logits = {part.seq: self._alone(round_.number, part) for part in round_.parts}
        self._record_plain(round_, logits, self.memory, wide=False)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq], self.memory)
        parts = [replace(part, logits=logits[part.seq]) for part in round_.parts]
        self.round = Round(round_.number, parts, self.memory)

    def _alone(self, number: int, part: SequenceRound) -> torch.Tensor:
        """Decode one sequence as the reference lane does: logits [len(chosen), n_vocab]."""
        spans = part.spans_alone
        return torch.cat(
            [self._run(number, [span], is_prompt=part.is_prompt)[0][part.seq] for span in spans]
        )


class NoiseLane(EngineFollower):
    """Decodes batches of the same widths without speculation.

    Before every round it stands in its leader's own state, so that its differences come from the
    shape of the batch alone. Rows behind the first rejected token are not looked at: a token's
    logits do not depend on later ones.
    """

    def _follow(self, round_: Round) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            self._mirror(round_)
            return
        logits, _ = self._run(round_.number, [part.span for part in round_.parts], is_prompt=False)
        kept = {part.seq: logits[part.seq][: len(part.chosen)] for part in round_.parts}
        self._mirror(round_)
        self._record_plain(round_, kept, self.memory, wide=True)
        for part in round_.parts:
            self._compare(round_, part, kept[part.seq])

    def _mirror(self, round_: Round) -> None:
        for part in round_.parts:
            self.memory.mirror(part.seq, round_.memory, part.pos0)
