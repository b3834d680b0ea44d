"""A second run of the trace, laid over the one on show from its own beginning."""

from __future__ import annotations

from app.models.run_axis import RunAxis
from app.models.run_rows import RunRows
from engine.trace.run_ref import RunRef


class RunOverlay:
    """over: the run on show, of the same trace. Nothing is read from the trace before somebody
    asks; plots share what was read."""

    def __init__(self, run: RunRef, over: RunRef) -> None:
        self.run, self.over = run, over
        self._axis = RunAxis()

    @property
    def name(self) -> str:
        """The run in words."""
        return str(self.run)

    def axis(self, unit: str) -> RunAxis:
        """Where the rounds that the run has by now lie, in a unit of `RunAxis`; the first begins
        where the first of the run on show does."""
        self._axis.unit = unit
        self._axis.read(self.run)
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
