"""The lanes that a comparison is about: a rollback policy, led by the reference's tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.compare.lane import ComparisonSetup, EngineFollower, Leader
from engine.compare.lane_spec import LaneSpec
from engine.compare.rounds import ReferenceRound, SequenceRound
from engine.decode.verify import Acceptance
from engine.decode.verify_loop import VerifyAttempt, VerifyLoop
from engine.draft.drafter import Draft
from engine.model.hybrid import HybridModel
from engine.options import RunOptions


@dataclass(frozen=True, slots=True)
class Led:
    """The judge of a lane that takes its leader's tokens, and chooses none again."""

    part: SequenceRound
    faults: Collection[str]
    again: None = None

    def accept(self, draft: Draft, logits: torch.Tensor) -> Acceptance:
        """With the fault stale-logits, the lane would choose behind a rejection from the last row
        of the rejected batch."""
        n_drafted, chosen = len(draft.tokens), list(self.part.chosen)
        is_stale = "stale-logits" in self.faults and len(chosen) <= n_drafted
        return Acceptance(chosen, own_row=n_drafted if is_stale else None)

    def emit(self, tokens: list[int]) -> int:
        return self.part.n_emitted


class PolicyLane(EngineFollower):
    """Verifies every draft as a run with its options would, and rolls back by its own policy."""

    def __init__(
        self,
        setup: ComparisonSetup,
        spec: LaneSpec,
        options: RunOptions,
        model: HybridModel,
        leader: Leader,
        n_rs_seq: int,
    ) -> None:
        super().__init__(setup, spec, options, model, leader, n_rs_seq)
        self._loop = VerifyLoop(self._forward, options)

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            return
        faults = self.options.faults
        attempts = [
            VerifyAttempt(
                part.seq_id, part.seq, part.pos0, part.tokens[0], part.draft, Led(part, faults)
            )
            for part in round_.parts
        ]
        verified = {
            found.attempt.seq: found
            for found in self._loop.run(round_.number, attempts, self._clock)
        }
        in_order = [verified[part.seq] for part in round_.parts]
        self._recorder.round(
            round_.number, [found.facts for found in in_order], self.memory, self._clock
        )
        for part, found in zip(round_.parts, in_order, strict=True):
            self._compare(round_, part, found.outcome.rows, self.memory)
