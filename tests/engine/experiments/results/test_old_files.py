"""Files that earlier versions wrote (version 0.1 of 2026-11-26), as the program reads them now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.trace_models.results import read
from engine.experiments.bench.suite import compare_results, read_result
from engine.experiments.results.reader import find_results, read_results
from engine.experiments.results.table import SWEEP
from engine.experiments.results.writer import JobResult, ResultsWriter

OLD = Path(__file__).resolve().parents[3] / "data" / "results"


@pytest.mark.parametrize("name", ["suite.json", "tune.json", "sweep.sqlite", "tune.sqlite"])
def test_the_window_takes_each(name: str) -> None:
    assert find_results(OLD / name) == OLD / name
    found = read(OLD / name)
    assert found.n > 0
    speeds = found.column("predicted_per_second")
    assert speeds is not None and (speeds.values[0] > 0)


def test_a_suite() -> None:
    whole = read_result(OLD / "suite.json")
    assert [one["name"] for one in whole["configurations"]] == ["plain", "draft-mtp"]
    assert compare_results(whole, whole)["pairs"][1]["prompts"][0]["ratio"] == 1.0
    found = read_results(OLD / "suite.json")
    assert (found.n, found.axes) == (4, ("configuration", "prompt"))
    rows = [row for one in whole["configurations"] for row in one["rows"]]
    assert found.columns["predicted_ms"].tolist() == [row["predicted_ms"] for row in rows]
    assert found.columns["draft_acceptance_rate"][2] == rows[2]["accept_rate"]
    assert found.model(0)["name"] == "m.gguf"


def test_tune_as_json_and_as_a_file() -> None:
    found, table = read_results(OLD / "tune.json"), read_results(OLD / "tune.sqlite")
    assert (found.n, found.axes, found.title) == (table.n, table.axes, table.title)
    speeds = "predicted_per_second"
    assert found.columns[speeds].tolist() == table.columns[speeds].tolist()


def test_a_sweep_goes_on(tmp_path: Path) -> None:
    found = read_results(OLD / "sweep.sqlite")
    assert (found.n, found.title, found.done.tolist()) == (3, "lengths", [True, True, False])
    shutil.copy(OLD / "sweep.sqlite", tmp_path / "results.sqlite")
    with ResultsWriter(tmp_path, SWEEP, "lengths", 4) as writer:
        assert sorted(writer.finished().values()) == ["done", "done", "failed"]
        writer.add("0" * 16, 4, {"model": "m.gguf"}, JobResult(figures={"predicted_n": 1}))
    assert read_results(tmp_path).n == 4
