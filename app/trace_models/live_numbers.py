"""Figures of a run that the status line shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.trace.run_columns import RunColumns
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance_of, timings_of, with_told

_PATH_NAMES = {"restore_depth": "restore (depth > n_rs_seq)"}


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """None is not observed. tokens_per_step: 1 + accepted / steps. path: of the last round that
    had something to roll back. tokens_per_second: None of a lane, too: its rounds are timed without
    the drafting, which is done once for all lanes of a comparison."""

    rounds: int = 0
    tokens: int | None = 0
    acceptance: float | None = None
    tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    path: str | None = None

    @classmethod
    def read(cls, store: TraceStore, run_id: int) -> LiveNumbers:
        """The figures of one run so far."""
        rows = RunColumns(store, "rounds", run_id)
        figures = with_told({**acceptance_of(rows), **timings_of(rows)}, store, run_id)
        told = cls.told(figures)
        n = len(store.rounds)
        of_run = store.rounds.column("run_id", 0, n) == run_id
        rounds = store.rounds.column("round", 0, n)[of_run]
        if store.runs[run_id].lane is not None:
            told = replace(told, tokens_per_second=None)
        return replace(
            told, rounds=int(rounds[-1]) + 1 if len(rounds) else 0, path=_last_path(store, of_run)
        )

    @classmethod
    def told(cls, summary: Any) -> LiveNumbers:
        """The figures of a summary (engine.trace.timings); of a file's whatever is a number."""
        found = summary if isinstance(summary, dict) else {}
        known = {k: v for k, v in found.items() if isinstance(v, int | float)}
        tokens = known.get("predicted_n")
        return cls(
            tokens=None if tokens is None else int(tokens),
            acceptance=known.get("draft_acceptance_rate"),
            tokens_per_second=known.get("predicted_per_second") or None,
            tokens_per_step=known.get("mean_acceptance_length"),
        )


def _last_path(store: TraceStore, of_run: np.ndarray) -> str | None:
    codes = store.rounds.column("rollback_path", 0, len(of_run))[of_run]
    used = codes[(codes != store.text_pool.find("none")) & (codes != 0)]
    if not len(used):
        return None
    name = store.text_pool.text(int(used[-1]))
    return _PATH_NAMES.get(name, name)
