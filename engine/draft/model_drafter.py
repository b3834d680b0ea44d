"""Model drafters: the shared steps, confidence floor, length limits, and marks of the target's rows
that reveal a drafter which was given wrong rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.draft.drafter import Draft, DraftRequest, MemoryDrafter, PendingDrafts
from engine.draft.spec import DrafterInputs, ModelDraftOptions
from engine.machine.device import read, upload
from engine.memory.cells import UNKNOWN
from kernels.rows.reductions import top_k

N_CANDIDATES = 10
N_MARKS = 4
"""Numbers that identify a row; rows are only copied, so they stay equal."""


class _Ranked(NamedTuple):
    """Result of one step for the sequences that are still drafting: ids int64, values (raw logits)
    and probs float32 [n, k] of the best candidates, best first. n_wrong: on the first step, Draft's
    n_wrong_rows, int64 [n]; else empty."""

    requests: Sequence[DraftRequest]
    ids: Tensor
    values: Tensor
    probs: Tensor
    n_wrong: Tensor


class ModelDrafter(MemoryDrafter, ABC):
    """One token per step for all sequences that are still drafting.

    The candidate is the most probable token, or with `draws` one drawn from the ten most probable;
    its probability is taken over the ten largest raw logits without temperature. Below p_min the
    candidate is dropped and the sequence stops; a draft shorter than n_min is thrown away
    (llama.cpp #22506).
    """

    def __init__(self, inputs: DrafterInputs) -> None:
        options: ModelDraftOptions = inputs.options
        self.n_max, self._p_min, self._n_min = options.n_max, options.p_min, options.n_min
        self._draws = inputs.draws
        self._n_wrong: Tensor | None = None

    def take_text(self, other: Any) -> bool:
        """Take over the text from another drafter of this name, as if this one had followed it from
        the start without drafting; False if it cannot."""
        return False

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request.

        If no step depends on the result of the previous one (by p_min or sampling), tokens pass
        from step to step on the device and are read back together.
        """
        drafts = {request.seq: Draft(drafter=self.name) for request in requests}
        looks = self._looks
        step, waiting = self._step(requests, self._first(requests)), []
        for n in range(1, self.n_max + 1):
            if looks:
                rows = self._take(step.requests, drafts, *on_host(step))
            else:
                waiting.append(step)
                rows = [i for i, request in enumerate(step.requests) if n < self._limit(request)]
            if not rows:
                break
            alive = [step.requests[row] for row in rows]
            if looks:
                newest = [drafts[request.seq].tokens[-1] for request in alive]
                tokens = upload(newest, step.ids.device)
            else:
                tokens = step.ids[:, 0]
                if len(rows) < len(step.requests):
                    tokens = tokens[upload(rows, step.ids.device)]
            step = self._step(alive, self._next(alive, n, tokens, rows))
        if not looks:
            return self._hand_over(requests, waiting)
        self._finish(drafts)
        return [drafts[request.seq] for request in requests]

    @property
    def _looks(self) -> bool:
        """Whether the host must read each step before the next."""
        return self._p_min > 0 or self._draws is not None

    def _hand_over(self, requests: Sequence[DraftRequest], steps: Sequence[_Ranked]) -> list[Draft]:
        """Drafts from the results of all steps, a sequence's in the order of its rows; pending if
        they stay on the device and their lengths are certain."""
        drafts = {request.seq: Draft(drafter=self.name) for request in requests}
        parts = _parts(steps)

        def fill(values: Sequence[np.ndarray]) -> None:
            for draft in drafts.values():
                draft.tokens.clear()
                draft.pending = None
            for step, found in zip(steps, _by_step(values), strict=True):
                self._take(step.requests, drafts, *found)
            self._finish(drafts)

        limits = {}
        if self.stays_on_device:
            limits = {request.seq: self._limit(request) for request in requests}
        if not limits or min(limits.values()) < self._n_min:
            fill(read(*parts))
            return list(drafts.values())
        tokens: dict[int, list[Tensor]] = {seq: [] for seq in limits}
        for step in steps:
            for i, request in enumerate(step.requests):
                tokens[request.seq].append(step.ids[i, :1])
        pending = PendingDrafts({seq: torch.cat(x) for seq, x in tokens.items()}, parts, fill)
        for seq, draft in drafts.items():
            draft.tokens, draft.pending = [UNKNOWN] * limits[seq], pending
            draft.reason = "limit" if limits[seq] < self.n_max else ""
        return list(drafts.values())

    def _finish(self, drafts: Mapping[int, Draft]) -> None:
        self._drafted(drafts)
        for draft in drafts.values():
            if draft.length < self._n_min:
                draft.cut(0, "n_min")

    def _step(
        self, requests: Sequence[DraftRequest], logits: Tensor, of: Tensor | None = None
    ) -> _Ranked:
        """Candidates of one step. of: int64, the tokens that the logits belong to, if only some
        including the largest were computed; None: the whole vocabulary."""
        if of is not None and of.shape[-1] <= N_CANDIDATES:
            values, ids = logits, of
        else:
            values, ids = top_k(logits, min(N_CANDIDATES, logits.shape[-1]))
            ids = ids if of is None else of.gather(-1, ids)
        n_wrong, self._n_wrong = self._n_wrong, None
        if n_wrong is None:
            n_wrong = ids.new_empty(0)
        return _Ranked(requests, self._ids(ids), values, torch.softmax(values, -1), n_wrong)

    def _take(
        self,
        requests: Sequence[DraftRequest],
        drafts: Mapping[int, Draft],
        ids: list[list[int]],
        values: list[list[float]],
        probs: list[list[float]],
        n_wrong: list[int],
    ) -> list[int]:
        """Add a step's candidates to the drafts; returns the rows that continue drafting."""
        rows = []
        for row, request in enumerate(requests):
            draft = drafts[request.seq]
            if row < len(n_wrong):
                draft.n_wrong_rows = n_wrong[row]
            found = ids[row], values[row], probs[row]
            if not draft.take(request.seq, *found, self._p_min, self._draws):
                continue
            if len(draft.tokens) < self._limit(request):
                rows.append(row)
            elif len(draft.tokens) < self.n_max:
                draft.reason = draft.reason or "limit"
        return rows

    def _ids(self, rows: Tensor) -> Tensor:
        """Map rows of the logits to target ids, int64 of any shape."""
        return rows

    def _limit(self, request: DraftRequest) -> int:
        return min(request.n_max, self.n_max)

    @abstractmethod
    def _first(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Catch up with the target and decode `last` of every request: logits [n, n_vocab]."""

    @abstractmethod
    def _next(
        self, requests: Sequence[DraftRequest], n_drafted: int, tokens: Tensor, rows: Sequence[int]
    ) -> Tensor:
        """Decode the newest drafted token of each sequence, the n_drafted-th: logits [n, n_vocab].

        tokens: int64 [n], on the device. rows: their rows in the previous step.
        """

    def _drafted(self, drafts: Mapping[int, Draft]) -> None:
        """Called when all steps are done, before the drafts are cut (p_min, n_min)."""


def single_tokens(requests: Sequence[DraftRequest], n_drafted: int) -> UBatch:
    """A ubatch with one token per sequence, n_drafted positions after `pos0`, all with outputs.

    The token ids are on the device only.
    """
    n = len(requests)
    positions = [[request.pos0 + n_drafted] for request in requests]
    return UBatch(
        np.zeros((n, 1), np.int64),
        np.array(positions),
        tuple(request.seq for request in requests),
        np.arange(n),
    )


def on_host(step: _Ranked) -> tuple[list[Any], ...]:
    """The tensors of a step as lists, all in one transfer."""
    return _by_step(read(*_parts([step])))[0]


def _parts(steps: Sequence[_Ranked]) -> list[Tensor]:
    return [x for step in steps for x in step[1:]]


def _by_step(values: Sequence[np.ndarray]) -> list[tuple[list[Any], ...]]:
    """The `_parts` of steps, read back, as lists."""
    found, n = [x.tolist() for x in values], len(_Ranked._fields) - 1
    return list(zip(*(found[i::n] for i in range(n)), strict=True))


class SeenRows:
    """Marks of the target's rows by sequence and position. n_before: positions before the first
    token, whose marks are zeros. Drafters get their rows on another way, through acceptance and
    `observe`, so a row of a rejected token shows."""

    def __init__(self, n_before: int, device: torch.device) -> None:
        self._n_before, self._device = n_before, device
        self._marks: dict[int, Tensor] = {}
        self._none = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, seq: int, pos0: int, rows: Tensor) -> None:
        """Note rows [n, at least N_MARKS] that the target computed from pos0 on."""
        first, n = pos0 + self._n_before, rows.shape[0]
        marks = self._marks.get(seq)
        if marks is None:
            marks = torch.zeros(self._n_before, N_MARKS, device=self._device)
        if (lack := first + n - marks.shape[0]) > 0:
            marks = torch.cat((marks, marks.new_full((max(lack, len(marks)), N_MARKS), math.nan)))
            self._marks[seq] = marks
        marks[first : first + n] = rows[:, :N_MARKS]

    def __bool__(self) -> bool:
        return bool(self._marks)

    def n_wrong(self, seq: int, first: int, marks: Tensor) -> Tensor:
        """How many of the marks [n, N_MARKS] differ from those at these positions, positions before
        the first token included: int64; 0 for a sequence without marks."""
        if seq not in self._marks:
            return self._none
        there = self._marks[seq][first : first + marks.shape[0]]
        if self._device.type == "cpu" and torch.equal(marks, there):
            return self._none
        return (marks != there).any(1).sum()

    def forget(self, seq: int) -> None:
        """Drop a sequence."""
        self._marks.pop(seq, None)
