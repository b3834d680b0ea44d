"""Results as a heat map over two settings, and as points of which none beats those of the front."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from app.trace_models.heat_map import BEST, HeatMap
from app.trace_models.number_text import significant
from app.trace_models.results import ResultColumn, Results, short_text

MOST_CELLS = 40
"""Values of an axis; of more, numbers are put together in ranges and words beyond are left out."""
_DRAFT_AXES = ("spec-draft-n-max", "spec-draft-p-min")


@dataclass(frozen=True)
class ResultMap:
    """rows: the rows of the results in each cell, by (row, column). left_out: rows that are in no
    cell: without the figure, or with a value of an axis that is not shown."""

    heat_map: HeatMap
    rows: dict[tuple[int, int], np.ndarray]
    left_out: int


@dataclass(frozen=True)
class _Axis:
    labels: tuple[str, ...]
    place: np.ndarray
    """int64 [n]: where each row lies, -1 for nowhere."""


def map_axes(results: Results) -> tuple[str, ...]:
    """The settings that a heat map is first drawn over, across and up: n_max and p_min where both
    vary, else the two with most values, in the plan's order; less where fewer vary."""
    if set(_DRAFT_AXES) <= set(results.axes):
        return _DRAFT_AXES
    counts = {name: _n_values(results.column(name)) for name in results.axes}
    most = sorted(counts, key=lambda name: -counts[name])[:2]
    return tuple(name for name in results.axes if name in most)


def result_map(
    results: Results, x: ResultColumn, y: ResultColumn | None, figure: ResultColumn
) -> ResultMap:
    """The mean of a figure over the rows of each pair of values; the best cell is marked. y: None
    for a single row of cells."""
    across = _axis(x)
    up = _Axis(("",), np.zeros(results.n, np.int64)) if y is None else _axis(y)
    known = np.isfinite(figure.values) & (across.place >= 0) & (up.place >= 0)
    rows = np.flatnonzero(known)
    shape = (max(1, len(up.labels)), max(1, len(across.labels)))
    cell = up.place[rows] * shape[1] + across.place[rows]
    n = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, figure.values[rows], shape[0] * shape[1])
    values = np.full(len(n), np.nan)
    np.divide(total, n, out=values, where=n > 0)
    order = np.argsort(cell, kind="stable")
    parts = np.split(rows[order], np.cumsum(n)[:-1])
    marks = {}
    if len(rows):
        at = int(np.nanargmin(values) if figure.is_better_low else np.nanargmax(values))
        marks[BEST] = divmod(at, shape[1])
    values = values.reshape(shape)
    texts = tuple(tuple(_text(figure, value) for value in row) for row in values.tolist())
    return ResultMap(
        HeatMap(
            x.title, "" if y is None else y.title, across.labels, up.labels, values, texts, marks
        ),
        {divmod(at, shape[1]): part for at, part in enumerate(parts) if len(part)},
        results.n - len(rows),
    )


def front(x: ResultColumn, y: ResultColumn) -> np.ndarray:
    """Rows that no other beats in both figures, by x: int64 [m]."""
    rows = np.flatnonzero(np.isfinite(x.values) & np.isfinite(y.values))
    cost = x.values[rows] * (1 if x.is_better_low else -1)
    loss = y.values[rows] * (1 if y.is_better_low else -1)
    order = np.lexsort((loss, cost))
    least = np.minimum.accumulate(loss[order])
    is_front = np.r_[True, least[1:] < least[:-1]] if len(order) else np.zeros(0, bool)
    chosen: np.ndarray = rows[order[is_front]]
    return chosen[np.argsort(x.values[chosen], kind="stable")]


def _n_values(column: ResultColumn | None) -> int:
    """Different values, not counting rows without one."""
    if column is None:
        return 0
    values = column.values
    known = values != "" if column.is_text else np.isfinite(values)
    return len(set(values[known].tolist()))


def _axis(column: ResultColumn) -> _Axis:
    if column.is_text:
        counts = Counter(column.values.tolist())
        names = sorted(name for name, _ in counts.most_common(MOST_CELLS))
        places = {name: i for i, name in enumerate(names)}
        place = np.array([places.get(name, -1) for name in column.values.tolist()], np.int64)
        return _Axis(tuple(short_text(name) or "–" for name in names), place)
    known = np.isfinite(column.values)
    found, at = np.unique(column.values[known], return_inverse=True)
    place = np.full(len(column.values), -1)
    if len(found) <= MOST_CELLS:
        place[known] = at
        rows = [int(np.flatnonzero(column.values == value)[0]) for value in found]
        return _Axis(tuple(column.text(row) for row in rows), place)
    edges = np.linspace(found[0], found[-1], MOST_CELLS + 1)
    place[known] = np.clip(
        np.searchsorted(edges, column.values[known], "right") - 1, 0, MOST_CELLS - 1
    )
    return _Axis(tuple(f"≥ {significant(edge)}" for edge in edges[:-1].tolist()), place)


def _text(figure: ResultColumn, value: float) -> str:
    if value != value:
        return "–"
    one = ResultColumn(figure.name, "", "", np.array([value]), is_figure=True)
    text = one.text(0)
    return text if len(text) <= 8 else significant(value)
