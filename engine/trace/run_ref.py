"""The name of a run wherever it leaves its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run together with the trace that holds it: ids count from 0 in every trace, so an id by
    itself names one run in each of them. Two are equal for the same run of the same store."""

    store: TraceStore
    run_id: int

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the run. Raises KeyError for a run that the trace lacks."""
        return self.store.runs[self.run_id]

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end; the trace keeps that fact for last."""
        return "stops" in self.facts

    def sibling(self, run_id: int) -> RunRef:
        """Another run of the same trace."""
        return RunRef(self.store, run_id)

    def __str__(self) -> str:
        return f"run {self.run_id}"
