"""Checkpoints of runs: the whole decoding state, copied between two rounds, so that a fork need not
decode from the start. They are on the host, a few per run, and bounded over all runs.

Weights are shared with the run. They hold nothing of the run's trace, so it may be freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch

from engine.decode.recorder import Recorder
from engine.decode.scheduler import Scheduler
from engine.draft.model_drafter import ModelDrafter
from engine.fork import Fork, LaterParts, Stage, chain_of
from engine.machine.clock import clock_paused
from engine.plain_text import counted
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

MOST_BYTES = 256 << 20
"""Limit of all checkpoints together, bytes."""
MOST_OF_RUN = 8
"""Most checkpoints of a run; beyond that, every other one is dropped."""
_FIRST_EVERY = 4


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """The state of a run before its round `round`. progress: Recorder.progress."""

    store: ref[TraceStore]
    run_id: int
    round: int
    scheduler: Scheduler
    progress: tuple[Any, ...]
    n_bytes: int

    def is_of(self, run: RunRef) -> bool:
        """Whether it belongs to this run."""
        return self.store() is run.store and self.run_id == run.run_id

    @torch.inference_mode()
    def restored(self) -> Scheduler:
        """A scheduler that continues from here once it has a recorder."""
        return _copied(self.scheduler)[0]

    def go_on(
        self,
        scheduler: Scheduler,
        recorder: Recorder,
        fork: Fork,
        parts: Sequence[LaterParts],
        stages: Sequence[Stage],
        facts: RunFacts,
    ) -> None:
        """Let a fork continue from here. scheduler: as restored; facts: of the new run."""
        first, memory, before = scheduler.parts
        recorder.go_on(self.progress)
        scheduler.restart(recorder)
        chain = chain_of(parts, before)
        scheduler.go_on_with(first, memory, chain, parts[0].grammar)
        facts.drafters = chain.statistics
        n = fork.round - self.round
        how = f"replayed {counted(n, 'round')}" if n else "nothing to replay"
        how = f"restored checkpoint of round {self.round}, {how}"
        fork.attach(scheduler, parts, chain, stages, facts, how)


class RunCheckpoints:
    """The checkpoints of all runs of a session. The oldest run's are dropped first."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes or MOST_BYTES
        self._kept: list[RunCheckpoint] = []

    def __iter__(self) -> Iterator[RunCheckpoint]:
        return iter([one for one in self._kept if one.store() is not None])

    def keep(self, scheduler: Scheduler, recorder: Recorder, run: RunRef, start: int) -> None:
        """Take checkpoints of a run on the CPU, from its round `start` on. Their time is excluded
        from the run's figures."""
        if scheduler.device.type != "cpu":
            return
        every, weak = _FIRST_EVERY, ref(run.store)

        def before(number: int) -> None:
            nonlocal every
            if number < max(1, start) or (number % every and number != start):
                return
            if scheduler.parts[1].n_bytes() > self._most_bytes:  # too large even to copy
                scheduler.before_round.remove(before)
                return
            with clock_paused():
                state, n_bytes = _copied(scheduler)
            made = RunCheckpoint(weak, run.run_id, number, state, recorder.progress, n_bytes)
            mine = [*(one for one in self if one.is_of(run)), made]
            others = [one for one in self if not one.is_of(run)]
            while others and _n_bytes(others + mine) > self._most_bytes:
                del others[0]
            while len(mine) > MOST_OF_RUN or _n_bytes(mine) > self._most_bytes:
                every *= 2
                mine = [one for one in mine if one.round % every == 0] if len(mine) > 1 else []
            self._kept = others + mine

        scheduler.before_round.append(before)

    def nearest(self, fork: Fork) -> RunCheckpoint | None:
        """The latest checkpoint that a fork may continue from."""
        found = [
            (one.round, i)
            for i, one in enumerate(self._kept)
            for run, limit in fork.roots()
            if one.is_of(run) and one.round <= limit
        ]
        return self._kept[max(found)[1]] if found else None


def _n_bytes(some: list[RunCheckpoint]) -> int:
    return sum(one.n_bytes for one in some)


def _copied(scheduler: Scheduler) -> tuple[Scheduler, int]:
    """A copy that shares weights, without recorder and observers; and the bytes of its tensors and
    arrays."""
    memo: dict[Any, Any] = {id(one): None for one in scheduler.of_this_run}
    memo |= {id(one): one for one in scheduler.weights}
    with torch.inference_mode():
        copy = deepcopy(scheduler, memo)
    n_bytes = sum(storage.nbytes() for storage in memo.pop("torch", {}).values())
    return copy, n_bytes + sum(x.nbytes for x in memo.values() if isinstance(x, np.ndarray))


def unread(parts: list[LaterParts]) -> str:
    """Let the drafters of later parts read the text so far, as if they had followed it; returns the
    name of one that cannot, "" if all can."""
    there = {one.name: one for one in parts[0].drafters}
    known = {id(one) for one in there.values()}
    for part in parts[1:]:
        for drafter in part.drafters:
            if id(drafter) in known:
                continue
            other = there.get(drafter.name)
            if (
                not isinstance(drafter, ModelDrafter)
                or not isinstance(other, ModelDrafter)
                or part.options.faults
                or parts[0].options.faults
                or not drafter.take_text(other)
            ):
                return drafter.name
            known.add(id(drafter))
    return ""
