"""Undoing the rejected tail of a verified batch.

First choice is partial removal: the snapshot policy moves an index or a cursor. Where it cannot
reach, a checkpoint taken before the batch is restored and the accepted tokens are decoded again
(llama.cpp #19493). Two ways of replaying exist. `trust` decodes them as a shorter batch without
sampling. `verify` is upstream's: they are verified like a draft, with the sampler restored, which
normally reproduces them and yields one token more; where logits depend on the width of the batch
it can disagree with itself for ever (#28061), so the number of attempts is bounded. Tokens that
were accepted by rejection are always trusted: they are decided, with random numbers and a q that
belong to the draft, and to draw them again could only change their distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Span, UBatch
from engine.decode.forward import Forward
from engine.decode.recorder import PhaseClock
from engine.decode.synthetic import keep
from engine.decode.verify import Acceptance, match
from engine.draft.drafter import Draft
from engine.errors import RollbackRefusedError
from engine.memory.hybrid import Checkpoint
from engine.options import MAX_REPLAYS, RunOptions
from engine.sampling.sampler import Sampler


@dataclass(slots=True)
class Undone:
    """What undoing came to.

    accepted: the accepted list, longer by one after a verified replay. own_p: the rule's p of the
    target's own tokens at its end, two after a verified replay. hidden: float32
    [len(accepted), n_embd], rows of `last` and all accepted tokens but the newest. extra: logits
    [1, n_vocab] behind the token that a verified replay added. n_replays: restores done,
    more than MAX_REPLAYS when replays never agreed.
    """

    accepted: list[int]
    own_p: list[float]
    hidden: torch.Tensor
    path: str = "none"
    extra: torch.Tensor | None = None
    n_replays: int = 0


class Rollback:
    """Chooses and performs the way back for one run."""

    def __init__(self, forward: Forward, options: RunOptions, end_tokens: Collection[int]) -> None:
        self._forward, self._memory = forward, forward.memory
        self._options, self._end_tokens = options, end_tokens
        on_host = options.checkpoint_device == "host"
        self._device = torch.device("cpu") if on_host else None

    def checkpoints(
        self, spans: Sequence[Span], ubatches: Sequence[UBatch]
    ) -> dict[int, Checkpoint]:
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
        acceptance: Acceptance,
        hidden: torch.Tensor,
        save: Checkpoint | None,
        sampler: Sampler,
        before: Sampler,
        round_: int,
        clock: PhaseClock,
    ) -> Undone:
        """Leave the memory behind the accepted tokens. `before`: the sampler before verification.

        Raises RollbackRefusedError if the tail can neither be removed nor restored.
        """
        n_kept = len(acceptance.tokens)
        undone = Undone(acceptance.tokens, [acceptance.own_p], hidden[:n_kept])
        if n_kept == len(span.tokens):
            return undone
        removed = self._memory.seq_rm(span.seq, span.pos0 + n_kept)
        clock.stop("rollback", [span.seq])
        if removed:
            undone.path = "seq_rm"
            return undone
        if save is None:
            raise RollbackRefusedError(
                f"A rollback of {len(span.tokens) - n_kept} tokens at position {span.pos0} was "
                "refused and there is no checkpoint.",
                "Raise --n-rs-seq or choose --rollback checkpoint.",
            )
        undone.path = "restore" if self._options.rollback == "checkpoint" else "restore_depth"
        if self._options.replay == "verify" and self._options.spec.accept == "match":
            self._replay_verified(undone, span, save, sampler, before, round_, clock)
        else:
            self._replay(undone, span, save, round_, clock)
        return undone

    def _replay(
        self, undone: Undone, span: Span, save: Checkpoint, round_: int, clock: PhaseClock
    ) -> None:
        self._restore(undone, span, save, clock)
        tokens = [span.tokens[0], *undone.accepted[:-1]]
        ubatches = self._forward.split([Span(span.seq, span.pos0, tokens, [])])
        _, hidden = self._forward.run(ubatches, round_, "replay", clock)
        undone.hidden = hidden[span.seq]

    def _replay_verified(
        self,
        undone: Undone,
        span: Span,
        save: Checkpoint,
        sampler: Sampler,
        before: Sampler,
        round_: int,
        clock: PhaseClock,
    ) -> None:
        while undone.n_replays < MAX_REPLAYS:
            self._restore(undone, span, save, clock)
            sampler.copy_from(before)
            expected = undone.accepted
            tokens = [span.tokens[0], *expected]
            batch = [Span(span.seq, span.pos0, tokens, range(len(tokens)))]
            logits, hidden = self._forward.run(self._forward.split(batch), round_, "replay", clock)
            rows, draft = sampler.rows(logits[span.seq]), Draft(expected)
            if self._options.spec.synthetic:
                again = keep(draft, len(expected), rows, sampler)
            else:
                again = match(draft, rows, sampler, self._end_tokens)
            clock.stop("sample", [span.seq])
            chosen = undone.accepted = again.tokens
            undone.hidden = hidden[span.seq][: len(chosen)]
            if len(chosen) == len(tokens):
                undone.extra = logits[span.seq][-1:]
                undone.own_p.append(again.own_p)
                return
            undone.own_p = [again.own_p]
            if self._memory.seq_rm(span.seq, span.pos0 + len(chosen)):
                clock.stop("rollback", [span.seq])
                return
        self._replay(undone, span, save, round_, clock)

    def _restore(self, undone: Undone, span: Span, save: Checkpoint, clock: PhaseClock) -> None:
        self._memory.restore(span.seq, save)
        undone.n_replays += 1
        clock.stop("restore", [span.seq])
