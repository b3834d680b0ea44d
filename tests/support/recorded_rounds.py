"""Rounds for the simulator, written down by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.analysis.what_if.first_passes import are_first
from engine.analysis.what_if.recorded import RecordedRounds
from engine.trace.records import PHASES


def recorded(
    rows: Sequence[tuple[int, int, float]],
    draft_ms: float = 2.0,
    confidence: Sequence[Sequence[float]] | None = None,
    *,
    restore_ms: float = 0.0,
) -> RecordedRounds:
    """One text of rounds (drafted, accepted, ms of the pass); drafting costs draft_ms a token,
    restore_ms is what each draft that was not fully accepted costs to undo."""
    drafted = np.array([d for d, _, _ in rows], np.int64)
    accepted = np.array([a for _, a, _ in rows], np.int64)
    n, k = len(rows), int(drafted.max(initial=0))
    emitted = accepted + 1
    phases = {phase: np.zeros(n) for phase in (*PHASES, "other")}
    phases["verify"] = np.array([ms for _, _, ms in rows])
    phases["draft"] = draft_ms * drafted
    phases["restore"] = np.where(accepted < drafted, restore_ms, 0.0)
    sure = np.full((n, k), np.nan)
    for row, values in enumerate(confidence or ()):
        sure[row, : len(values)] = values
    return RecordedRounds(
        seq=np.zeros(n, np.int64),
        start=np.cumsum(emitted) - emitted,
        emitted=emitted,
        drafted=drafted,
        verified=drafted,
        accepted=accepted,
        is_final=accepted < drafted,
        was_full=drafted == k,
        was_cut=np.zeros(n, bool),
        steps=drafted,
        width=drafted + 1,
        new_pass=are_first(drafted),
        new_draft=are_first(np.r_[-1, accepted[:-1]]),
        is_undone=accepted < drafted,
        confidence=sure,
        phases=phases,
        ends_at_limit=np.zeros(1, bool),
        is_independent=False,
    )
