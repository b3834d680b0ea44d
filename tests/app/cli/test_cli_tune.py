"""`draftscope tune` on the demo model, shortly, and wrong usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.trace_models.results import read
from engine.analysis.what_if.rules import RULES
from engine.experiments.results.reader import read_results
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

MODEL = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"


def test_a_model_is_tuned_and_the_window_opens_the_result(cli: Cli, tmp_path: Path) -> None:
    file, out, page = tmp_path / "t.json", tmp_path / "out", tmp_path / "t.html"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        '{"prompt": "def add(a, b):", "category": "short"}\n'
        '{"prompt": "class Stack:\\n    def push(self, item):", "category": "long"}\n'
    )
    words = ["--prompts", prompts, "-n", 6, "--pairs", 6, "--spec-type", "draft-mtp,suffix"]
    outcome = cli(
        "tune", MODEL, *words, "--json", file, "--out", out, "--report", page, "--threads", 1
    )
    assert outcome.status == 0, outcome.err
    for said in ("Recommended:", "Runs in alternation:", "llama-server:", "category"):
        assert said in outcome.out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["kind"], data["version"]) == ("draftscope tune", 1)
    names = [one["name"] for one in data["confirmed"]]
    assert len(names) == 4
    assert names[0] == "plain"
    for one in data["confirmed"]:
        assert len(one["speeds"]) == 6
        assert one["low"] <= one["tokens_per_second"] <= one["high"]
        assert one["same"] == one["n_prompts"] == 2
    chosen, p = data["verdict"]["chosen"], data["verdict"]["p"]
    assert chosen == "plain" or (chosen in names and p < 0.05)
    assert {one["rule"] for one in data["rules"] if one["drafter"] == "draft-mtp"} == set(RULES)
    assert [row["category"] for row in data["by_category"]] == ["short", "long"]
    results = read_results(out)
    measured = results.columns["figures"] == "measured"
    assert measured.sum() == 4
    assert results.columns["predicted_per_second"][measured].tolist() == [
        one["tokens_per_second"] for one in data["confirmed"]
    ]
    for opened in (read(out), read(file)):
        assert "spec-draft-n-max" in opened.axes
        assert opened.n == results.n > 40
    assert "Speed against memory" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs", "5"], "--pairs is outside"),
        (["--prompts", "nowhere.json"], "nowhere.json cannot be read"),
        (["--spec-type", "draft-moonshine"], "--spec-type draft-moonshine is unknown"),
        (["--spec-type", "ngram-cache"], "no draft length to tune"),
        (["--json", "."], "is a folder"),
        (["--out", "/dev/null"], "--out /dev/null cannot be written"),
        (["--budget", "9"], "--budget has no effect without --server or --running."),
        (
            ["--running", "plain=http://127.0.0.1:9", "--out", "a"],
            "--out has no effect without MODEL.",
        ),
        (["--server", "a", "--temp", "1"], "--temp has no effect without MODEL."),
        (["--limit", "0"], "--limit"),
    ],
)
def test_wrong_usage_is_one_sentence(cli: Cli, words: list[str], said: str) -> None:
    outcome = cli("tune", "--demo", *words)
    assert outcome.status == 2
    assert said in outcome.err


def test_trials_without_optuna(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = cli("tune", "--demo", "--trials", 3)
    assert outcome.status == 2
    assert "pip install draftscope[tune]" in outcome.err
