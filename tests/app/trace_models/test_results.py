"""Results as columns, sorted, averaged over two settings, and the front of the best trade-offs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPersistentModelIndex, Qt

from app.panels.tune.result_plots import MOST_CELLS, front, map_axes, result_map
from app.panels.tune.results_view import ResultTable
from app.trace_models.results import ResultColumn, Results, read
from app.trace_models.shown_text import plain_tip
from app.trace_models.tune_surface import BEST
from tests.engine.experiments.results.test_json_files import DATA
from tests.support.sweeps import write_results


def figure(name: str, values: list[float]) -> ResultColumn:
    return ResultColumn(name, name, "", np.array(values, float), is_figure=True)


def words(name: str, values: list[str]) -> ResultColumn:
    column = np.empty(len(values), object)
    column[:] = values
    return ResultColumn(name, name, "", column)


def results_of(*columns: ResultColumn) -> Results:
    n = len(columns[0].values)
    return Results(
        Path("x"), "t", n, columns, (), "", lambda _: None, lambda _: "", lambda _: "all of it"
    )


def test_a_sweep_has_its_axes_and_figures(tmp_path: Path) -> None:
    results = read(write_results(tmp_path, 3, 8).parent)
    assert (results.title, results.n) == ("lengths", 24)
    assert "3 failed" in results.note and "spec-type draft-mtp" in results.note
    (tmp_path / "other").mkdir()
    other = read(write_results(tmp_path / "other", 2, 1))
    assert other.note.endswith("seed 0, spec-type draft-mtp")
    assert [c.name for c in results.columns][:4] == [
        "number",
        "spec-draft-n-max",
        "seed",
        "predicted_per_second",
    ]
    assert [c.title for c in results.columns][1:4] == ["n_max", "seed", "tok/s"]
    assert [c.name for c in results.figures] == ["predicted_per_second", "predicted_n"]
    assert results.columns[-1].text(6) == "failed: Job 7 failed."
    assert (results.error(6), results.error(0), results.trace(0)) == ("Job 7 failed.", "", None)
    assert results.columns[3].text(6) == "–"


def test_a_row_of_tune_is_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(DATA), "utf-8")
    results = read(path)
    assert results.columns[0].title == "setting"
    assert results.note.startswith("4 settings")


def test_rows_without_a_value_stand_last_either_way() -> None:
    nan = float("nan")
    table = ResultTable()
    table.set_results(
        results_of(figure("a", [3, nan, 1, 2, 2]), words("b", ["y", "", "x", "z", "y"]))
    )
    held = QPersistentModelIndex(table.index(0, 0))
    for column, order, expected in (
        (0, Qt.SortOrder.AscendingOrder, [2, 3, 4, 0, 1]),
        (0, Qt.SortOrder.DescendingOrder, [0, 4, 3, 2, 1]),
        (1, Qt.SortOrder.AscendingOrder, [2, 0, 4, 3, 1]),
        (1, Qt.SortOrder.DescendingOrder, [3, 4, 0, 2, 1]),
        (-1, Qt.SortOrder.AscendingOrder, [0, 1, 2, 3, 4]),
    ):
        table.sort(column, order)
        assert table.order.tolist() == expected
        assert held.row() == table.place_of(0)


def test_cells_are_means_and_the_best_is_marked() -> None:
    rng = np.random.default_rng(2)
    x, speed = rng.integers(0, 4, 200).astype(float), rng.random(200)
    speed[rng.random(200) < 0.1] = np.nan
    y = rng.choice(["planes", "replay", "ring"], 200).tolist()
    x[:3] = np.nan
    results = results_of(figure("n", x.tolist()), words("p", y), figure("s", speed.tolist()))
    heat_map, rows = result_map(results, *results.columns)
    assert heat_map.y_labels == ("planes", "replay", "ring")
    assert heat_map.x_labels == ("–", "0", "1", "2", "3")
    place = np.where(np.isnan(x), 0, x + 1)
    means = {}
    for row, policy in enumerate(heat_map.y_labels):
        for column in range(5):
            here = (place == column) & (np.array(y) == policy) & np.isfinite(speed)
            mine = np.flatnonzero(here).tolist()
            if not mine:
                continue
            assert rows[row, column].tolist() == mine
            means[row, column] = float(np.mean(speed[mine]))
            assert heat_map.values[row, column] == pytest.approx(means[row, column])
    assert heat_map.marks[BEST] == max(means, key=lambda cell: means[cell])
    slow = ResultColumn("wall_s", "", "", speed, is_figure=True)
    marks = result_map(results, results.columns[0], results.columns[1], slow)[0].marks
    assert marks[BEST] == min(means, key=lambda cell: means[cell])


def test_an_estimate_is_not_averaged_with_what_was_measured() -> None:
    kinds = words("figures", ["measured", "estimated", "estimated", "estimated", "measured"])
    n, speed = figure("n", [1, 1, 2, 2, 3]), figure("s", [5, 9, 4, 6, np.nan])
    heat_map, rows = result_map(results_of(kinds, n, speed), n, None, speed)
    assert heat_map.values.tolist() == [[5, 5, pytest.approx(np.nan, nan_ok=True)]]
    assert rows[0, 0].tolist() == [0] and rows[0, 1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            {"spec-type": 9, "spec-draft-p-min": 2, "seed": 8, "spec-draft-n-max": 3},
            ("spec-draft-n-max", "spec-draft-p-min"),
        ),
        ({"spec-draft-n-max": 3, "rollback": 2, "seed": 8, "temp": 5}, ("seed", "temp")),
        ({"temp": 5, "rollback": 2, "seed": 8}, ("temp", "seed")),
        ({"a": 2, "b": 2, "c": 2}, ("a", "b")),
        ({"spec-draft-n-max": 3}, ("spec-draft-n-max",)),
        ({}, ()),
    ],
)
def test_a_map_is_first_over_n_max_and_p_min_or_what_varies_most(
    counts: dict[str, int], expected: tuple[str, ...]
) -> None:
    columns = [figure(name, [float(i % n) for i in range(72)]) for name, n in counts.items()]
    results = results_of(*columns, figure("s", [1.0] * 72))
    assert map_axes(replace(results, axes=tuple(counts))) == expected


def test_what_is_missing_is_no_value_of_an_axis() -> None:
    columns = (
        words("a", ["x", "", "", "x"]),
        figure("b", [1, float("nan"), 2, 1]),
        figure("c", [float("nan"), float("nan"), 2, 1]),
    )
    assert map_axes(replace(results_of(*columns), axes=("a", "b", "c"))) == ("b", "c")


def test_plain_decoding_without_a_draft_length_may_be_the_best_cell() -> None:
    drafts, lengths = words("t", ["none", "mtp", "mtp"]), figure("n", [float("nan"), 1, 2])
    speed = figure("s", [39, 25, 29])
    heat = result_map(results_of(drafts, lengths, speed), drafts, lengths, speed)[0]
    assert heat.y_labels == ("–", "1", "2")
    assert heat.marks[BEST] == (0, heat.x_labels.index("none"))


def test_a_map_over_one_setting_is_a_row() -> None:
    columns = figure("n", [1, 2, 2, 3]), figure("s", [5, 1, 3, float("nan")])
    heat = result_map(results_of(*columns), columns[0], None, columns[1])[0]
    np.testing.assert_array_equal(heat.values, [[5, 2, np.nan]])
    assert (heat.y_name, heat.y_labels, heat.place(0, 1)) == ("", ("",), "n 2")


def test_many_values_become_ranges_and_long_words_are_cut() -> None:
    many, names = np.linspace(0, 1, 500), [f"{i:03} " + "x" * 5000 for i in range(500)]
    results = results_of(figure("a", many.tolist()), words("b", names), figure("s", [1.0] * 500))
    heat = result_map(results, *results.columns)[0]
    assert heat.values.shape == (MOST_CELLS, MOST_CELLS)
    assert heat.x_labels[0] == "≥ 0.00" and len(heat.y_labels[0]) < 70
    assert len(results.columns[1].text(0)) < 70


@pytest.mark.parametrize("names", [("memory_bytes", "speed"), ("speed", "rate"), ("a_ms", "b_ms")])
def test_the_front_is_what_none_beats(names: tuple[str, str]) -> None:
    rng = np.random.default_rng(7)
    x, y = (figure(name, rng.integers(0, 30, 150).tolist()) for name in names)
    y.values[:5] = np.nan
    signs = [-1 if column.is_better_low else 1 for column in (x, y)]
    points = [(signs[0] * a, signs[1] * b) for a, b in zip(x.values, y.values, strict=True)]
    unbeaten = {
        p
        for p in points
        if p[1] == p[1] and not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)
    }
    found = front(x, y)
    assert {points[row] for row in found.tolist()} == unbeaten
    assert len(found) == len(unbeaten)
    assert np.all(np.diff(x.values[found]) > 0)
    none = figure("a", [float("nan")])
    assert front(none, none).tolist() == []


def test_a_tooltip_shows_markup_as_it_is_written() -> None:
    label = results_of(words("a", ["x"]))
    table = ResultTable()
    table.set_results(replace(label, about=lambda _: "model <img src=/etc/passwd> & more"))
    tip = table.index(0, 0).data(Qt.ItemDataRole.ToolTipRole)
    assert tip == "<span>model &lt;img src=/etc/passwd&gt; &amp; more</span>"
    assert plain_tip("a < b, 3 > 2") == "a < b, 3 > 2"
