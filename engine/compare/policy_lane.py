"""The lanes that a comparison is about: a rollback policy, led by the reference's tokens."""

from __future__ import annotations

import torch

from engine.compare.lane import EngineFollower, Leader, Setting
from engine.compare.lane_spec import LaneSpec
from engine.compare.rounds import Round, SequenceRound
from engine.decode.rollback import Rollback, Undone
from engine.decode.round_facts import RoundFacts
from engine.decode.verify import Acceptance, target_facts
from engine.memory.hybrid import Checkpoint
from engine.model.hybrid import HybridModel
from engine.options import RunOptions
from engine.sampling.sampler import Sampler


class PolicyLane(EngineFollower):
    """Verifies every draft, all sequences in joint batches, and rolls back by its own policy.

    With the fault stale-logits, the row compared behind a rejection is the one that the lane
    would choose from: the last row of the rejected batch.
    """

    def __init__(
        self,
        setting: Setting,
        spec: LaneSpec,
        options: RunOptions,
        model: HybridModel,
        leader: Leader,
        n_rs_seq: int,
    ) -> None:
        super().__init__(setting, spec, options, model, leader, n_rs_seq)
        self._rollback = Rollback(self._forward, options, ())
        self._sampler = Sampler(options.sampler)

    def _follow(self, round_: Round) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            return
        spans = [part.span for part in round_.parts]
        pending = {part.seq: self._pending(part.seq) for part in round_.parts}
        ubatches = self._forward.split(spans)
        saves = self._rollback.checkpoints(spans, ubatches)
        self._clock.stop("save")
        logits, hidden = self._forward.run(ubatches, round_.number, "verify", self._clock)
        rounds, compared = [], []
        for part in round_.parts:
            save, depth = saves.get(part.seq), self._valid_depth(part.seq)
            undone = self._undo(round_.number, part, hidden[part.seq], save)
            rows = self._rows_chosen_from(part, logits[part.seq])
            facts = self._facts(part, rows, undone, save)
            facts.valid_depth, facts.rs_idx_before = depth, pending[part.seq]
            facts.rs_idx_after = self._pending(part.seq)
            rounds.append(facts)
            compared.append((part, rows))
        self._recorder.round(round_.number, rounds, self.memory, self._clock)
        for part, rows in compared:
            self._compare(round_, part, rows, self.memory)

    def _undo(
        self, number: int, part: SequenceRound, hidden: torch.Tensor, save: Checkpoint | None
    ) -> Undone:
        return self._rollback.undo(
            part.span,
            Acceptance(list(part.chosen)),
            hidden,
            save,
            self._sampler,
            self._sampler,
            number,
            self._clock,
        )

    def _valid_depth(self, seq: int) -> int | None:
        return self.memory.recurrent.valid_depth(seq) if self.memory.recurrent else None

    def _pending(self, seq: int) -> int | None:
        return self.memory.recurrent.pending(seq) if self.memory.recurrent else None

    def _rows_chosen_from(self, part: SequenceRound, logits: torch.Tensor) -> torch.Tensor:
        n = len(part.chosen)
        if "stale-logits" in self.options.faults and n < len(part.tokens):
            return torch.cat((logits[: n - 1], logits[-1:]))
        return logits[:n]

    def _facts(
        self, part: SequenceRound, rows: torch.Tensor, undone: Undone, save: Checkpoint | None
    ) -> RoundFacts:
        drafted, chosen = part.tokens[1:], part.chosen
        n_judged = min(len(drafted), len(chosen))
        kind = "target" if part.draft is None else "replacement"
        if part.draft is not None and len(chosen) > len(drafted):
            kind = "bonus"
        facts = RoundFacts(
            part.seq_id,
            part.seq,
            part.pos0,
            part.first_pos,
            len(part.tokens),
            part.draft,
            chosen[: part.n_emitted],
            len(chosen) - 1,
            [kind],
            target_facts(
                rows, [*drafted[:n_judged], chosen[-1]], [*range(n_judged), len(chosen) - 1]
            ),
            rollback_depth=len(part.tokens) - len(chosen),
            memory_rollback=len(part.tokens) - len(chosen),
            rollback_path=undone.path,
            n_replays=undone.n_replays,
            accept_rule=self.options.spec.accept if part.draft else "",
        )
        if save:
            facts.checkpoint_bytes = save.n_bytes
            facts.restored_bytes = save.n_bytes * undone.n_replays
        return facts
