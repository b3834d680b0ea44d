"""Policy lanes, the subject of a comparison: one follows the reference's tokens with a rollback
policy; one copies its sequences, whose source and copies continue in turns while the others idle;
one chooses its own tokens until they differ from the reference lane's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.compare.divergence import (
    Compared,
    LogitsDifference,
    MemoryDifference,
    ReferenceLogits,
    ReferenceMemory,
)
from engine.compare.lane import EngineFollower, Lane, LaneSetup, ReferenceRound
from engine.decode.forward import Forward
from engine.decode.round import Round
from engine.decode.scheduler import Scheduler
from engine.decode.verify_loop import VerifyLoop, pending_of
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, Drafter
from engine.model.hybrid import HybridModel


class PolicyLane(EngineFollower):
    """Verifies every draft like a run with its options, and rolls back by its own policy."""

    has_trees = True

    def __init__(self, setup: LaneSetup, model: HybridModel, leader: Lane) -> None:
        super().__init__(setup, model, leader)
        self._loop = VerifyLoop(self._forward, self.options, self._take_over, branch=self._branch)
        self._parts: dict[int, Round] = {}
        """The leader's rounds, by the memory sequence that verifies them."""

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
        draft = part.tree if self.has_trees and part.tree else part.draft
        return Round(number, part.seq_id, seq, part.pos0, part.tokens, draft)

    def _branch(self, round_: Round, drafts: Sequence[Draft], _: Sequence[Tensor]) -> int:
        """The branch that the leader's tokens follow."""
        part = self._parts[round_.seq]
        assert part.draft is not None
        return [one.tokens for one in drafts].index(part.draft.tokens)

    def _take_over(self, round_: Round) -> None:
        """Take the leader's tokens instead of choosing. With the fault stale-logits, the lane would
        choose after a rejection from the last row of the rejected batch."""
        part, n_drafted = self._parts[round_.seq], len(round_.drafted)
        round_.accepted, round_.n_own, round_.n_emitted = part.accepted.copy(), 1, part.n_emitted
        if "stale-logits" in self.options.faults and len(part.accepted) <= n_drafted:
            round_.own_row = n_drafted


N_COPIES = 2
"""Copies of every sequence."""
_SOURCE, _NEAR, _FAR = range(1 + N_COPIES)
_TURNS = (
    ((_NEAR,), (_SOURCE,)),
    ((_FAR, _SOURCE),),
    ((_NEAR,), (_SOURCE,)),
    ((_FAR, _NEAR), (_SOURCE,)),
    ((_SOURCE,), (_FAR,)),
    ((_NEAR, _SOURCE, _FAR),),
)
"""Who verifies in the passes of a round, cyclically; copies are made before the first. A copy
verifies its earliest missing round, so that copies hold different states; alone it does so in short
ubatches."""
_TWICE = (1, 2, 3)
"""Turns in whose first pass copies undo their round as a whole, if allowed, and verify it again:
from states that were there before that pass and were carried through it."""
_SHORT_UBATCH = 2
_FIRST, _EVERY = 2, 4
"""Copies are made in the first cycles of _TURNS, then in every fourth, because they cost time."""
_NOTED = (1e-9, 1e-4)
"""NMSE of logits and state error from which a member is noted."""
_MORE = 4.0
"""Factor by which an error must exceed the last noted one to be noted again."""


@dataclass(slots=True)
class _OpenRound:
    """A round of the leader until all members have verified it. measure, held: the leader's logits
    and memory."""

    part: Round
    measure: ReferenceLogits
    held: ReferenceMemory
    logits: LogitsDifference | None = None
    memory: MemoryDifference | None = None


@dataclass(slots=True)
class _Member:
    """A memory sequence that follows a text. source: what it is a copy of; made, pending: round of
    the copy, and its pending rollback. n_idle: passes of others since its own last one. left:
    rounds not yet verified."""

    seq: int
    source: int | None = None
    made: int = 0
    pending: int = 0
    n_verified: int = 0
    n_idle: int = 0
    left: deque[_OpenRound] = field(default_factory=deque)


class ForkLane(PolicyLane):
    """Provokes what a single sequence does not: copies made while a rollback is pending, rows that
    exchange cells, states that idle between others, planes carried over short ubatches.

    A row of `divergence` holds the worst of all members and is written when each has verified the
    round. The fact lane_copies lists the wrong ones, see engine.analysis.findings.states.
    """

    has_trees = False

    def __init__(self, setup: LaneSetup, model: HybridModel, leader: Lane) -> None:
        self._n_texts = setup.n_seqs
        super().__init__(replace(setup, n_seqs=setup.n_seqs * (1 + N_COPIES)), model, leader)
        short = replace(self.options, n_ubatch=_SHORT_UBATCH)
        holder = self._holders.__getitem__
        forward = Forward(model, self.memory, short, self._recorder, holder)
        self._short = VerifyLoop(forward, short, self._take_over)
        self._members: dict[int, list[_Member]] = {}
        self._waiting: deque[_OpenRound] = deque()
        self._n_rounds = -1  # the first copies are made after a draft
        self._largest: dict[int, tuple[float, float]] = {}
        self._notes: list[dict[str, Any]] = []
        self.facts.update(lane_copies=self._notes)

    def forget(self, seq: int) -> None:
        for member in self._members.pop(seq, []):
            self.memory.clear(member.seq)
        self.memory.clear(seq)
        self._write()

    def settle(self) -> None:
        """Called after the last round."""
        self._members.clear()
        self._write()
        super().settle()

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            return
        times, turn = divmod(self._n_rounds, len(_TURNS))
        self._n_rounds += 1
        for part in round_.parts:
            members = self._members.setdefault(part.seq, [_Member(part.seq)])
            if turn == 0:
                for copy in members[1:]:
                    self.memory.clear(copy.seq)
                del members[1:]
                if times < _FIRST or times % _EVERY == 0:
                    self._copy(members, part, round_.number)
            new = _OpenRound(part, round_.measure(part), round_.held(part.seq))
            self._waiting.append(new)
            for member in members:
                member.left.append(new)
        done: dict[int, Round] = {}
        for i, roles in enumerate(_TURNS[turn]):
            chosen = {
                members[role].seq: members[role]
                for role in roles
                for members in (self._members[part.seq] for part in round_.parts)
                if role < len(members) and members[role].left
            }
            if not chosen:
                continue
            loop = self._short if len(roles) == 1 and roles[0] != _SOURCE else self._loop
            done |= self._verify(round_.number, chosen, loop)
            if turn in _TWICE and i == 0:
                undone = {seq: m for seq, m in chosen.items() if self._undo(m)}
                if undone:
                    self._verify(round_.number, undone, loop, again=True)
            for member in chosen.values():
                member.left.popleft()
                member.n_verified, member.n_idle = member.n_verified + 1, 0
        in_order = [done[part.seq] for part in round_.parts]
        self._recorder.round(in_order, self.memory, self._clock)
        self._write()

    def _copy(self, members: list[_Member], part: Round, number: int) -> None:
        """Make new copies: one of the sequence, and one of that copy."""
        for i in range(N_COPIES):
            source, seq = members[-1].seq, self._n_texts + part.seq * N_COPIES + i
            self._holders[seq] = part.seq_id
            pending = pending_of(self.memory, source) or 0
            self.memory.seq_cp(source, seq)
            members.append(_Member(seq, source, number, pending))

    def _undo(self, member: _Member) -> bool:
        """Undo what a copy has just verified; returns whether that was possible."""
        return member.source is not None and self.memory.seq_rm(
            member.seq, member.left[0].part.pos0
        )

    def _verify(
        self, number: int, chosen: dict[int, _Member], loop: VerifyLoop, *, again: bool = False
    ) -> dict[int, Round]:
        """Let members, by sequence, verify their earliest missing round."""
        self._parts = {seq: member.left[0].part for seq, member in chosen.items()}
        rounds = {seq: self._led(number, seq) for seq in chosen}
        for round_ in loop.run(list(rounds.values()), self._clock):
            note = {"verified_in": number, "together": list(chosen), "again": again}
            self._measure(chosen[round_.seq], round_, note)
        for members in self._members.values():
            for member in members:
                member.n_idle += member.seq not in chosen
        return rounds

    def _measure(self, member: _Member, mine: Round, note: dict[str, Any]) -> None:
        """Compare a member's result, and note it if it is further off than all before."""
        round_ = member.left[0]
        part = round_.part
        logits = round_.measure.difference(mine.rows)
        memory = round_.held.difference(self.memory, member.seq)
        round_.logits = logits if round_.logits is None else _worse(round_.logits, logits)
        if round_.memory is None or _size(memory) > _size(round_.memory):
            round_.memory = memory
        errors = (max(map(_or_infinite, logits.nmse)), _size(memory)[1])
        known = self._largest.get(part.seq_id, _NOTED)
        if not any(error > _MORE * last for error, last in zip(errors, known, strict=True)):
            return
        self._largest[part.seq_id] = (max(errors[0], known[0]), max(errors[1], known[1]))
        self._notes.append(
            note
            | {
                "round": part.number,
                "seq_id": part.seq_id,
                "sequence": member.seq,
                "source": member.source,
                "made_in": member.made,
                "pending": member.pending,
                "n_verified": member.n_verified,
                "n_idle": member.n_idle,
                "nmse": errors[0] if math.isfinite(errors[0]) else None,
                "state_error": errors[1] if math.isfinite(errors[1]) else None,
            }
        )

    def _write(self) -> None:
        """Write the rows of rounds that all members have verified."""
        while self._waiting:
            first = self._waiting[0]
            members = (m for members in self._members.values() for m in members)
            if any(first is left for member in members for left in member.left):
                return
            self._waiting.popleft()
            part = first.part
            if first.logits is not None:
                place = part.number, part.seq_id, part.pos_next
                self._rows.append(*place, part.accepted, first.logits, first.memory)


def _worse(a: LogitsDifference, b: LogitsDifference) -> LogitsDifference:
    """The worse of two at every position."""
    take_b = [_or_infinite(y) > _or_infinite(x) for x, y in zip(a.nmse, b.nmse, strict=True)]
    columns = ((getattr(a, one.name), getattr(b, one.name)) for one in fields(LogitsDifference))
    return LogitsDifference(
        *(
            [y if takes else x for x, y, takes in zip(*pair, take_b, strict=True)]
            for pair in columns
        )
    )


def _size(memory: MemoryDifference) -> tuple[float, float]:
    """Differing cells, and the largest error of a state or window."""
    errors = np.array([*memory.state, *memory.conv, 0.0])
    return float(memory.n_cells), float(np.nanmax(errors))


def _or_infinite(nmse: float) -> float:
    return math.inf if math.isnan(nmse) else nmse


_Choice = tuple[Round, int]
"""A round and the index of one of its accepted tokens."""


class FreeLane(EngineFollower):
    """Drafts, samples and accepts like a run of its own; positions are compared until they fork.

    It is stepped until it has emitted as much as the reference lane. If one is ahead of the other,
    rows wait until both have them. A sequence ends with its first different token; that position is
    the last one compared, because both chose there after equal tokens. The fact lane_forks says for
    each such token whether the leader would have chosen it from the lane's logits (if not,
    something else is wrong), and whether the leader would have chosen it from its own, because it
    follows tokens of another compute mode.
    """

    has_trees = True

    def __init__(
        self, setup: LaneSetup, model: HybridModel, leader: Lane, drafters: Sequence[Drafter]
    ) -> None:
        super().__init__(setup, model, leader)
        options = setup.options
        self.facts |= {"lane_free": True, "lane_forks": []}
        self._samples = options.spec.accept == "match"
        end_tokens = setup.session.tokenizer.eog_ids
        self._scheduler = Scheduler(
            model,
            self.memory,
            DrafterChain(drafters),
            setup.prompts,
            options,
            end_tokens,
            self._recorder,
            setup.n_seqs,
            self._watch,
            grammar=setup.grammar,
        )
        self._mine: dict[int, dict[int, _Choice]] = {}
        self._theirs: dict[int, dict[int, _Choice]] = {}
        self._forked: set[int] = set()
        self._compared: list[Compared] = []

    def forget(self, seq: int) -> None:
        """Nothing to do: the scheduler ends its own sequences."""

    def end(self, stops: Sequence[str]) -> None:
        self._scheduler.stop()
        self._write(math.inf)
        super().end([sequence.stop for sequence in self._scheduler.sequences])

    def _follow(self, round_: ReferenceRound) -> None:
        for part in round_.parts:
            rows = self._theirs.setdefault(part.seq_id, {})
            if part.seq_id not in self._forked:
                rows |= _choices(part)
        self._compare_what_both_have(round_)
        while any(self._is_behind(part.seq_id) for part in round_.parts):
            self._scheduler.step()
            self._compare_what_both_have(round_)

    def _is_behind(self, seq_id: int) -> bool:
        return bool(self._theirs[seq_id]) and not self._scheduler.sequences[seq_id].stop

    def _watch(self, round_: Round) -> None:
        mine = self._mine.setdefault(round_.seq_id, {})
        mine |= _choices(round_)

    def _compare_what_both_have(self, round_: ReferenceRound) -> None:
        for seq_id, mine in self._mine.items():
            theirs = self._theirs.get(seq_id, {})
            run: list[tuple[int, _Choice, _Choice]] = []
            for pos in sorted(mine.keys() & theirs.keys()):
                if seq_id in self._forked:
                    break
                own, other = mine.pop(pos), theirs.pop(pos)
                if run and run[-1][1][0].number != own[0].number:
                    self._append(round_, seq_id, run)
                    run = []
                run.append((pos, own, other))
                if _token(own) != _token(other):
                    self._fork(seq_id, pos, own, other)
            if run:
                self._append(round_, seq_id, run)
            if seq_id in self._forked:
                mine.clear()
                theirs.clear()
        waiting = [mine[min(mine)][0].number for mine in self._mine.values() if mine]
        self._write(min(waiting, default=math.inf))

    def _write(self, newest: float) -> None:
        """Write the rows of rounds up to this one: the rounds of a run must rise from row to row,
        and sequences in which the reference lane is slower are compared later."""
        self._compared.sort(key=itemgetter(0))
        n = bisect_right(self._compared, newest, key=itemgetter(0))
        for compared in self._compared[:n]:
            self._rows.append(*compared)
        del self._compared[:n]

    def _fork(self, seq_id: int, pos: int, own: _Choice, other: _Choice) -> None:
        self._forked.add(seq_id)
        self._scheduler.cancel(seq_id)
        fork: dict[str, Any] = {"seq_id": seq_id, "pos": pos, "follows": True, "by_mode": False}
        if self._samples:
            fork["follows"] = _sampled(other, _logits(own)) == _token(own)
            fork["by_mode"] = _sampled(other, _logits(other)) == _token(own)
        self.facts.add_to("lane_forks", fork)

    def _append(
        self, round_: ReferenceRound, seq_id: int, run: list[tuple[int, _Choice, _Choice]]
    ) -> None:
        chosen = [_token(theirs) for *_, theirs in run]
        reference = ReferenceLogits(torch.stack([_logits(theirs) for *_, theirs in run]), chosen)
        measured = reference.difference(torch.stack([_logits(mine) for _, mine, _ in run]))
        held, last = None, run[-1][0]
        slot = self._scheduler.sequences[seq_id]
        for part in round_.parts:
            ends = part.pos_next + len(part.accepted) - 1
            if part.seq_id == seq_id and slot.index >= 0 and last == ends == slot.n_tokens:
                held = round_.held(part.seq).difference(self.memory, slot.index)
        self._compared.append((run[0][1][0].number, seq_id, run[0][0], chosen, measured, held))


def _choices(round_: Round) -> dict[int, _Choice]:
    """The emitted tokens of a round by position."""
    return {round_.pos_next + i: (round_, i) for i in range(len(round_.emitted))}


def _token(choice: _Choice) -> int:
    return choice[0].accepted[choice[1]]


def _logits(choice: _Choice) -> Tensor:
    """Logits [n_vocab] that it was chosen from."""
    return choice[0].rows[choice[1]]


def _sampled(choice: _Choice, logits: Tensor) -> int:
    """The token that other logits [n_vocab] would have given by sampling; drafts accepted by
    rejection are chosen differently."""
    part, i = choice
    assert part.before is not None  # a leader's
    sampler = part.before.clone()
    for row in part.rows[:i]:
        sampler.draw(sampler.rows(row.unsqueeze(0))(0))
    return sampler.draw(sampler.rows(logits.unsqueeze(0))(0))
