"""The shared x-axis and the columns of pixels, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.panels.plots.bar_view import PixelColumns, envelope
from app.trace_models.run_rows import RunAxis
from engine.trace.run_ref import RunRef
from tests.support.timed_trace import add_rounds, begin, timed_trace


def test_rounds_lie_where_tokens_and_time_say() -> None:
    store, _, run_id = timed_trace(40, n_seqs=2)
    axis = RunAxis()
    axis.read(RunRef(store, run_id))
    mine = store.rounds.column("run_id") == run_id
    rounds = store.rounds.column("round")[mine]
    tokens, times = store.rounds.column("num_emitted")[mine], store.rounds.column("t_ms")[mine]
    for number in (0, 1, 17, 39):
        axis.unit = "round"
        assert (axis.start(number), axis.centre(number)) == (number - 0.5, number)
        axis.unit = "token"
        assert axis.start(number) == tokens[rounds < number].sum()
        assert axis.start(number + 1) == tokens[rounds <= number].sum()
        axis.unit = "time"
        assert axis.start(number + 1) == pytest.approx(times[rounds <= number].max() / 1e3)
        assert axis.round_at(axis.centre(number)) == number
    assert axis.round_at(-1.0) == -1
    assert axis.round_at(1e9) == 40


def test_rows_read_one_by_one_give_the_same_axis() -> None:
    store, _, _ = timed_trace(1)
    run_id = begin(store, ("draft-mtp",))
    slow, fast = RunAxis(), RunAxis()
    source, _, drafted = timed_trace(12, n_seqs=2)
    rows = np.flatnonzero(source.rounds.column("run_id") == drafted)
    for row in rows.tolist():
        facts = {k: v for k, v in source.rounds.row(row).items() if v is not None and v != ""}
        store.rounds.append(**{**facts, "run_id": run_id})
        slow.read(RunRef(store, run_id))
    fast.read(RunRef(store, run_id))
    for unit in ("token", "time"):
        slow.unit = fast.unit = unit
        numbers = np.arange(13)
        assert slow.starts(numbers) == pytest.approx(fast.starts(numbers))


def test_another_run_begins_anew() -> None:
    store, plain, run_id = timed_trace(20)
    axis = RunAxis()
    axis.unit = "token"
    axis.read(RunRef(store, run_id))
    axis.read(RunRef(store, plain))
    assert axis.start(20) == 20
    add_rounds(store, plain, 20, 25, drafts=False)
    axis.read(RunRef(store, plain))
    assert axis.start(25) == 25


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(2, 40))
def test_columns_lose_no_peak(values: list[float], n_pixels: int) -> None:
    x = np.arange(len(values), dtype=float)
    y = np.array(values)
    columns = PixelColumns(x, -0.5, len(values) - 0.5, n_pixels)
    assert len(columns.starts) <= n_pixels or len(columns.starts) == len(x) <= n_pixels
    bounds = [*columns.starts.tolist(), len(x)]
    parts = [y[a:b] for a, b in pairwise(bounds)]
    assert columns.most(y).tolist() == [part.max() for part in parts]
    assert columns.mean(y) == pytest.approx([part.mean() for part in parts])
    line_x, line_y = envelope(x, y, -0.5, len(values) - 0.5, n_pixels)
    assert len(line_x) == len(line_y) <= max(n_pixels, 2)
    assert line_y.max() == y.max() and line_y.min() == y.min()
