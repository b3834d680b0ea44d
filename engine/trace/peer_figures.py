"""Figures that another engine gave of its run; its rows give theirs as well."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.trace.facts import RunFacts
from engine.trace.store import TraceStore

_COUNTS = ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted")
_BY_STEP = (
    "num_spec_steps",
    "mean_acceptance_length",
    "acceptance_histogram",
    "num_draft_tokens_per_pos",
    "num_accepted_tokens_per_pos",
    "acceptance_per_position",
)


def with_told(
    figures: dict[str, Any], store: TraceStore, run_id: int | None, seq_id: int | None = None
) -> dict[str, Any]:
    """Figures of `engine.trace.timings.summary`, computed from rows, and in front of them what
    was reported in the run's facts; None is neither reported nor known.

    `told` of the run, and of a request in `requests`: figures by name. `told_timings`: by sequence
    the server's own counters; of sequences without rows they are all that is known.
    """
    facts = RunFacts() if run_id is None else store.runs.get(run_id, RunFacts())
    timings, told = facts.told_timings or [], facts.told
    if seq_id is not None:
        timings = timings[seq_id : seq_id + 1]
        requests = facts.requests or ()
        told = next((request.told for request in requests if seq_id in request.seq_ids), None)
    elif run_id is not None and timings:
        rowless = set(range(len(timings))) - _sequences(store, run_id)
        return _with_timings(figures, timings, [timings[i] for i in sorted(rowless)])
    if timings and run_id is not None:
        has_rows = seq_id in _sequences(store, run_id)
        return _with_timings(figures, timings, [] if has_rows else timings)
    return figures | (told or {})


def _sequences(store: TraceStore, run_id: int) -> set[int]:
    """Those that have rows."""
    n = len(store.rounds)
    mine = store.rounds.column("run_id", 0, n) == run_id
    return set(np.unique(store.rounds.column("seq_id", 0, n)[mine]).tolist())


def _with_timings(
    figures: dict[str, Any],
    timings: list[dict[str, Any] | None],
    rowless: list[dict[str, Any] | None],
) -> dict[str, Any]:
    """timings: of all sequences. rowless: of those without rows, whose counts are in no row."""
    known = [one for one in timings if one is not None]
    if not known:
        return figures
    found = dict(figures)
    for one in filter(None, rowless):
        for name in _COUNTS:
            found[name] = (found.get(name) or 0) + one[name]
    if any(one is None or one["draft_n"] for one in rowless):
        found |= dict.fromkeys(_BY_STEP)
    if found.get("draft_n"):
        found["draft_acceptance_rate"] = found["draft_n_accepted"] / found["draft_n"]
    prompt_ms = found["prompt_ms"] = sum(one["prompt_ms"] for one in known)
    found |= _rates("prompt", prompt_ms, found["prompt_n"])
    if len(timings) == 1:
        found["predicted_ms"] = known[0]["predicted_ms"]
    elif rowless:  # when they generated is not known
        found["predicted_ms"] = 0.0
    predicted_ms, n = found["predicted_ms"], found["predicted_n"]
    # the first token is the prompt's
    found |= _rates("predicted", predicted_ms, max(n - len(timings), 0))
    all_tokens = _rates("predicted", predicted_ms, n)
    return found | {f"{name}_n_gen": value for name, value in all_tokens.items()}


def _rates(name: str, ms: float, n: int) -> dict[str, float]:
    return {
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms else 0.0,
    }
