"""Verification of drafts and rollback of rejected tokens, for decoding and comparing.

split into batches -> checkpoint where snapshots do not reach -> decode -> judge -> roll back, or
restore and replay. Batches go one after the other, because a pass without a sequence may move its
state and lose its snapshots. The caller supplies the judge and handles the accepted tokens.

Rollback first tries a partial `seq_rm`: the snapshot policy moves an index or a cursor. If that
cannot reach, a checkpoint taken before the batch is restored and the accepted tokens are decoded
again (llama.cpp #19493), in one of two ways. `trust` decodes them as a shorter batch without
sampling. `verify`, as upstream does, verifies them like a draft with the sampler restored, which
normally reproduces them and yields one more token; where logits depend on the batch width it can
disagree with itself for ever (#28061), so attempts are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from engine.batch import Span, UBatch
from engine.decode.batching import padded, verify_batches
from engine.decode.forward import Forward
from engine.decode.round import PhaseClock, Round
from engine.draft.drafter import Draft, awaited, branch_of, branches
from engine.errors import RollbackRefusedError
from engine.machine.device import read
from engine.memory.cells import UNKNOWN
from engine.memory.hybrid import HybridMemory
from engine.memory.policies import POLICIES
from engine.memory.state_file import SequenceCheckpoint
from engine.model.layers import TargetRows
from engine.options import MAX_REPLAYS, RunOptions


class VerifyLoop:
    """Verifies the drafts of rounds, with one model and one memory.

    judge: fills in a round's accepted tokens from its logits. again: does so from the logits of a
    replay; None = replays are trusted. branch: chooses which branch of a tree is judged, by the
    logits of each; None = no trees.
    """

    def __init__(
        self,
        forward: Forward,
        options: RunOptions,
        judge: Callable[[Round], None],
        again: Callable[[Round], None] | None = None,
        branch: Callable[[Round, Sequence[Draft], Sequence[torch.Tensor]], int] | None = None,
    ) -> None:
        self._forward, self._options, self._judge = forward, options, judge
        self._branch = branch
        self._rollback = Rollback(forward, options, again)

    def run(self, rounds: Sequence[Round], clock: PhaseClock) -> Iterator[Round]:
        """Yields each round, filled in except for what is emitted, in the order of the batches;
        each is rolled back before the next.

        Raises ContextFullError, and RollbackRefusedError where a tail cannot be removed.
        """
        trees = [round_ for round_ in rounds if round_.draft and round_.draft.parents]
        by_seq = {round_.seq: round_ for round_ in rounds if round_ not in trees}
        memory, pending = self._forward.memory, awaited([round_.draft for round_ in rounds])
        batches = self._batches(by_seq.values())
        if pending and (trees or [len(ubatches) for _, ubatches in batches] != [1]):
            for one in pending:
                one.fill(read(*one.parts))
                one.late()
            self._note_tokens(rounds)
            clock.stop("draft", [*by_seq])
            pending, batches = [], self._batches(by_seq.values())
        for spans, ubatches in batches:
            seqs = [span.seq for span in spans]
            for seq in seqs:
                by_seq[seq].rs_idx_before = pending_of(memory, seq)
            saves = self._rollback.checkpoints(spans, ubatches)
            clock.stop("save", seqs)
            number = by_seq[seqs[0]].number
            logits, of_tokens = self._forward.run(ubatches, number, "verify", clock, pending)
            if pending:
                self._note_tokens(rounds)
            for span in spans:
                round_, rows = by_seq[span.seq], of_tokens[span.seq]
                if pending:  # a draft that was pending may turn out shorter
                    span = replace(span, n_padding=len(span.tokens) - len(round_.tokens))
                round_.logits = logits[span.seq]
                round_.record = self._forward.records.get(span.seq)
                yield self._judged(round_, span, rows, saves.get(span.seq), clock)
        for round_ in trees:
            yield self._tree(round_, clock)

    def _batches(self, rounds: Iterable[Round]) -> list[tuple[list[Span], list[UBatch]]]:
        spans = [round_.span for round_ in rounds]
        return verify_batches(self._forward, spans, self._options.split) if spans else []

    def _note_tokens(self, rounds: Sequence[Round]) -> None:
        """Fill in the tokens of drafts that were pending."""
        for round_ in rounds:
            drafted = round_.drafted
            if UNKNOWN in round_.tokens:
                round_.tokens = [round_.tokens[0], *drafted]
                self._forward.memory.attention.learn(round_.seq, round_.pos0, round_.tokens)
            if not drafted:  # the drafter's logits were not finite
                round_.draft = None

    def _judged(
        self,
        round_: Round,
        span: Span,
        rows: TargetRows,
        save: SequenceCheckpoint | None,
        clock: PhaseClock,
    ) -> Round:
        """Judge a round by its logits and roll back rejected tokens. span, rows: as decoded."""
        memory = self._forward.memory
        self._judge(round_)
        round_.of_tokens = rows.first(len(round_.accepted))
        round_.valid_depth = valid_depth(memory, span.seq)
        clock.stop("sample", [round_.seq])
        self._rollback.undo(round_, span, save, clock)
        # a chosen branch is copied to the text's sequence through the branch's own index
        round_.rs_idx_after = pending_of(memory, round_.seq if round_.n_replays else span.seq)
        round_.accept_rule = self._options.spec.accept if round_.draft else ""
        return round_

    def _tree(self, round_: Round, clock: PhaseClock) -> Round:
        """Verify the branches of a tree in one batch (see engine.draft.drafter).

        Shorter branches are padded, because recurrent layers decode rectangles. If the batch needs
        several ubatches, later ones may move states of earlier ones, so a checkpoint is taken.
        """
        forward, memory, tree = self._forward, self._forward.memory, round_.draft
        assert tree is not None
        assert self._branch is not None
        paths = branches(tree.parents)
        drafts = [branch_of(tree, path) for path in paths]
        width = 1 + max(len(draft.tokens) for draft in drafts)
        spans = []
        for i, draft in enumerate(drafts):
            tokens = [round_.tokens[0], *draft.tokens]
            span = Span(round_.seq + i * forward.n_slots, round_.pos0, tokens, range(len(tokens)))
            spans.append(span if memory.is_pool else padded(span, width))
        round_.rs_idx_before = pending_of(memory, round_.seq)
        ubatches = forward.split(spans)
        together = self._options.split == "seq" or len(ubatches) == 1
        saves = self._rollback.checkpoints(spans[:1], ubatches, surely=not together)
        for span in spans[1:]:
            memory.fork(round_.seq, span.seq)
        clock.stop("save", [round_.seq])
        logits, of_tokens = forward.run(ubatches, round_.number, "verify", clock)
        best = self._branch(round_, drafts, [logits[span.seq] for span in spans])
        span = spans[best]
        round_.tree, round_.path, round_.draft = tree, paths[best], drafts[best]
        round_.tokens = [round_.tokens[0], *drafts[best].tokens]
        round_.n_rows = sum(1 + len(draft.tokens) for draft in drafts)
        round_.logits, round_.record = logits[span.seq], forward.records.get(span.seq)
        forward.show(replace(span, seq=round_.seq), of_tokens[span.seq])
        self._judged(round_, span, of_tokens[span.seq], saves.get(round_.seq), clock)
        for other in spans[1:]:
            memory.clear(other.seq)
        clock.stop("rollback", [round_.seq])
        return round_


def valid_depth(memory: HybridMemory, seq: int) -> int | None:
    """Deepest rollback that would be accepted now, None without recurrent layers."""
    return memory.recurrent.valid_depth(seq) if memory.recurrent else None


def pending_of(memory: HybridMemory, seq: int) -> int | None:
    """Rolled-back tokens pending until the next pass (`rs_idx`), None without recurrent layers."""
    return memory.recurrent.pending(seq) if memory.recurrent else None


class Rollback:
    """Rolls back rejected tokens of a run: by partial removal, else from a checkpoint.

    again: judges the replay of a round's accepted tokens by its logits; None = it is trusted.
    """

    def __init__(
        self, forward: Forward, options: RunOptions, again: Callable[[Round], None] | None
    ) -> None:
        self._forward, self._memory, self._again = forward, forward.memory, again
        on_host = options.checkpoint_device == "host"
        self._device = torch.device("cpu") if on_host else None
        keeps_snapshots = POLICIES[options.rollback].keeps_snapshots
        self._restore_path = "restore_depth" if keeps_snapshots else "restore"

    def checkpoints(
        self, spans: Sequence[Span], ubatches: Sequence[UBatch], *, surely: bool = False
    ) -> dict[int, SequenceCheckpoint]:
        """Checkpoints of the sequences whose rollback may go deeper than their snapshots reach.

        Several spans must share one ubatch: a pass that leaves a sequence out may move its state
        and lose the snapshots of an earlier pass. surely: save all, because they do not share one.
        """
        recurrent = self._memory.recurrent
        if recurrent is None:
            return {}
        saves = {}
        for span in spans:
            n_last = len(span.tokens) if recurrent.accumulates else ubatches[-1].n_seq_tokens
            n_first = len(span.tokens) - n_last
            depth = recurrent.guaranteed_depth(span.seq, n_last, n_first)
            if surely or len(span.tokens) - 1 > depth:
                saves[span.seq] = self._memory.save(span.seq, self._device)
        return saves

    def undo(
        self, round_: Round, span: Span, save: SequenceCheckpoint | None, clock: PhaseClock
    ) -> None:
        """Roll the memory back to the end of the accepted tokens. span: as decoded, filler
        included; if it is a branch in another sequence, the text's sequence becomes a copy of it.

        Raises RollbackRefusedError if the tail can neither be removed nor restored.
        """
        if save:
            round_.checkpoint_bytes = save.n_bytes
        if round_.n_kept < len(span.tokens):
            self._undo(round_, span, save, clock)
        if span.seq != round_.seq and not round_.n_replays:
            self._memory.fork(span.seq, round_.seq)
        round_.memory_rollback = len(span.tokens) - round_.n_kept
        round_.rollback_depth = round_.memory_rollback - span.n_padding

    def _undo(
        self, round_: Round, span: Span, save: SequenceCheckpoint | None, clock: PhaseClock
    ) -> None:
        n_kept = round_.n_kept
        removed = self._memory.seq_rm(span.seq, span.pos0 + n_kept)
        clock.stop("rollback", [span.seq])
        if removed:
            round_.rollback_path = "seq_rm"
            return
        if save is None:
            raise RollbackRefusedError(
                f"A rollback of {len(span.tokens) - n_kept} tokens at position {span.pos0} was "
                "refused and there is no checkpoint.",
                "Raise --n-rs-seq or choose --rollback checkpoint.",
            )
        round_.rollback_path = self._restore_path
        if not self._replay_verified(round_, save, clock):
            self._restore(round_, save, clock)
            self._replay(round_, Span(round_.seq, round_.pos0, round_.decoded, []), clock)

    def _replay_verified(self, round_: Round, save: SequenceCheckpoint, clock: PhaseClock) -> bool:
        """Restore and verify the accepted tokens again, at most MAX_REPLAYS times. Whether the
        memory is now at their end; if not, they must be trusted."""
        while self._again and round_.n_replays < MAX_REPLAYS:
            self._restore(round_, save, clock)
            tokens = [round_.tokens[0], *round_.accepted]
            span = Span(round_.seq, round_.pos0, tokens, range(len(tokens)))
            round_.logits = self._replay(round_, span, clock)
            round_.record = self._forward.records.get(round_.seq)
            self._again(round_)
            clock.stop("sample", [round_.seq])
            n = len(round_.accepted)
            assert round_.of_tokens is not None  # set by the replay
            round_.of_tokens = round_.of_tokens.first(n)
            if n == len(tokens):
                return True
            if self._memory.seq_rm(round_.seq, round_.pos0 + n):
                clock.stop("rollback", [round_.seq])
                return True
        return False

    def _restore(self, round_: Round, save: SequenceCheckpoint, clock: PhaseClock) -> None:
        self._memory.restore(round_.seq, save)
        round_.n_replays += 1
        round_.restored_bytes += save.n_bytes
        clock.stop("restore", [round_.seq])

    def _replay(self, round_: Round, span: Span, clock: PhaseClock) -> torch.Tensor | None:
        """Decode accepted tokens again; sets their rows and returns the logits that the span
        requests."""
        ubatches = self._forward.split([span])
        logits, of_tokens = self._forward.run(ubatches, round_.number, "replay", clock)
        round_.of_tokens = of_tokens[span.seq]
        return logits.get(span.seq)
