"""One verification of some sequences, the same for decoding and for comparing.

split into batches -> checkpoint where snapshots do not reach -> decode -> judge -> roll back, or
restore and replay; batch by batch, because a pass without a sequence may move its state, which
then loses its snapshots. Who judges, and what becomes of the tokens, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.decode.batching import verify_batches
from engine.decode.forward import Forward
from engine.decode.phase_clock import PhaseClock
from engine.decode.rollback import Rollback
from engine.decode.round import Round
from engine.memory.hybrid import HybridMemory
from engine.options import RunOptions


class VerifyLoop:
    """Verifies the drafts of rounds, with one model and one memory.

    judge: fills the accepted tokens of a round in by its logits; again: does so once more, by those
    of their replay, None = replays are trusted.
    """

    def __init__(
        self,
        forward: Forward,
        options: RunOptions,
        judge: Callable[[Round], None],
        again: Callable[[Round], None] | None = None,
    ) -> None:
        self._forward, self._options, self._judge = forward, options, judge
        self._rollback = Rollback(forward, options, again)

    def run(self, rounds: Sequence[Round], clock: PhaseClock) -> Iterator[Round]:
        """Each round of sequences that are verified together, filled in but for what is emitted,
        in the order of its batches; each one is undone before the next.

        Raises ContextFullError, and RollbackRefusedError where a tail cannot be undone.
        """
        by_seq = {round_.seq: round_ for round_ in rounds}
        memory, wanted = self._forward.memory, [round_.span for round_ in rounds]
        for spans, ubatches in verify_batches(self._forward, wanted, self._options.split):
            seqs = [span.seq for span in spans]
            for seq in seqs:
                by_seq[seq].rs_idx_before = pending_of(memory, seq)
            saves = self._rollback.checkpoints(spans, ubatches)
            clock.stop("save", seqs)
            number = by_seq[seqs[0]].number
            logits, of_tokens = self._forward.run(ubatches, number, "verify", clock)
            for span in spans:
                round_ = by_seq[span.seq]
                round_.logits = logits[span.seq]
                self._judge(round_)
                round_.of_tokens = of_tokens[span.seq][: len(round_.accepted)]
                round_.valid_depth = valid_depth(memory, span.seq)
                clock.stop("sample", [span.seq])
                self._rollback.undo(round_, span, saves.get(span.seq), clock)
                round_.rs_idx_after = pending_of(memory, span.seq)
                round_.accept_rule = self._options.spec.accept if round_.draft else ""
                yield round_


def valid_depth(memory: HybridMemory, seq: int) -> int | None:
    """Deepest rollback that would be accepted now, None if there are no recurrent layers."""
    return memory.recurrent.valid_depth(seq) if memory.recurrent else None


def pending_of(memory: HybridMemory, seq: int) -> int | None:
    """Tokens that the next pass will find rolled back, None if there are no recurrent layers."""
    return memory.recurrent.pending(seq) if memory.recurrent else None
