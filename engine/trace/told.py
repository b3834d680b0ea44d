"""Figures that another engine told of its run, before those that its rows say."""

from __future__ import annotations

from typing import Any

from engine.trace.store import TraceStore


def with_told(
    figures: dict[str, Any], store: TraceStore, run_id: int | None, seq_id: int | None = None
) -> dict[str, Any]:
    """Figures of `engine.trace.timings.summary`, computed from rows, with those in front that the
    run's fact `told` has; for a sequence, its entry in `requests`. None is not known."""
    facts = store.runs.get(run_id, {}) if run_id is not None else {}
    if seq_id is not None:
        requests = facts.get("requests", [])
        facts = requests[seq_id] if seq_id < len(requests) else {}
    return figures | facts.get("told", {})
