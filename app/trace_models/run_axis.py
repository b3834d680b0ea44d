"""The x-axis that plots of a run share (rounds, emitted tokens or time), and a second run on it."""

from __future__ import annotations

import numpy as np

from app.trace_models.run_facts import run_names
from app.trace_models.run_rows import GrowingArray, RunRows
from engine.trace.run_ref import RunRef

UNITS = {"round": "round", "token": "emitted tokens", "time": "time, s"}
"""What can be counted on the axis, and its label."""


class RunAxis:
    """Where the rounds of a run lie on the x-axis.

    unit "round": round n covers n - 0.5 … n + 0.5. "token": from the tokens that the run had
    emitted before to those after, over all sequences. "time": from the end of the round before to
    its own end, seconds without pauses. A round that has no rows has no width in the last two.
    """

    def __init__(self) -> None:
        self.unit = "round"
        self.rows: RunRows | None = None
        self._forget()

    def read(self, run: RunRef) -> None:
        """Read the rounds that joined the run since the last call; another run starts anew."""
        rows = self.rows
        if rows is None or rows.run != run:
            self.rows = rows = RunRows(run, "rounds")
            self._forget()
        start, stop = rows.read()
        if start == stop:
            return
        rounds, firsts = np.unique(rows.rounds.values[start:stop], return_index=True)
        emitted = np.maximum(rows.column("num_emitted", start, stop), 0)
        seconds = np.nan_to_num(rows.column("t_ms", start, stop)) / 1e3
        emitted = np.add.reduceat(emitted, firsts)
        seconds = np.maximum.reduceat(seconds, firsts)
        tokens, times = self._ends["token"], self._ends["time"]
        if len(self._rounds) and rounds[0] == self._rounds.values[-1]:  # its other rows came before
            tokens.values[-1] += emitted[0]
            times.values[-1] = max(times.values[-1], seconds[0])
            rounds, emitted, seconds = rounds[1:], emitted[1:], seconds[1:]
        before = [float(ends.values[-1]) if len(ends) else 0.0 for ends in (tokens, times)]
        self._rounds.add(rounds)
        tokens.add(before[0] + np.cumsum(emitted))
        times.add(np.maximum(before[1], np.maximum.accumulate(seconds)))

    def _forget(self) -> None:
        self._rounds = GrowingArray(np.int64)
        """Those that have rows, ascending; `_ends` is about the same."""
        self._ends = {"token": GrowingArray(np.float64), "time": GrowingArray(np.float64)}

    def starts(self, rounds: np.ndarray) -> np.ndarray:
        """Left edges of rounds, float64 of the same shape."""
        return rounds - 0.5 if self.unit == "round" else self._end(np.asarray(rounds) - 1)

    def ends(self, rounds: np.ndarray) -> np.ndarray:
        """Right edges of rounds, float64 of the same shape."""
        return rounds + 0.5 if self.unit == "round" else self._end(np.asarray(rounds))

    def start(self, round_: int) -> float:
        """Left edge of one round."""
        return float(self.starts(np.array(round_)))

    def centre(self, round_: int) -> float:
        """Middle of one round."""
        return (self.start(round_) + float(self.ends(np.array(round_)))) / 2

    def rounds_at(self, x: np.ndarray) -> np.ndarray:
        """The rounds at places of the axis, int64 of the same shape; beyond its ends, rounds that
        do not exist."""
        if self.unit == "round":
            return np.floor(np.asarray(x) + 0.5).astype(np.int64)
        rounds = self._rounds.values
        beyond = rounds[-1:] + 1 if len(rounds) else np.zeros(1, np.int64)
        found = np.searchsorted(self._ends[self.unit].values, x, side="right")
        return np.where(np.asarray(x) < 0, -1, np.append(rounds, beyond)[found])

    def between(self, left: float, right: float) -> tuple[int, int]:
        """The first round in this part of the axis, and the one after the last; the last may not
        exist yet."""
        first, last = self.rounds_at(np.array([left, right])).tolist()
        return max(first, 0), max(0, last + 1)

    def round_at(self, x: float) -> int:
        """The round at one place of the axis."""
        return int(self.rounds_at(np.array(x)))

    @property
    def round_width(self) -> float:
        """How wide a round is on average."""
        if self.unit == "round":
            return 1.0
        ends = self._ends[self.unit].values
        return float(ends[-1]) / len(ends) if len(ends) and ends[-1] else 1.0

    def text(self, round_: int) -> str:
        """A round in words, with its place in the unit of the axis."""
        if self.unit == "round":
            return f"round {round_}"
        end = float(self.ends(np.array(round_)))
        where = f"{end:,.0f} tokens" if self.unit == "token" else f"{end:.4g} s"
        return f"round {round_} · {where}"

    def _end(self, rounds: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self._rounds.values, rounds, side="right")
        return np.append(0.0, self._ends[self.unit].values)[at]


class RunOverlay:
    """over: the run on show. Nothing is read from the trace before somebody
    asks; plots share what was read."""

    def __init__(self, run: RunRef, over: RunRef) -> None:
        self.run, self.over = run, over
        self._axis = RunAxis()

    @property
    def name(self) -> str:
        """The run in words."""
        return run_names(self.run, self.over)[0]

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
