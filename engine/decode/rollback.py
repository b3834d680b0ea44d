"""Undoing the rejected tail of a verified batch.

First choice is partial removal: the snapshot policy moves an index or a cursor. Where it cannot
reach, a checkpoint taken before the batch is restored and the accepted tokens are decoded again
(llama.cpp #19493). Two ways of replaying exist. `trust` decodes them as a shorter batch without
sampling. `verify` is upstream's: they are verified like a draft, with the sampler restored, which
normally reproduces them and yields one token more; where logits depend on the width of the batch
it can disagree with itself for ever (#28061), so the number of attempts is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Span, UBatch
from engine.decode.forward import Forward
from engine.decode.recorder import PhaseClock
from engine.decode.verify import Acceptance
from engine.errors import RollbackRefusedError
from engine.memory.hybrid import SequenceCheckpoint
from engine.memory.policies import POLICIES
from engine.model.taps import TargetRows
from engine.options import MAX_REPLAYS, RunOptions

VerifyAgain = Callable[[list[int], torch.Tensor], Acceptance]
"""Verifies accepted tokens once more, as if they had been drafted: given them and the logits
[len(tokens) + 1, n_vocab] of their replay. The sampler starts where it did the first time."""


@dataclass(slots=True)
class RollbackOutcome:
    """What undoing came to.

    acceptance: the verification that counted, the last one; behind a replay that agreed its list
    is longer by one. logits: float32 [>= len(accepted), n_vocab], what it chose from, row by row.
    of_tokens: rows of `last` and all accepted tokens but the newest, [len(accepted), n_embd].
    n_replays: restores done, more than MAX_REPLAYS when replays never agreed.
    """

    acceptance: Acceptance
    logits: torch.Tensor
    of_tokens: TargetRows
    path: str = "none"
    n_replays: int = 0

    @property
    def accepted(self) -> list[int]:
        """The accepted list."""
        return self.acceptance.tokens

    @property
    def n_kept(self) -> int:
        """Tokens of the verified batch that stay in memory."""
        return len(self.accepted) - len(self.acceptance.own_p) + 1

    @property
    def rows(self) -> torch.Tensor:
        """Logits [len(accepted), n_vocab] that each accepted token was chosen from."""
        n, row = len(self.accepted), self.acceptance.own_row
        if row is None:
            return self.logits[:n]
        return torch.cat((self.logits[: n - 1], self.logits[row : row + 1]))


class Rollback:
    """Undoes rejected tokens for one run: by partial removal, else from a checkpoint."""

    def __init__(self, forward: Forward, options: RunOptions) -> None:
        self._forward, self._memory = forward, forward.memory
        on_host = options.checkpoint_device == "host"
        self._device = torch.device("cpu") if on_host else None
        keeps_snapshots = POLICIES[options.rollback].keeps_snapshots
        self._restore_path = "restore_depth" if keeps_snapshots else "restore"

    def checkpoints(
        self, spans: Sequence[Span], ubatches: Sequence[UBatch]
    ) -> dict[int, SequenceCheckpoint]:
        """Copies for the sequences whose rollback may go deeper than their snapshots will reach.

        Several spans must share one ubatch: a pass that leaves a sequence out may move its state,
        which loses the snapshots of an earlier pass.
        """
        recurrent = self._memory.recurrent
        if recurrent is None:
            return {}
        saves = {}
        for span in spans:
            n_last = len(span.tokens) if recurrent.accumulates else ubatches[-1].n_seq_tokens
            if len(span.tokens) - 1 > recurrent.guaranteed_depth(span.seq, n_last):
                saves[span.seq] = self._memory.save(span.seq, self._device)
        return saves

    def undo(
        self,
        span: Span,
        outcome: RollbackOutcome,
        save: SequenceCheckpoint | None,
        again: VerifyAgain | None,
        round_: int,
        clock: PhaseClock,
    ) -> None:
        """Leave the memory behind the accepted tokens. outcome: as if nothing had to be; changed
        to what undoing came to. again: verifies a replay, None = replays are trusted.

        Raises RollbackRefusedError if the tail can neither be removed nor restored.
        """
        n_kept = outcome.n_kept
        if n_kept == len(span.tokens):
            return
        removed = self._memory.seq_rm(span.seq, span.pos0 + n_kept)
        clock.stop("rollback", [span.seq])
        if removed:
            outcome.path = "seq_rm"
            return
        if save is None:
            raise RollbackRefusedError(
                f"A rollback of {len(span.tokens) - n_kept} tokens at position {span.pos0} was "
                "refused and there is no checkpoint.",
                "Raise --n-rs-seq or choose --rollback checkpoint.",
            )
        outcome.path = self._restore_path
        if again is None or not self._replay_verified(outcome, span, save, again, round_, clock):
            self._replay(outcome, span, save, round_, clock)

    def _replay(
        self,
        outcome: RollbackOutcome,
        span: Span,
        save: SequenceCheckpoint,
        round_: int,
        clock: PhaseClock,
    ) -> None:
        self._restore(outcome, span, save, clock)
        tokens = [span.tokens[0], *outcome.accepted[:-1]]
        ubatches = self._forward.split([Span(span.seq, span.pos0, tokens, [])])
        _, of_tokens = self._forward.run(ubatches, round_, "replay", clock)
        outcome.of_tokens = of_tokens[span.seq]

    def _replay_verified(
        self,
        outcome: RollbackOutcome,
        span: Span,
        save: SequenceCheckpoint,
        again: VerifyAgain,
        round_: int,
        clock: PhaseClock,
    ) -> bool:
        """Whether the memory stands behind the accepted list; else it is to be trusted."""
        while outcome.n_replays < MAX_REPLAYS:
            self._restore(outcome, span, save, clock)
            expected = outcome.accepted
            tokens = [span.tokens[0], *expected]
            batch = [Span(span.seq, span.pos0, tokens, range(len(tokens)))]
            logits, of_tokens = self._forward.run(
                self._forward.split(batch), round_, "replay", clock
            )
            outcome.logits = logits[span.seq]
            outcome.acceptance = found = again(expected, outcome.logits)
            clock.stop("sample", [span.seq])
            outcome.of_tokens = of_tokens[span.seq][: len(found.tokens)]
            if len(found.tokens) == len(tokens):
                return True
            if self._memory.seq_rm(span.seq, span.pos0 + len(found.tokens)):
                clock.stop("rollback", [span.seq])
                return True
        return False

    def _restore(
        self, outcome: RollbackOutcome, span: Span, save: SequenceCheckpoint, clock: PhaseClock
    ) -> None:
        self._memory.restore(span.seq, save)
        outcome.n_replays += 1
        clock.stop("restore", [span.seq])
