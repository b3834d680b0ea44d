"""One verification of some sequences, the same for decoding and for comparing.

split into batches -> checkpoint where snapshots do not reach -> decode -> judge -> roll back, or
restore and replay -> facts; batch by batch, because a pass without a sequence may move its state,
which then loses its snapshots. Who judges, and what becomes of the tokens, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import Span
from engine.decode.batching import verify_batches
from engine.decode.forward import Forward
from engine.decode.recorder import PhaseClock
from engine.decode.rollback import Rollback, RollbackOutcome, VerifyAgain
from engine.decode.round_facts import RoundFacts, round_facts
from engine.decode.verify import Acceptance
from engine.draft.drafter import Draft
from engine.memory.hybrid import HybridMemory, SequenceCheckpoint
from engine.model.taps import TargetRows
from engine.options import RunOptions


class Judge(Protocol):
    """Decides for one sequence in one round.

    again: verifies a replay of what was accepted; None if that is decided once and for all.
    """

    @property
    def again(self) -> VerifyAgain | None: ...

    def accept(self, draft: Draft, logits: torch.Tensor) -> Acceptance:
        """Judge a draft. logits: float32 [len(draft.tokens) + 1, n_vocab] of the verify batch."""
        ...

    def emit(self, tokens: list[int]) -> int:
        """Take over the accepted tokens; returns how many of them, from the first, are output."""
        ...


@dataclass(frozen=True, slots=True)
class VerifyAttempt:
    """A sequence to be verified: `last`, its newest token, at pos0 and a draft behind it.

    seq: memory sequence; seq_id: its name in the trace. unverified: what the drafter made beyond
    that, for the trace.
    """

    seq_id: int
    seq: int
    pos0: int
    last: int
    draft: Draft | None
    judge: Judge
    unverified: Draft | None = None

    @property
    def span(self) -> Span:
        """The tokens that the batch holds of this sequence: its last one and the draft."""
        tokens = [self.last, *(self.draft.tokens if self.draft else ())]
        return Span(self.seq, self.pos0, tokens, range(len(tokens)))


@dataclass(frozen=True, slots=True)
class VerifiedSequence:
    """Result of an attempt. outcome.accepted: accepted tokens; facts.tokens: emitted ones."""

    attempt: VerifyAttempt
    outcome: RollbackOutcome
    facts: RoundFacts


class VerifyLoop:
    """Verifies the drafts of a round, with one model and one memory."""

    def __init__(self, forward: Forward, options: RunOptions) -> None:
        self._forward, self._options = forward, options
        self._rollback = Rollback(forward, options)

    def run(
        self, number: int, attempts: Sequence[VerifyAttempt], clock: PhaseClock
    ) -> Iterator[VerifiedSequence]:
        """Round `number`, in the order of its batches; each one is undone before the next.

        Raises ContextFullError, and RollbackRefusedError where a tail cannot be undone.
        """
        by_seq = {attempt.seq: attempt for attempt in attempts}
        spans = [attempt.span for attempt in attempts]
        for batch in verify_batches(self._forward, spans, self._options.split):
            seqs = [span.seq for span in batch.spans]
            pending = {seq: pending_of(self._forward.memory, seq) for seq in seqs}
            saves = self._rollback.checkpoints(batch.spans, batch.ubatches)
            clock.stop("save", seqs)
            logits, of_tokens = self._forward.run(batch.ubatches, number, "verify", clock)
            for span in batch.spans:
                seq = span.seq
                found = self._judged(
                    number, by_seq[seq], span, logits[seq], of_tokens[seq], saves.get(seq), clock
                )
                found.facts.rs_idx_before = pending[seq]
                yield found

    def _judged(
        self,
        number: int,
        attempt: VerifyAttempt,
        span: Span,
        logits: torch.Tensor,
        of_tokens: TargetRows,
        save: SequenceCheckpoint | None,
        clock: PhaseClock,
    ) -> VerifiedSequence:
        """span: as it was decoded, filler included."""
        judge, draft, memory = attempt.judge, attempt.draft, self._forward.memory
        accepted = judge.accept(draft or Draft(), logits)
        depth = valid_depth(memory, span.seq)
        clock.stop("sample", [span.seq])
        outcome = RollbackOutcome(accepted, logits, of_tokens[: len(accepted.tokens)])
        self._rollback.undo(span, outcome, save, judge.again, number, clock)
        n_emitted = judge.emit(outcome.accepted)
        counted = outcome.acceptance
        facts = round_facts(
            seq_id=attempt.seq_id,
            seq=span.seq,
            pos0=span.pos0,
            width=len(span.tokens) - span.n_padding,
            n_padding=span.n_padding,
            draft=draft,
            tokens=counted.tokens,
            n_own=len(counted.own_p),
            n_emitted=n_emitted,
            n_kept=outcome.n_kept,
            logits=outcome.logits,
            rule_p=[*counted.judged_p, *counted.own_p],
            rule_q=counted.judged_q,
            valid_depth=depth,
            allowed=counted.allowed,
        )
        facts.rollback_path, facts.n_replays = outcome.path, outcome.n_replays
        facts.rs_idx_after = pending_of(memory, span.seq)
        facts.accept_rule = self._options.spec.accept if draft else ""
        facts.unverified = attempt.unverified
        if save:
            facts.checkpoint_bytes = save.n_bytes
            facts.restored_bytes = save.n_bytes * outcome.n_replays
        return VerifiedSequence(attempt, outcome, facts)


def valid_depth(memory: HybridMemory, seq: int) -> int | None:
    """Deepest rollback that would be accepted now, None if there are no recurrent layers."""
    return memory.recurrent.valid_depth(seq) if memory.recurrent else None


def pending_of(memory: HybridMemory, seq: int) -> int | None:
    """Tokens that the next pass will find rolled back, None if there are no recurrent layers."""
    return memory.recurrent.pending(seq) if memory.recurrent else None
