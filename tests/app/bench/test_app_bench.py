"""The window's benchmark: what it makes up, what it prints, and that every measure measures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import find
from engine.trace.export import export_csv
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.bench.window import __main__ as bench
from tests.bench.window import processes
from tests.bench.window.figure import Figure, figure_table
from tests.bench.window.processes import run_child
from tests.bench.window.synthetic import N_PROMPT, SyntheticRun, trace_of


def columns(store: TraceStore) -> dict[str, list[object]]:
    return {
        f"{name}.{column.name}": figure_table.texts(column.name)
        if column.kind == "text"
        else figure_table.column(column.name).tolist()
        for name, figure_table in store.tables.items()
        for column in figure_table.columns
    }


def test_a_synthetic_run_does_not_depend_on_the_pieces_it_is_written_in() -> None:
    whole, pieces = TraceStore(), TraceStore()
    SyntheticRun(whole, n_seqs=2).add(1200)
    run = SyntheticRun(pieces, n_seqs=2)
    for n in (1, 99, 400, 700):
        run.add(n)
    assert run.n_rounds == 1201
    found = columns(pieces)
    for name, values in columns(whole).items():
        assert repr(found[name]) == repr(values), name


def test_a_synthetic_run_is_a_trace_like_any_other(tmp_path: Path) -> None:
    store = TraceStore()
    run = SyntheticRun(store, n_seqs=2)
    run.add(300)
    tokens = store.tokens
    kinds = np.array(tokens.texts("kind"))
    for seq_id in (0, 1):
        mine = (tokens.column("seq_id") == seq_id) & np.isin(kinds, ("prompt", *EMITTED_KINDS))
        positions = tokens.column("pos")[mine]
        assert positions.tolist() == list(range(len(positions)))
    emitted = int(np.isin(kinds, EMITTED_KINDS).sum())
    assert run.n_emitted == emitted == int(store.rounds.column("num_emitted").sum())
    assert (kinds == "prompt").sum() == 2 * N_PROMPT
    drafted = store.rounds.column("num_draft_tokens")
    assert (drafted[:2] == MISSING).all() and drafted[2:].sum() == (kinds != "prompt").sum() - 600
    figures = summary(store, run.run_id)
    assert figures["draft_n_accepted"] == (kinds == "accepted").sum()
    assert figures["predicted_n"] == emitted
    assert not find(store), "a sound run"
    export_csv(store, tmp_path / "trace")
    again = open_trace(tmp_path / "trace")
    assert {k: len(t) for k, t in again.tables.items()} == {
        k: len(t) for k, t in store.tables.items()
    }


def test_the_size_of_a_trace() -> None:
    n = trace_of(5000).size()
    assert 5000 <= n < 5100


def test_goals() -> None:
    figures = [
        Figure("a", "x", 1.0, "s", 1.0),
        Figure("a", "y", 2.0, "s", 1.0),
        Figure("b", "z", 3, ""),
    ]
    assert [figure.met for figure in figures] == [True, False, None]
    lines = figure_table(figures).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["met", "missed", "3"]


def test_frames_and_opening(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--only", "frames", "--only", "open", "--seconds", "1", "--rows", "2000"]
    assert bench.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["display"] and printed["cores"]
    figures = {(f["measure"], f["name"]): f for f in printed["figures"]}
    assert {measure for measure, _ in figures} == {"frames", "open"}
    assert figures["frames", "tokens into all views"]["value"] > 500
    p50, p95 = (figures["frames", f"window's thread per frame, {p}"] for p in ("p50", "p95"))
    assert 0 < p50["value"] <= p95["value"]
    assert p95["met"] == (p95["value"] <= p95["goal"])
    assert figures["open", "rows"]["value"] >= 2000
    shown, read = (figures["open", n]["value"] for n in ("until the views show it", "read"))
    assert 0 < read <= shown


@pytest.mark.slow
@pytest.mark.repeats("test_frames_and_opening")
def test_a_start_and_an_engine_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    arguments = ["--only", "start", "--only", "engine", "--starts", "1", "--pairs", "1", "-n", "24"]
    assert bench.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("display: offscreen")
    assert lines[2].split()[:3] == ["measure", "figure", "value"]
    assert [line.split()[0] for line in lines[3:]] == ["start"] * 2 + ["engine"] * 5
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in lines[3:5]]
    assert 0 < seconds[0] < seconds[1]


def test_the_slow_down_is_told_with_its_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = iter([10.0, 1.0, 2.0, 3.0, 4.0])

    def child(_module: str, *arguments: str) -> dict[str, float]:
        shown = "--window" in arguments
        return {"tokens_per_second": 1000 / (1 + next(slower) / 100) if shown else 1000.0}

    monkeypatch.setattr(processes, "run_child", child)
    figures = {figure.name: figure for figure in processes.measure_slowdown(5, 100)}
    assert figures["slow-down"].value == pytest.approx(3)
    assert figures["slow-down"].met
    low, high = (figures[f"slow-down, {q} quartile of the pairs"] for q in ("lower", "upper"))
    assert (low.value, high.value) == (pytest.approx(2), pytest.approx(4))


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="demo_run ended with status 2: usage"):
        run_child("tests.bench.window.demo_run", "--nonsense")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "frame"], "--only frame: there are frames, layouts, engine, start, open"),
        (["--pairs", "0"], "--pairs must be above 0"),
        (["--n-predict", "-1"], "--n-predict must be above 0"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
