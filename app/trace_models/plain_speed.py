"""The speed of a run relative to the plain run of the same prompt, found in the whole library."""

from __future__ import annotations

from collections.abc import Sequence

from app.trace_models.live_numbers import LiveNumbers
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import notes_of, started_at
from engine.analysis.baseline import find_baseline, may_be_baseline, prompt_key, speed
from engine.trace.run_ref import RunRef


def plain_run(run: RunRef, listed: Sequence[ModelRuns]) -> RunRef | None:
    """The run without drafters on the same model and prompts, with the same sampler and arithmetic:
    that of the run's own trace (engine.analysis.baseline), else the newest one that ended; None
    where no listed trace has one."""
    facts = run.facts
    if facts.options is None or facts.lane:
        return None
    on_disk = {runs.store for runs in listed if runs.on_disk is not None}
    own = None if run.store in on_disk else find_baseline(run.store, run.run_id)
    if own is not None and not notes_of(run.store.runs[own]).deleted:
        return run.sibling(own)
    wanted = ""
    found: list[tuple[float, int, RunRef]] = []
    for runs in listed:
        for run_id, theirs in list(runs.store.runs.items()):
            other = RunRef(runs.store, run_id)
            if other == run or not other.ended or notes_of(theirs).deleted:
                continue
            if not may_be_baseline(facts, theirs) or not plain_speed(other):
                continue
            wanted = wanted or _key(run, run.store in on_disk)
            if wanted and _key(other, runs.store in on_disk) == wanted:
                begun = started_at(theirs)
                found.append((begun.timestamp() if begun else 0.0, len(found), other))
    return max(found, key=lambda one: one[:2])[-1] if found else None


def plain_speed(plain: RunRef) -> float | None:
    """Tokens a second of a run; None where it generated none."""
    told = LiveNumbers.told(plain.facts.summary).tokens_per_second
    return told or speed(plain.store, plain.run_id) or None


def _key(run: RunRef, on_disk: bool) -> str:
    known = notes_of(run.facts).prompt_key
    return known if known or on_disk else prompt_key(run.store, run.run_id)
