"""Context checkpoints of a slot over the turns: which are kept, which served, what was missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.trace.facts import RunFacts
from engine.trace.prompt_reuse import ReuseSource, WhyProcessed

_MISSES = (WhyProcessed.NO_CHECKPOINT, WhyProcessed.EVICTED, WhyProcessed.OFF, WhyProcessed.ERASED)


@dataclass(slots=True)
class CheckpointMark:
    """A context checkpoint that is kept. n_tokens: those it covers; run_id: of the prompt that it
    was saved for; hits: prompts that began at it."""

    n_tokens: int
    n_bytes: int
    run_id: int
    hits: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointMiss:
    """A prompt that found no checkpoint where it needed one. n_common: where its text parts from
    the one in memory; n_reused: where it began."""

    run_id: int
    n_common: int
    n_reused: int
    why: WhyProcessed


@dataclass(slots=True)
class CheckpointHistory:
    """held: by the tokens they cover, ascending. n_evicted, n_erased: those that are gone."""

    held: list[CheckpointMark] = field(default_factory=list)
    misses: list[CheckpointMiss] = field(default_factory=list)
    n_hits: int = 0
    n_evicted: int = 0
    n_erased: int = 0

    @classmethod
    def of(cls, runs: Mapping[int, RunFacts], slot: int, last_run: int) -> CheckpointHistory:
        """Of a slot of the memory, from the facts of all runs up to one."""
        found, marks = cls(), dict[int, CheckpointMark]()
        for run_id, facts in list(runs.items()):
            for record in facts.prompt_reuse or () if run_id <= last_run else ():
                if record.slot != slot:
                    continue
                if record.n_held == 0:  # a new memory
                    marks = {}
                found.n_erased += len(record.erased)
                found.n_evicted += len(record.evicted)
                if record.source is ReuseSource.CHECKPOINT and record.checkpoint is not None:
                    found.n_hits += 1
                    if mark := marks.get(record.checkpoint):
                        mark.hits += 1
                found.misses += [
                    CheckpointMiss(run_id, part.stop, record.n_reused, part.why)
                    for part in record.parts
                    if part.why in _MISSES
                ]
                for saved in record.created:
                    marks[saved.n_tokens] = CheckpointMark(saved.n_tokens, saved.n_bytes, run_id)
                held = {n for n, _ in record.held}
                marks = {n: mark for n, mark in marks.items() if n in held}
        found.held = [marks[n] for n in sorted(marks)]
        return found
