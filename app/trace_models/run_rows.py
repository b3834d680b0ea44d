"""Rows of one run in a table, indexed incrementally and read in place; the x-axis shared by plots
(rounds, emitted tokens or time); the shared cursor position; and ranges of rounds with their
figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from app.trace_models.run_facts import run_names
from app.trace_models.shown_text import NOT_OBSERVED, significant, size_or_none, whole_text
from engine.analysis.run_cost import RunCost
from engine.trace.records import PHASES
from engine.trace.run_ref import RunColumns, RunRef
from engine.trace.timings import StepSums, joint_counts, per_position


class GrowingArray:
    """An array with spare capacity; `values` is the used part."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._array: np.ndarray = np.empty(1024, dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def values(self) -> np.ndarray:
        """A view of everything added, [n]."""
        return self._array[: self._n]

    def add(self, values: np.ndarray) -> None:
        """Append values [n]."""
        stop = self._n + len(values)
        if stop > len(self._array):
            grown = np.empty(max(stop, 2 * len(self._array)), self._array.dtype)
            grown[: self._n] = self.values
            self._array = grown
        self._array[self._n : stop] = values
        self._n = stop


class RunRows:
    """Rows of a run, numbered from 0 in the order written, which is that of rounds."""

    def __init__(self, run: RunRef, table: str) -> None:
        self.run, self.table = run, run.store.tables[table]
        self.rounds = GrowingArray(np.int64)
        self._rows = GrowingArray(np.int64)
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def read(self) -> tuple[int, int]:
        """Read new rows; returns start and stop of those of this run."""
        start, stop, first = self._next, len(self.table), len(self._rows)
        self._next = stop
        rows = start + np.flatnonzero(self.table.column("run_id", start, stop) == self.run.run_id)
        self._rows.add(rows)
        self.rounds.add(self.table.column("round", 0, stop)[rows])
        return first, len(self._rows)

    def between(self, first_round: int, stop_round: int) -> tuple[int, int]:
        """Start and stop of the rows of rounds first_round .. stop_round - 1."""
        start, stop = np.searchsorted(self.rounds.values, (first_round, stop_round))
        return int(start), int(stop)

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Values of a column in rows start..stop of the run, [stop - start]."""
        rows = self._rows.values[start:stop]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # contiguous: no copy
            return self.table.column(name, int(rows[0]), int(rows[-1]) + 1)
        values: np.ndarray = self.table.column(name)[rows]
        return values

    def row(self, index: int) -> dict[str, object]:
        """One row as Python values; not observed is None."""
        return self.table.row(int(self._rows.values[index]))

    def of_round(self, round_: int) -> list[dict[str, object]]:
        """The rows of a round, each as `row` gives it."""
        return [self.row(at) for at in range(*self.between(round_, round_ + 1))]

    def add_to(self, sums: StepSums, start: int, stop: int) -> np.ndarray:
        """Add rows start..stop of `rounds` to sums; returns which of them are steps, bool [n]."""
        return sums.add(
            self.column("seq_id", start, stop),
            self.column("num_draft_tokens", start, stop),
            self.column("num_accepted_draft_tokens", start, stop),
            self.column("verify_width", start, stop),
            {phase: self.column(f"{phase}_ms", start, stop) for phase in PHASES},
        )

    def seq_in(self, round_: int | None) -> int | None:
        """The first sequence with a row in a round, or in any; None without one."""
        start, stop = (0, len(self)) if round_ is None else self.between(round_, round_ + 1)
        return None if start == stop else int(self.column("seq_id", start, start + 1)[0])

    def listed(self, names: Sequence[str], first_round: int, stop_round: int) -> list[list[object]]:
        """The named columns for all rows of these rounds, row by row; None = not observed."""
        rows = map(self.row, range(*self.between(first_round, stop_round)))
        return [[row[name] for name in names] for row in rows]


@dataclass(frozen=True)
class Position:
    """A place in the trace: a round of one sequence, and a token position in it if known. row: of
    the tokens table, if known: a replacement has the position of the token it replaces."""

    run: RunRef
    seq_id: int
    round: int
    pos: int | None
    row: int | None = field(default=None, compare=False)


UNITS = {"round": "round", "token": "emitted tokens", "time": "time, s"}
"""Units of the axis, with labels."""


class RunAxis:
    """Places of a run's rounds on the x-axis.

    unit "round": round n covers n - 0.5 … n + 0.5. "token": from the number of tokens emitted
    before it to the number after it, over all sequences. "time": from the end of the previous round
    to its own, seconds without pauses. A round without rows has no width in the last two.
    """

    def __init__(self) -> None:
        self.unit = "round"
        self.rows: RunRows | None = None
        self._forget()

    def read(self, run: RunRef) -> None:
        """Read the run's new rounds; another run resets the axis."""
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
        """Rounds that have rows, ascending; parallel to `_ends`."""
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
        """The rounds at places of the axis, int64 of the same shape; beyond its ends, numbers
        without rounds."""
        if self.unit == "round":
            return np.floor(np.asarray(x) + 0.5).astype(np.int64)
        rounds = self._rounds.values
        beyond = rounds[-1:] + 1 if len(rounds) else np.zeros(1, np.int64)
        found = np.searchsorted(self._ends[self.unit].values, x, side="right")
        return np.where(np.asarray(x) < 0, -1, np.append(rounds, beyond)[found])

    def between(self, left: float, right: float) -> tuple[int, int]:
        """The first round in this part of the axis, and one past the last; the last may not exist
        yet."""
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
        """A round in words, with its place in the axis unit."""
        if self.unit == "round":
            return f"round {round_}"
        end = float(self.ends(np.array(round_)))
        where = f"{end:,.0f} tokens" if self.unit == "token" else f"{end:.4g} s"
        return f"round {round_} · {where}"

    def _end(self, rounds: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self._rounds.values, rounds, side="right")
        return np.append(0.0, self._ends[self.unit].values)[at]


MOST_OVERLAID = 3
"""Most runs overlaid on the one on show."""


class RunOverlay:
    """over: the run on show. others: further runs drawn over it, which are not compared. The trace
    is read on demand, and plots share what was read."""

    def __init__(self, run: RunRef, over: RunRef, others: Sequence[RunRef] = ()) -> None:
        self.run, self.over = run, over
        self.every = (self, *(RunOverlay(one, over) for one in others))
        """This one and the others."""
        self._axis = RunAxis()

    @property
    def name(self) -> str:
        """The run in words."""
        return run_names(self.run, self.over)[0]

    def axis(self, unit: str) -> RunAxis:
        """Places of the run's present rounds, in a unit of `RunAxis`; the first round is aligned
        with the first of the run on show."""
        self._axis.unit = unit
        self._axis.read(self.run)
        return self._axis

    def rows(self) -> RunRows:
        """The run's present rows of `rounds`."""
        rows = self.axis(self._axis.unit).rows
        assert rows is not None
        return rows

    def end(self, unit: str) -> float:
        """Right edge of the last round of all of them."""
        ends = [0.0]
        for one in self.every:
            rounds = one.rows().rounds.values
            if len(rounds):
                ends.append(one.axis(unit).start(int(rounds[-1]) + 1))
        return max(ends)


_MOST_RATES = 8


@dataclass(frozen=True, slots=True)
class RunRange:
    """Rounds first to last of a run, inclusive; last None: to its end."""

    run: RunRef
    first: int = 0
    last: int | None = None

    @property
    def title(self) -> str:
        if self.last is None:
            return "Whole run"
        if self.first == self.last:
            return f"Round {self.first:,}"
        return f"Rounds {self.first:,}–{self.last:,}"


def range_figures(chosen: RunRange) -> dict[str, str]:
    """Figures of the rounds after the prompts, in words, by label."""
    run = chosen.run
    rows = RunColumns(run.store, "rounds", run.run_id)
    number = rows["round"]
    inside = (number >= chosen.first) & ~rows.is_prompt
    if chosen.last is not None:
        inside &= number <= chosen.last
    steps = inside & rows.is_step
    drafted = rows["num_draft_tokens"][steps]
    accepted = np.clip(rows["num_accepted_draft_tokens"][steps], 0, drafted)
    emitted = int(np.maximum(rows["num_emitted"][inside], 0).sum())
    depth = np.maximum(rows["rollback_depth"][inside], 0)
    cost = RunCost.of(run, chosen.first, chosen.last)
    counts = per_position(joint_counts(drafted, accepted))
    rates = counts["acceptance_per_position"]["unconditional"]
    n_drafted, n_accepted = int(drafted.sum()), int(accepted.sum())
    share = significant(n_accepted / n_drafted) if n_drafted else NOT_OBSERVED
    n_rows = int(inside.sum())
    found = {
        "rounds": f"{len(cost.rounds):,}",
        "tokens": f"{emitted:,}",
        "accepted": f"{n_accepted:,} of {n_drafted:,}",
        "acceptance": share,
        **{
            f"  position {i}": NOT_OBSERVED if rate is None else f"{rate:.2f}"
            for i, rate in enumerate(rates[:_MOST_RATES])
        },
        "tokens per round": significant(emitted / n_rows if n_rows else None),
        "ms per round": significant(cost.per_round()),
    }
    found |= {f"  {phase}": significant(cost.per_round(phase)) for phase in PHASES}
    undone = [n for n in (cost.n_restores, cost.n_removed, cost.n_refused) if n is not None]
    deepest = int(depth.max(initial=0))
    found |= {
        "rollbacks": f"{sum(undone):,}" if undone else NOT_OBSERVED,
        "  deepest": f"{deepest}" if undone else NOT_OBSERVED,
        "restores": whole_text(cost.n_restores),
        "replayed": whole_text(cost.n_replayed),
        "passes": whole_text(cost.n_passes),
        "bytes moved": size_or_none(cost.bytes_moved),
        "bytes written": size_or_none(cost.bytes_written),
    }
    return found
