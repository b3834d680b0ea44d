"""A lane that chooses its own tokens, until one of them differs from the reference lane's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.compare.divergence import ReferenceLogits
from engine.compare.lane import ComparisonSetup, EngineFollower, Leader
from engine.compare.lane_spec import LaneSpec
from engine.compare.rounds import ReferenceRound, SequenceRound
from engine.decode.round import Round
from engine.decode.scheduler import Scheduler
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Drafter
from engine.model.hybrid import HybridModel
from engine.options import RunOptions


@dataclass(frozen=True, slots=True)
class _TokenChoice:
    """A token and the logits [n_vocab] that chose it. round: of whoever chose it."""

    round: int
    token: int
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _LeaderChoice(_TokenChoice):
    """A token of the leader's, and where it was chosen."""

    part: SequenceRound
    index: int


class FreeLane(EngineFollower):
    """Drafts, samples and accepts as a run of its own; positions are compared until they fork.

    It is stepped until it has emitted as much as the reference lane. Where one is ahead of the
    other, rows wait until both have them. A sequence ends with its first token that differs;
    that position is the last one compared, because both chose there behind equal tokens. The fact
    lane_forks says of each such token whether it follows, whether the leader would have chosen it
    from the lane's logits: if not, something else is wrong; and whether the leader would have from
    its own, because it is led by tokens of another compute mode.
    """

    def __init__(
        self,
        setup: ComparisonSetup,
        spec: LaneSpec,
        options: RunOptions,
        model: HybridModel,
        leader: Leader,
        n_rs_seq: int,
        drafters: Sequence[Drafter],
    ) -> None:
        super().__init__(setup, spec, options, model, leader, n_rs_seq)
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
            self._watch,
            grammar=setup.grammar,
        )
        self._mine: dict[int, dict[int, _TokenChoice]] = {}
        self._theirs: dict[int, dict[int, _LeaderChoice]] = {}
        self._forked: set[int] = set()

    def forget(self, seq: int) -> None:
        """Nothing to do: the scheduler ends its own sequences."""

    def end(self, stops: Sequence[str]) -> None:
        """The comparison has ended."""
        self._scheduler.stop()
        super().end([sequence.stop for sequence in self._scheduler.sequences])

    def _follow(self, round_: ReferenceRound) -> None:
        for part in round_.parts:
            rows = self._theirs.setdefault(part.seq_id, {})
            if part.seq_id in self._forked:
                continue
            for i, token in enumerate(part.chosen[: part.n_emitted]):
                row = _LeaderChoice(round_.number, token, part.logits[i], part, i)
                rows[part.first_pos + i] = row
        self._compare_what_both_have(round_)
        while any(self._is_behind(part.seq_id) for part in round_.parts):
            self._scheduler.step()
            self._compare_what_both_have(round_)

    def _is_behind(self, seq_id: int) -> bool:
        return bool(self._theirs[seq_id]) and not self._scheduler.sequences[seq_id].stop

    def _watch(self, round_: Round) -> None:
        mine = self._mine.setdefault(round_.seq_id, {})
        chosen = zip(round_.emitted, round_.rows, strict=False)
        for pos, (token, logits) in enumerate(chosen, round_.pos_next):
            mine[pos] = _TokenChoice(round_.number, token, logits)

    def _compare_what_both_have(self, round_: ReferenceRound) -> None:
        for seq_id, mine in self._mine.items():
            theirs = self._theirs.get(seq_id, {})
            run: list[tuple[int, _TokenChoice, _LeaderChoice]] = []
            for pos in sorted(mine.keys() & theirs.keys()):
                if seq_id in self._forked:
                    break
                own, other = mine.pop(pos), theirs.pop(pos)
                if run and run[-1][1].round != own.round:
                    self._append(round_, seq_id, run)
                    run = []
                run.append((pos, own, other))
                if own.token != other.token:
                    self._fork(seq_id, pos, own, other)
            if run:
                self._append(round_, seq_id, run)
            if seq_id in self._forked:
                mine.clear()
                theirs.clear()

    def _fork(self, seq_id: int, pos: int, own: _TokenChoice, other: _LeaderChoice) -> None:
        self._forked.add(seq_id)
        self._scheduler.cancel(seq_id)
        fork: dict[str, Any] = {"seq_id": seq_id, "pos": pos, "follows": True, "by_mode": False}
        if self._samples:
            part, i = other.part, other.index
            fork["follows"] = part.sampled_from(i, own.logits) == own.token
            fork["by_mode"] = part.sampled_from(i, other.logits) == own.token
        self.facts["lane_forks"].append(fork)

    def _append(
        self,
        round_: ReferenceRound,
        seq_id: int,
        run: list[tuple[int, _TokenChoice, _LeaderChoice]],
    ) -> None:
        chosen = [theirs.token for _, _, theirs in run]
        reference = ReferenceLogits(torch.stack([theirs.logits for *_, theirs in run]), chosen)
        measured = reference.difference(torch.stack([mine.logits for _, mine, _ in run]))
        held, last = None, run[-1][0]
        slot = self._scheduler.sequences[seq_id]
        for part in round_.parts:
            ends = part.first_pos + len(part.chosen) - 1
            if part.seq_id == seq_id and slot.index >= 0 and last == ends == slot.n_tokens:
                held = round_.held(part.seq).difference(self.memory, slot.index)
        self._rows.append(run[0][1].round, seq_id, run[0][0], chosen, measured, held)
