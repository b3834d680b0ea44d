"""`draftscope sweep`: real jobs on the demo model, going on, and wrong usage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.experiments.results.reader import read_results
from engine.experiments.results.table import SUITE
from engine.experiments.results.writer import ResultsWriter
from engine.trace.reopen import open_trace
from engine.trace.timings import timings
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]

PLAN = """
title = "two ways"
[settings]
prompts = "python"
limit = 2
n-predict = 6
ignore-eos = true
threads = 1
[[jobs]]
spec-type = "none"
[[grid]]
spec-type = "draft-mtp"
spec-draft-n-max = [1, 2]
n-rs-seq = [2]
[[jobs]]
spec-type = "none"
ctx-size = 8
"""


def test_jobs_of_the_demo_model(cli: Cli, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN)
    outcome = cli("sweep", plan, "--demo", "--out", out)
    assert outcome.status == 1  # one job cannot be done
    assert outcome.err.count("tok/s") == 3
    assert "[4/4]" in outcome.err
    assert "tokens, but the context only 8" in outcome.out
    assert "1 failed; --retry-failed" in outcome.out
    results = read_results(out)
    assert results.axes == ("spec-type", "ctx-size", "spec-draft-n-max", "n-rs-seq")
    assert results.done.tolist() == [True, False, True, True]
    assert results.columns["predicted_n"][results.done].tolist() == [12.0] * 3
    assert len(set(results.columns["output"][results.done])) == 1  # the texts are plain decoding's
    assert results.columns["weight_bytes"][0] > 1e6
    assert results.machine(0)["threads"] == 1
    assert results.model(0)["name"] == "demo-target.gguf"
    assert results.trace(1) is None
    folder = results.trace(2)
    assert folder is not None
    found = timings(open_trace(folder), 0)
    assert found["predicted_per_second"] == pytest.approx(
        results.columns["predicted_per_second"][2], rel=1e-6
    )
    again = cli("sweep", plan, "--demo", "--out", out, "--json")
    assert "4 of 4 jobs have results already" in again.err
    assert [job["status"] for job in again.json["jobs"]] == ["done", "failed", "done", "done"]
    listed = cli("sweep", plan, "--demo", "--out", out, "--list", "--json").json
    assert [job["has_result"] for job in listed["jobs"]] == [True] * 4


def test_jobs_that_differ_in_nothing_are_named_by_their_number(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    (tmp_path / "plan.toml").write_text("[[jobs]]\nmodel = 'cut.gguf'\nprompt = 'a'\n")
    outcome = cli("sweep", tmp_path / "plan.toml", "--out", tmp_path / "out")
    assert (outcome.status, outcome.err.startswith("[1/1] cut.gguf: ")) == (1, True)


def test_a_list_writes_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    listed = cli("sweep", "plan.toml", "--demo", "--list")
    assert (listed.status, listed.out.count("to do")) == (0, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_a_list_is_of_a_sweep(cli: Cli, tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "suite", SUITE, "ten prompts", 3):
        pass
    listed = cli("sweep", "--demo", "--list", "--out", tmp_path / "suite")
    assert (listed.status, "has results of `suite`" in listed.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No plan is given"),
        (["none.toml"], "none.toml cannot be read"),
        (["--demo", "--ship"], "--ship has no effect without --ray"),
    ],
)
def test_wrong_usage(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli("sweep", *words)
    assert (outcome.status, message in outcome.err) == (2, True)
    assert outcome.err.count("\n") == 1
