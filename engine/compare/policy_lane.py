"""The lanes that a comparison is about: a rollback policy, led by the reference's tokens."""

from __future__ import annotations

from engine.compare.lane import ComparisonSetup, EngineFollower, Leader
from engine.compare.lane_spec import LaneSpec
from engine.compare.rounds import ReferenceRound
from engine.decode.round import Round
from engine.decode.verify_loop import VerifyLoop
from engine.model.hybrid import HybridModel
from engine.options import RunOptions


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
        self._loop = VerifyLoop(self._forward, options, self._take_over)
        self._parts: dict[int, Round] = {}
        """What the leader did, by the memory sequence that verifies it."""

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            return
        self._parts = {part.seq: part for part in round_.parts}
        rounds = [self._led(round_.number, seq) for seq in self._parts]
        for _ in self._loop.run(rounds, self._clock):
            pass
        self._recorder.round(rounds, self.memory, self._clock)
        for part, mine in zip(round_.parts, rounds, strict=True):
            self._compare(round_, part, mine.rows, self.memory)

    def _led(self, number: int, seq: int) -> Round:
        """Round `number` of a sequence, with the leader's draft."""
        part = self._parts[seq]
        return Round(number, part.seq_id, seq, part.pos0, part.tokens, part.draft)

    def _take_over(self, round_: Round) -> None:
        """Take the leader's tokens, and choose none again. With the fault stale-logits, the lane
        would choose after a rejection from the last row of the rejected batch."""
        part, n_drafted = self._parts[round_.seq], len(round_.drafted)
        round_.accepted, round_.n_own, round_.n_emitted = part.accepted.copy(), 1, part.n_emitted
        if "stale-logits" in self.options.faults and len(part.accepted) <= n_drafted:
            round_.own_row = n_drafted
