"""A lane that chooses its own tokens, until one of them differs from the reference lane's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from engine.compare.divergence import LogitsDifference, MemoryDifference, ReferenceLogits
from engine.compare.lane import EngineFollower, Lane, LaneSetup, ReferenceRound
from engine.decode.round import Round
from engine.decode.scheduler import Scheduler
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Drafter
from engine.model.hybrid import HybridModel

_Choice = tuple[Round, int]
"""A round and the index of one of its accepted tokens."""
_Compared = tuple[int, int, int, list[int], LogitsDifference, MemoryDifference | None]
"""Arguments of `DivergenceRows.append`."""


class FreeLane(EngineFollower):
    """Drafts, samples and accepts as a run of its own; positions are compared until they fork.

    It is stepped until it has emitted as much as the reference lane. Where one is ahead of the
    other, rows wait until both have them. A sequence ends with its first token that differs;
    that position is the last one compared, because both chose there after equal tokens. The fact
    lane_forks says of each such token whether it follows, whether the leader would have chosen it
    from the lane's logits: if not, something else is wrong; and whether the leader would have from
    its own, because it is led by tokens of another compute mode.
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
        self._compared: list[_Compared] = []

    def forget(self, seq: int) -> None:
        """Nothing to do: the scheduler ends its own sequences."""

    def end(self, stops: Sequence[str]) -> None:
        """The comparison has ended."""
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
        """Write the rows of rounds up to this one: in a trace the rounds of a run rise from row to
        row, and a sequence that the reference lane is slower with is compared later."""
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


def _logits(choice: _Choice) -> torch.Tensor:
    """[n_vocab], that chose it."""
    return choice[0].rows[choice[1]]


def _sampled(choice: _Choice, logits: torch.Tensor) -> int:
    """The token that other logits [n_vocab] in place of the leader's would have given, by sampling;
    drafts that were accepted by rejection were chosen in another way."""
    part, i = choice
    assert part.before is not None  # a leader's
    sampler = part.before.clone()
    for row in part.rows[:i]:
        sampler.draw(sampler.rows(row.unsqueeze(0))(0))
    return sampler.draw(sampler.rows(logits.unsqueeze(0))(0))
