"""Findings and scenarios on the command line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import RULES, recorded
from engine.session import Session
from engine.trace.reopen import open_trace
from resources import DEMO_TARGET, SCENARIOS
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.fake_llama import FakeLlama, use
from tests.support.rewrite_gguf import Tensors, rewrite

Cli = Callable[..., Outcome]

MTP = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
QUICK = ("--tokens", "5,6,7,8", "-n", 24, "--ignore-eos", "--compute", "f32", "--threads", 1)
LANE = "planes,fault=plane-off-by-one"


def test_run_prints_and_exports_findings(cli: Cli, tmp_path: Path) -> None:
    words = [
        "run",
        MTP,
        *QUICK,
        "--spec-type",
        "draft-mtp",
        "--rollback",
        "checkpoint",
        "--fault",
        "keep-stale-kv",
    ]
    lines = cli(*words).out.splitlines()
    (line,) = (line for line in lines if line.startswith("error: "))
    report = cli(*words, "--json", "--trace", tmp_path / "out").json
    of_errors = [f for f in report["findings"] if f["severity"] == "error"]
    (finding,) = (f for f in of_errors if f["cause"] is None)
    assert {f["cause"] for f in of_errors} <= {None, "duplicate-kv-cells"}
    assert (finding["rule"], finding["lane"], finding["seq_id"]) == ("duplicate-kv-cells", None, 0)
    rule = RULES["duplicate-kv-cells"]
    assert line == (
        f"error: duplicate-kv-cells (round {finding['round']}): {finding['message']} "
        f"{rule.suggestion}"
    )
    with (tmp_path / "out" / "findings.csv").open(encoding="utf-8", newline="") as file:
        first = next(row for row in csv.DictReader(file) if row["severity"] == "error")
    assert (first["rule"], first["round"]) == (rule.id, str(finding["round"]))
    assert first["suggestion"] == rule.suggestion
    assert [f.rule for f in recorded(open_trace(tmp_path / "out"))] == [
        f["rule"] for f in report["findings"]
    ]


def test_logits_that_are_no_numbers_fail_a_run(cli: Cli, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["output_norm.weight"][:] = np.nan

    words = ["run", rewrite(MTP, tmp_path / "nan.gguf", edit=edit), *QUICK]
    failed = cli(*words, "--trace", tmp_path / "out")
    assert failed.status == 1
    assert "trunk's logits for position 4 of sequence 0, in round 0, contain NaN" in failed.err
    assert [f.rule for f in recorded(open_trace(tmp_path / "out"))] == ["non-finite-logits"]
    went_on = cli(*words, "--allow-non-finite")
    assert went_on.status == 0
    assert "error: non-finite-logits (round 0): " in went_on.out


def test_compare_names_the_lane(cli: Cli) -> None:
    outcome = cli("compare", MTP, *QUICK, "--lane", "planes", "--lane", LANE)
    assert outcome.status == 1
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: plane-off-by-one ({LANE}, round ")
    report = cli("compare", MTP, *QUICK, "--lane", LANE, "--json").json
    (finding,) = (f for f in report["findings"] if f["severity"] == "error")
    assert (finding["lane"], finding["run_id"]) == (LANE, 2)


def test_scenarios_are_listed(cli: Cli) -> None:
    outcome = cli("compare", "--list-scenarios")
    assert (outcome.status, outcome.err) == (0, "")
    names = [line.split()[0] for line in outcome.out.splitlines()]
    assert names == sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def test_a_scenario_with_lanes(cli: Cli, tmp_path: Path) -> None:
    words = ["compare", "--demo", "--scenario", "plane-off-by-one", "--compute", "f32"]
    outcome = cli(*words, "--threads", 1, "--trace", tmp_path / "out")
    assert outcome.status == 1
    assert outcome.out.startswith("The plane next to the right one\n")
    assert outcome.out.endswith("expected plane-off-by-one: found\n")
    assert "error: plane-off-by-one (planes,fault=plane-off-by-one, round " in outcome.out
    assert "plane-off-by-one" in open_trace(tmp_path / "out").findings.texts("rule")


def test_a_scenario_of_sequences(cli: Cli) -> None:
    words = ["compare", "--demo", "--scenario", "two-sequences", "--compute", "f32"]
    outcome = cli(*words, "--threads", 1)
    assert outcome.status == 0
    assert "\nwarning: concurrency-lost (round 1): " in outcome.out
    assert outcome.out.endswith("expected concurrency-lost: found\n")
    report = cli(*words, "--threads", 1, "--json").json
    assert len(report["sequences"]) == 2
    assert report["options"]["split"] == "seq"
    said = [f["rule"] for f in report["findings"] if f["severity"] != "info"]
    assert said == ["concurrency-lost"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--scenario", "luck"], "There is no scenario 'luck'"),
        (["--scenario", "unified-kv", "-p", "x"], "has its own prompts, options and lanes"),
        (["--scenario", "unified-kv", "-n", "3"], "has its own prompts, options and lanes"),
        (["--scenario", "unified-kv", "--lane", "ring"], "has its own prompts, options and lanes"),
        (["--scenario", "two-sequences", "--lane", "llama.cpp"], "has its own prompts"),
    ],
)
def test_a_scenario_stands_alone(cli: Cli, words: list[str], what: str) -> None:
    outcome = cli("compare", "--demo", *words)
    assert (outcome.status, outcome.out) == (2, "")
    assert what in outcome.err


def test_lanes_of_llama_cpp_join_a_scenario(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLlama(Session.open(DEMO_TARGET, compute="f32")))
    lanes = ("--lane", "llama.cpp,rollback=planes", "--lane", "llama.cpp,rollback=checkpoint")
    words = ("--demo", "--scenario", "full-rejection", "--compute", "f32", "--threads", 1, "--json")
    report = cli("compare", *words, *lanes).json
    verdicts = {lane["lane"]: lane["verdict"] for lane in report["lanes"]}
    assert list(verdicts)[-4:] == ["llama.cpp", "llama.cpp,rollback=noise", *lanes[1::2]]
    assert {verdicts[lane] for lane in lanes[1::2]} == {"exact"}
