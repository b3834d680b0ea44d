"""The drafter chain: drafters in a fixed priority; the first non-empty draft of a sequence wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.batch import UBatch
from engine.draft.adaptive import AdaptedSequences
from engine.draft.drafter import Draft, Drafter, DraftRequest, awaited
from engine.draft.spec import ADAPT, AHEAD, BEHIND
from engine.machine.clock import run_clock
from engine.machine.device import Mark, mark, ms_between
from engine.model.layers import TargetRows

TrimDraft = Callable[[int, Draft], None]
"""Shortens a sequence's draft to what its grammar allows."""

Statistics = dict[str, float]
"""Statistics of one drafter, llama.cpp's counters: see DrafterChain.statistics."""

_COUNTERS = (
    "n_call_begin",
    "n_call_draft",
    "n_call_accept",
    "n_gen_drafts",
    "n_acc_drafts",
    "n_gen_tokens",
    "n_acc_tokens",
)
_TIMES = ("begin_ms", "draft_ms", "accept_ms")


class DrafterChain:
    """Drafters in priority order. All of them observe what the target decodes.

    statistics: per drafter calls, n_gen_* non-empty drafts and their tokens after trimming, n_acc_*
    drafts with at least one accepted token and those tokens, milliseconds per phase. followers:
    drafters that observe the text but do not draft. asked: each drafter's answers to the latest
    `draft`, by sequence. trim: a draft that it empties counts as none, and the next drafter is
    asked. adapt: chooses the longest draft, None: the drafters' own limits.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        followers: Sequence[Drafter] = (),
        adapt: AdaptedSequences | None = None,
    ) -> None:
        self._drafters, self._followers, self._adapt = drafters, followers, adapt
        self._n_drafted: dict[int, int] = {}
        self._device: torch.device | None = None
        self._holding = {each.name: each for each in drafters if each.has_memory}
        self._n_beyond: dict[tuple[str, int], int] = {}
        self._winners: dict[int, Drafter] = {}
        self.asked: list[tuple[int, Draft]] = []
        self.trim: TrimDraft | None = None
        self.statistics: dict[str, Statistics] = {
            drafter.name: {**dict.fromkeys(_COUNTERS, 0), **dict.fromkeys(_TIMES, 0.0)}
            for drafter in drafters
        }

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def stay_on(self, device: torch.device | None) -> None:
        """Let drafters return drafts pending on this device; None: never."""
        self._device = device
        for drafter in self._drafters:
            drafter.stays_on_device = device is not None

    def carry_on(self, other: DrafterChain) -> None:
        """Replace another chain between two rounds, continuing the statistics of common
        drafters."""
        for name, counted in other.statistics.items():
            if name in self.statistics:
                self.statistics[name] = counted
        if self._adapt and other._adapt:
            self._adapt.carry_on(other._adapt)
        held = self._holding
        self._n_beyond = {key: n for key, n in other._n_beyond.items() if key[0] in held}

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Drafters that draft."""
        return tuple(self._drafters)

    @property
    def every(self) -> tuple[Drafter, ...]:
        """All drafters, including those that only follow."""
        return (*self._drafters, *self._followers)

    @property
    def longest(self) -> int:
        """Most tokens that any of the drafters may draft."""
        return max((drafter.n_max for drafter in self._drafters), default=0)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose rows any of the drafters reads, ascending."""
        return tuple(sorted({layer for drafter in self.every for layer in drafter.taps}))

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """The prompt of a sequence is decoded."""
        for drafter in self._drafters:
            start = run_clock()
            drafter.begin(seq, prompt)
            self._book(drafter, "begin", start)
        for follower in self._followers:
            follower.begin(seq, prompt)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Pass on accepted tokens. Afterwards no drafter's memory may hold more of the text."""
        for drafter in self.every:
            drafter.observe(seq, pos0, tokens, rows)
        for name, drafter in self._holding.items():
            if (n := drafter.held(seq) - pos0 - len(tokens)) > 0:
                self._n_beyond[name, seq] = n

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """Pass on a forward pass of the target."""
        for drafter in (*self._drafters, *self._followers):
            drafter.decoded(ubatch, rows)

    def draft(self, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """Drafts by sequence, cut to the request's limit; sequences without a draft are absent."""
        drafts: dict[int, Draft] = {}
        self.asked = []
        whole = {request.seq: request.n_max for request in requests}
        longest: dict[int, int] = {}
        if self._adapt:
            longest = {one.seq: self._adapt.n_max(one.seq) for one in requests}
            requests = [replace(one, n_max=min(one.n_max, longest[one.seq])) for one in requests]
        for drafter in self._drafters:
            waiting = [request for request in requests if request.seq not in drafts]
            if not waiting:
                break
            start, before = run_clock(), mark(self._device)
            answers = self._ask(drafter, waiting)
            after, ms = mark(self._device), self._book(drafter, "draft", start)
            for pending in awaited(answers):
                pending.late = partial(self._late, drafter, answers, ms, before, after)
            ms /= len(waiting)
            for request, draft in zip(waiting, answers, strict=True):
                draft.cut(request.n_max, "limit")
                if draft.reason == "limit" and draft.length < whole[request.seq]:
                    draft.reason = ADAPT if request.n_max < whole[request.seq] else "limit"
                if draft.parents == [*range(-1, len(draft.tokens) - 1)]:
                    draft.parents = []  # a tree with one branch is a chain
                # forbidden tokens of a tree are not chosen anyway
                if self.trim and draft.tokens and not draft.parents:
                    self.trim(request.seq, draft)
                draft.ms, draft.n_max = ms, longest.get(request.seq)
                self.asked.append((request.seq, draft))
                if draft.tokens:
                    self._count(drafter, "gen", len(draft.tokens))
                    self._winners[request.seq] = drafter
                    drafts[request.seq] = draft
                    self._n_drafted[request.seq] = draft.length
        return drafts

    def _late(
        self, drafter: Drafter, drafts: Sequence[Draft], on_host: float, before: Mark, after: Mark
    ) -> float:
        """See PendingDrafts; the time is added to the drafter and its drafts."""
        ms = max(0.0, ms_between(before, after) - on_host)
        for draft in drafts:
            draft.ms += ms / len(drafts)
        self.statistics[drafter.name]["draft_ms"] += ms
        return ms

    def _ask(self, drafter: Drafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts of one drafter; none where its state does not match the text, because it would
        read cells that do not exist."""
        holding, off = self._holding.get(drafter.name), dict[int, int]()
        if holding:
            off = {each.seq: holding.next_position(each.seq) - each.pos0 for each in requests}
        able = [request for request in requests if not off.get(request.seq)]
        drafts = {
            request.seq: draft
            for request, draft in zip(able, drafter.draft(able) if able else (), strict=True)
        }
        for seq, n in off.items():
            if n:
                reason = AHEAD if n > 0 else BEHIND
                drafts[seq] = Draft(drafter=drafter.name, reason=reason, n_wrong_tokens=abs(n))
            elif beyond := self._n_beyond.pop((drafter.name, seq), 0):
                drafts[seq].n_wrong_tokens = (drafts[seq].n_wrong_tokens or 0) + beyond
        return [drafts[request.seq] for request in requests]

    def accept(self, seq: int, n_accepted: int) -> None:
        """Report the verification of a sequence's draft to its drafter and to the others."""
        winner = self._winners.pop(seq, None)
        if self._adapt and winner is not None:
            self._adapt.learn(seq, self._n_drafted[seq], n_accepted)
        for drafter in self._drafters:
            start = run_clock()
            drafter.accept(seq, n_accepted, is_other=drafter is not winner)
            if drafter is winner:
                self._book(drafter, "accept", start)
                if n_accepted:
                    self._count(drafter, "acc", n_accepted)
        for follower in self._followers:
            follower.accept(seq, n_accepted, is_other=True)

    def resume(self, seq: int, n_tokens: int) -> None:
        """Start a sequence in a slot whose memory already holds its first n_tokens."""
        self._winners.pop(seq, None)
        for drafter in self.every:
            drafter.resume(seq, n_tokens)

    def held(self, seq: int) -> dict[str, int]:
        """Tokens of a sequence that each stateful drafter holds, by name."""
        return {name: drafter.held(seq) for name, drafter in self._holding.items()}

    def forget(self, seq: int) -> None:
        """A sequence has ended."""
        self._winners.pop(seq, None)
        if self._adapt:
            self._adapt.forget(seq)
        for drafter in self.every:
            drafter.forget(seq)

    def _book(self, drafter: Drafter, phase: str, start: float) -> float:
        ms = (run_clock() - start) * 1e3
        counters = self.statistics[drafter.name]
        counters[f"n_call_{phase}"] += 1
        counters[f"{phase}_ms"] += ms
        return ms

    def _count(self, drafter: Drafter, what: str, n_tokens: int) -> None:
        counters = self.statistics[drafter.name]
        counters[f"n_{what}_drafts"] += 1
        counters[f"n_{what}_tokens"] += n_tokens
