"""What there is to say of a run that has ended: why, how it went, and what is worth doing next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from app.trace_models.live_numbers import LiveNumbers
from app.trace_models.number_text import significant
from app.trace_models.plain_speed import plain_speed
from app.trace_models.run_facts import is_ours
from engine.analysis.audit_text import audit_sentence
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.timings import summary

FINDING, TUNE, COMPARE = "finding", "tune", "compare"
_LOW_ACCEPTANCE = 0.5
_ENDS = {
    "end": "ended by an end token",
    "limit": "came to the limit",
    "grammar": "could not go on within the grammar",
    "stopped": "was stopped",
    "interrupted": "was interrupted when its window ended",
}


@dataclass(frozen=True, slots=True)
class NextStep:
    """kind: one of FINDING, TUNE, COMPARE. why: a sentence. round, seq_id: of a finding, None for
    one about the whole run."""

    kind: str
    why: str
    round: int | None = None
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """reason: a sentence. figures: in a few words each. audit: the result of its audit, ""
    without one. vs_plain: how many times as fast as the
    plain run, None where that was not measured. is_plain: nothing drafted, so that the run is
    itself what others are measured by."""

    reason: str
    figures: tuple[str, ...]
    vs_plain: float | None
    is_plain: bool
    next_step: NextStep | None
    audit: str = ""


def run_end(run: RunRef, plain: RunRef | None) -> RunEnd | None:
    """What is said of a run whose rows are in memory; None while it goes on, and of a lane, which
    the comparison speaks for. plain: what it is measured by."""
    facts = run.facts
    if not run.ended or facts.lane:
        return None
    numbers = LiveNumbers.told(facts.summary or summary(run.store, run.run_id))
    speed, baseline = numbers.tokens_per_second, plain and plain_speed(plain)
    ratio = speed / baseline if speed and baseline else None
    is_plain = facts.options is not None and not facts.options.spec.types
    figures = (
        None if numbers.tokens is None else f"{numbers.tokens:,} tokens",
        None if numbers.acceptance is None else f"acceptance {significant(numbers.acceptance)}",
        None
        if numbers.tokens_per_step is None or is_plain
        else f"{significant(numbers.tokens_per_step)} tokens/step",
        None if speed is None else f"{significant(speed)} tok/s",
    )
    return RunEnd(
        why_it_ended(run),
        tuple(filter(None, figures)),
        None if is_plain else ratio,
        is_plain,
        _next_step(run, numbers, None if is_plain else ratio, is_plain=is_plain),
        audit_sentence(facts),
    )


def why_it_ended(run: RunRef) -> str:
    """Why a run ended, in one sentence."""
    facts = run.facts
    if error := facts.error:
        return f"The run failed: {error.rstrip('.')}."
    stops = facts.stops or []
    kinds = Counter(stops)
    if not kinds:
        return "The run has ended."
    if len(stops) == 1:
        return f"The text {_end(run, stops[0], 0)}."
    if len(kinds) == 1 and stops[0] != "context":
        return f"Each of the {len(stops)} texts {_end(run, stops[0], 0)}."
    parts = [
        f"{n} {_end(run, stop, stops.index(stop)) if n == 1 else _ENDS.get(stop, stop)}"
        for stop, n in kinds.items()
        if stop != "context"
    ]
    if n := kinds["context"]:
        parts.append(f"{n} filled the context")
    return f"Of {len(stops)} texts {', '.join(parts)}."


def _end(run: RunRef, stop: str, seq_id: int) -> str:
    asked = run.facts.options.n_predict if run.facts.options else 0
    if stop == "limit" and asked > 0:
        return f"came to its limit of {asked:,} tokens"
    if stop != "context":
        return _ENDS.get(stop, f"ended: {stop}")
    n_ctx = run.facts.n_ctx
    delivered = f"{_n_emitted(run, seq_id):,}"
    of = f" of {asked:,} tokens asked for" if asked > 0 else " tokens"
    room = f" of {n_ctx:,} tokens" if n_ctx else ""
    return f"filled the context{room}: {delivered}{of} came; a larger Context takes more"


def _n_emitted(run: RunRef, seq_id: int) -> int:
    table, pool = run.store.tokens, run.store.text_pool
    n = len(table)
    mine = (table.column("run_id", 0, n) == run.run_id) & (table.column("seq_id", 0, n) == seq_id)
    codes = [pool.find(kind) for kind in EMITTED_KINDS]
    return int(np.isin(table.column("kind", 0, n)[mine], codes).sum())


def _next_step(
    run: RunRef, numbers: LiveNumbers, ratio: float | None, *, is_plain: bool
) -> NextStep | None:
    found = _gravest_finding(run)
    if found is not None:
        return found
    if run.facts.error or not is_ours(run.facts) or not numbers.tokens or is_plain:
        return None
    if ratio is not None and ratio < 1:
        return NextStep(TUNE, "Drafting costs more than it brings here; other settings may not.")
    if numbers.acceptance is not None and numbers.acceptance < _LOW_ACCEPTANCE:
        return NextStep(TUNE, "Most of what is drafted is rejected; other settings may do better.")
    return NextStep(COMPARE, "See whether rolling back leaves the text as it would be without.")


def _gravest_finding(run: RunRef) -> NextStep | None:
    """The first error among the findings of the run, else the first warning."""
    table = run.store.findings
    n = len(table)
    rows = np.flatnonzero(table.column("run_id", 0, n) == run.run_id).tolist()
    for severity in ("error", "warning"):
        for row in map(table.row, rows):
            if row["severity"] == severity:
                return NextStep(FINDING, str(row["message"]), row["round"], row["seq_id"])
    return None
