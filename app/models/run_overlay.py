"""A second run of the trace, laid over the one on show from its own beginning."""

from __future__ import annotations

from app.models.run_axis import RunAxis
from app.models.run_rows import RunRows
from engine.trace.store import TraceStore


class RunOverlay:
    """over: id of the run on show. Nothing is read from the trace before somebody asks; plots
    share what was read."""

    def __init__(self, store: TraceStore, run_id: int, over: int) -> None:
        self.store, self.run_id, self.over = store, run_id, over
        self._axis = RunAxis()

    @property
    def name(self) -> str:
        """The run in words."""
        return f"run {self.run_id}"

    def axis(self, unit: str) -> RunAxis:
        """Where the rounds that the run has by now lie, in a unit of `RunAxis`; the first begins
        where the first of the run on show does."""
        self._axis.unit = unit
        self._axis.read(self.store, self.run_id)
        return self._axis

    def rows(self) -> RunRows:
        """The run's rows of `rounds` by now."""
        rows = self.axis(self._axis.unit).rows
        assert rows is not None
        return rows

    def end(self, unit: str) -> float:
        """Right edge of the last round."""
        rows = self.rows()
        return self.axis(unit).start(int(rows.rounds.values[-1]) + 1) if len(rows) else 0.0
