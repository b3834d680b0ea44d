"""match: verdicts, exit statuses, table and JSON on the demo and golden models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.experiments.bench.match import WidthControl
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
MTP = DATA / "qwen35-c-v2x-mtp-f32.gguf"
NO_HEAD = DATA / "qwen35-a-f32.gguf"
DEMO = ("match", "--demo", "--threads", 1, "-n", 8)
FAULTY = (
    "match",
    MTP,
    "--threads",
    1,
    "-n",
    12,
    "--compute",
    "f32",
    "--ignore-eos",
    "--fault",
    "stale-logits",
)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one.json"
    path.write_text('[{"name": "alone", "text": "def f(x):"}]', encoding="utf-8")
    return path


@pytest.mark.parametrize("compute", ["f32", "int8"])
@pytest.mark.thinned(4)
def test_the_demo_passes(cli: Cli, compute: str) -> None:
    outcome = cli(*DEMO, "--compute", compute)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[-1].startswith("pass: ")
    assert lines[0].startswith("control, step 1 (seq): ")
    assert lines[0].endswith(" s, the reference for the others")
    assert lines[1].startswith("  function           stored (")
    heads = [line.split(": ")[0] for line in lines if not line.startswith(" ") and "step" in line]
    assert heads == [
        f"{lane}, step {n} ({kind})"
        for n, kind in enumerate(("seq", "seq", "par"), 1)
        for lane in ("control", "speculation")
    ]
    if compute == "f32":
        assert sum("MATCH (" in line for line in lines) == 15
        assert "8 tokens)" in lines[1]


def test_batch_invariant_knows_no_near_ties(cli: Cli, one: Path) -> None:
    words = [*DEMO, "--prompts", one, "--steps", "seq,par", "--batch-invariant"]
    outcome = cli(*words, "--json")
    assert outcome.status == 0
    assert outcome.json["all_match"] and outcome.json["options"]["batch_invariant"]
    faulty = cli(*FAULTY, "--prompts", one, "--steps", "seq", "--batch-invariant")
    assert faulty.status == 1
    last = faulty.out.splitlines()[-1]
    assert last == "fail: a text differs although the batch width cannot change it"


def test_a_planted_fault_is_exit_status_1(cli: Cli, one: Path) -> None:
    words = [*FAULTY, "--prompts", one, "--steps", "seq,par"]
    outcome = cli(*words)
    assert outcome.status == 1
    assert "DIFFERS at token" in outcome.out
    assert "no tie" in outcome.out
    last = outcome.out.splitlines()[-1]
    assert last == "fail: a text differs at a place that the batch width does not explain"
    report = cli(*words, "--json").json
    assert (report["passed"], report["all_match"]) == (False, False)
    for step in report["steps"]:
        for result in step["results"]:
            assert (result["difference"] is None) == (step["lane"] == "control")


def test_a_near_tie_passes_unless_texts_must_be_exact(
    cli: Cli, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine.experiments.bench.match.width_control",
        lambda *args: WidthControl(gap=0.01, noise=0.02),
    )
    words = [*FAULTY, "--prompts", one, "--steps", "seq"]
    outcome = cli(*words)
    assert outcome.status == 0
    assert (
        "their logits differ by 0.01, the width changes them by up to 0.02: a near tie"
        in outcome.out
    )
    assert outcome.out.splitlines()[-1].startswith("pass: texts differ only where the batch width")
    outcome = cli(*words, "--exact")
    assert outcome.status == 1
    assert outcome.out.splitlines()[-1].startswith("fail: texts differ only where the batch width")


def test_other_options_of_a_run(cli: Cli) -> None:
    words = ["match", MTP, "--threads", 1, "-n", 12, "--compute", "f32", "--prompts", "python"]
    options = ["--rollback", "checkpoint", "--split", "seq", "--kv", "unified", "--temp", 0.7]
    report = cli(*words, *options, "--steps", "par,seq", "--json").json
    assert report["passed"] and report["all_match"]
    chosen = report["options"]
    assert (chosen["rollback"], chosen["split"], chosen["kv"]) == ("checkpoint", "seq", "unified")
    assert (chosen["spec"]["types"], chosen["parallel"]) == (["draft-mtp"], 4)
    assert [step["kind"] for step in report["steps"]] == ["par", "par", "seq", "seq"]
    plain = cli("match", NO_HEAD, *words[2:], "--spec-type", "none", "--json").json
    assert {step["lane"] for step in plain["steps"]} == {"control"}
    assert plain["passed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No model is given"),
        (["--demo", "--steps", "seq,both"], "The steps seq,both are not a list of seq and par"),
        (["--demo", "--steps", ""], "are not a list of seq and par"),
        ([NO_HEAD], "needs an MTP head"),
        ([MTP, "--spec-type", "draft-simple"], "draft-simple needs a draft model"),
        (["--demo", "--prompts", "nothing"], "nothing cannot be read"),
    ],
)
def test_wrong_usage(cli: Cli, words: list[object], message: str) -> None:
    outcome = cli("match", *words)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err.splitlines()[-1]
