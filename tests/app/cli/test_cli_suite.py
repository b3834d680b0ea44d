"""bench on prompts: the suite, w1 and compare on small models, Ctrl-C, every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.experiments.bench.prompts import read_prompts
from engine.experiments.bench.suite import AGGREGATE_FIELDS, read_result
from engine.options import ROLLBACK_POLICIES
from resources import DEMO_DRAFT, SUITES
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
MTP = DATA / "qwen35-c-v2x-mtp-f32.gguf"
NO_HEAD = DATA / "qwen35-a-f32.gguf"
QUICK = ("--threads", 1, "--compute", "f32", "-n", 6)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.json"
    entries = [{"name": "first", "text": "def f(x):"}, {"name": "second", "text": "class A:"}]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def names(report: dict) -> list[str]:
    return [one["name"] for one in report["configurations"]]


@pytest.mark.repeats("test_every_spec_type_is_a_configuration")
def test_the_demo_measures_every_drafter_on_its_own_prompts(cli: Cli) -> None:
    outcome = cli("bench", "--demo", "--json", *QUICK[:-1], 2)
    assert outcome.status == 0
    report = outcome.json
    assert names(report)[:3] == ["plain", "draft-mtp", "draft-simple"]
    expected = [prompt.name for prompt in read_prompts(SUITES["demo"])]
    for one in report["configurations"]:
        assert [row["name"] for row in one["rows"]] == expected
        assert tuple(one["aggregate"]) == AGGREGATE_FIELDS
        assert one["aggregate"]["total_predicted"] == 16
        assert one["num_same"] == 8
    assert report["complete"]
    assert (report["prompts"], report["compute"]) == ("demo", "f32")
    assert report["model"]["name"] == "demo-target.gguf"
    assert report["environment"]["threads"] == 1
    request = report["configurations"][0]["options"]
    assert (request["sampler"]["temp"], request["sampler"]["seed"]) == (0.0, 42)
    n_requests = 8 * len(report["configurations"])
    assert f"[{n_requests}/{n_requests}]" in outcome.err.splitlines()[-1]


def test_the_table_and_the_result_file(cli: Cli, two: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    words = ["bench", MTP, "--prompts", two, *QUICK, "--spec-type", "draft-mtp", "--out", out]
    outcome = cli(*words)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("qwen35-c-v2x-mtp-f32.gguf, compute f32, 1 thread, ")
    assert sum(line.startswith("Aggregate: {") for line in lines) == 2
    assert [line.split()[0] for line in lines[-2:]] == ["plain", "draft-mtp"]
    assert f"results written to {out}" in outcome.err
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["name"] for row in report["configurations"][1]["rows"]] == ["first", "second"]
    diff = cli("bench", "compare", out, out)
    assert diff.status == 0
    ratios = [line.split()[3] for line in diff.out.splitlines() if line.startswith("first ")]
    assert ratios == ["1.00", "1.00"]
    pairs = cli("bench", "compare", out, out, "--json").json["pairs"]
    assert [pair["a_name"] for pair in pairs] == ["plain", "draft-mtp"]


def test_the_same_command_goes_on_with_a_suite(
    cli: Cli, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.experiments.bench import suite

    measure_request, calls = suite.measure_request, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2 + 3 + 1:  # warm-up, three requests, and no more
            raise KeyboardInterrupt
        return measure_request(*args)

    monkeypatch.setattr(suite, "measure_request", interrupted)
    out = tmp_path / "new" / "out"
    words = ["bench", "suite", MTP, "--prompts", two, *QUICK, "--spec-type", "draft-mtp"]
    outcome = cli(*words, "--out", out)
    assert outcome.status == 130 and "not complete" in outcome.out
    first = json.loads(json.dumps(read_result(out)))
    outcome = cli(*words, "--out", out, "--json")
    assert "3 of 4 requests have results already" in outcome.err
    assert f"results written to {out / 'results.sqlite'}" in outcome.err
    report = outcome.json
    assert report["complete"] and len(calls) == 2 + 3 + 1 + 2 + 1
    rows = [row for one in report["configurations"] for row in one["rows"]]
    assert all(row in rows for row in first["configurations"][0]["rows"])
    assert [row["same"] for row in rows] == [True] * 4
    assert json.loads(json.dumps(read_result(out))) == report
    again = cli(*words, "--out", out)
    assert "[4/4]" not in again.err and again.status == 0
    diff = cli("bench", "compare", out, out / "results.sqlite")
    assert diff.status == 0 and "first " in diff.out
    other = cli(*words[:-1], "none", "--out", out)
    assert other.status == 2 and "Name another folder with --out." in other.err


def test_every_spec_type_is_a_configuration(cli: Cli, two: Path) -> None:
    words = ["bench", "--demo", "--prompts", two, *QUICK, "--json"]
    types = ["--spec-type", "draft-simple,draft-mtp", "--spec-type", "none"]
    report = cli(*words, *types, "--spec-type", "draft-mtp").json
    assert names(report) == ["plain", "draft-simple+draft-mtp", "draft-mtp"]
    assert report["configurations"][1]["options"]["spec"]["types"] == ["draft-simple", "draft-mtp"]
    report = cli("bench", NO_HEAD, "--prompts", two, *QUICK, "--json").json
    assert "draft-mtp" not in names(report) and "draft-simple" not in names(report)


def test_policies_are_compared_on_the_suite(cli: Cli, two: Path) -> None:
    words = ["bench", MTP, "--prompts", two, *QUICK, "--ignore-eos", "--json", "--rollback", "all"]
    report = cli(*words).json
    assert names(report) == ["plain", *(f"draft-mtp {policy}" for policy in ROLLBACK_POLICIES)]
    for one, policy in zip(report["configurations"][1:], ROLLBACK_POLICIES, strict=True):
        assert one["options"]["rollback"] == policy
        assert one["num_same"] == 2


def test_a_repeated_suite_counts_medians(cli: Cli, two: Path) -> None:
    words = ["bench", MTP, "--prompts", two, *QUICK, "--spec-type", "none", "--json"]
    outcome = cli(*words, "--repeat", 3)
    assert outcome.json["repeat"] == 3
    assert outcome.json["configurations"][0]["aggregate"]["n_requests"] == 2
    assert "[6/6]" in outcome.err


def test_ctrl_c_keeps_what_is_done(
    cli: Cli, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.experiments.bench import suite

    measure_request, calls = suite.measure_request, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2 + 3 + 1:  # warm-up, three requests, and no more
            raise KeyboardInterrupt
        return measure_request(*args)

    monkeypatch.setattr(suite, "measure_request", interrupted)
    out = tmp_path / "part.json"
    words = ["bench", MTP, "--prompts", two, *QUICK, "--spec-type", "draft-mtp"]
    outcome = cli(*words, "--out", out)
    assert outcome.status == 130
    assert outcome.err.endswith("draftscope: interrupted\n")
    assert outcome.out.endswith("not complete: the suite was stopped\n")
    report = json.loads(out.read_text(encoding="utf-8"))
    assert not report["complete"]
    # the second prompt begins with the drafter: its row has nothing to be compared with
    assert [len(one["rows"]) for one in report["configurations"]] == [1, 2]
    assert report["configurations"][1]["rows"][1]["speed_up"] is None
    assert cli("bench", "compare", out, out).status == 0


def test_nothing_is_printed_or_written_where_nothing_was_done(
    cli: Cli, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.experiments.bench.suite.measure_request", interrupted)
    out = tmp_path / "none.json"
    outcome = cli("bench", MTP, "--prompts", two, *QUICK, "--out", out)
    assert (outcome.status, outcome.out) == (130, "")
    assert not out.exists()


def test_the_conversation_of_the_demo(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "w1.json"
    words = ["bench", "w1", "--demo", "--spec-type", "draft-mtp", *QUICK, "--out", out]
    outcome = cli(*words, "--rollback", "checkpoint")
    assert outcome.status == 0
    assert "draft-mtp: 4 of 4 answers are the same as in plain decoding" in outcome.out
    report = json.loads(out.read_text(encoding="utf-8"))
    assert names(report) == ["plain", "draft-mtp"]
    for one in report["configurations"]:
        turns = one["turns"]
        prompts = [turn["prompt_tokens"] for turn in turns]
        assert prompts == sorted(prompts) and len(turns) == 4
        assert [turn["cache_n"] > 0 for turn in turns] == [False, True, True, True]
        assert all(turn["duplicate_cells"] == 0 for turn in turns)
        assert all(turn["cache_n"] + turn["prompt_n"] == turn["prompt_tokens"] for turn in turns)
        assert one["totals"]["tokens"] == 24
        assert one["totals"]["accepted"] + one["totals"]["rejected"] == one["totals"]["drafted"]
    header = next(line for line in outcome.out.splitlines() if line.startswith("turn "))
    table = [line for line in outcome.out.splitlines() if line.startswith(("quicksort", "tests"))]
    assert len({len(line) for line in [header, *table]}) == 1
    assert cli("bench", "compare", out, out).status == 2  # no suite


def test_the_cache_of_the_conversation(cli: Cli) -> None:
    words = ["bench", "w1", "--demo", "--spec-type", "draft-mtp", *QUICK, "--json"]
    report, control = (
        cli(*words, "-ctxcp", 5, "-cms", 7).json,
        cli(*words, "--no-cache-prompt").json,
    )
    assert report["cache"] == {"ctx_checkpoints": 5, "checkpoint_min_step": 7}
    assert cli(*words, "--cache-prompt").json["cache"]["ctx_checkpoints"] == 32
    assert control["cache"] is None
    for one, other in zip(report["configurations"], control["configurations"], strict=True):
        assert [turn["text"] for turn in one["turns"]] == [turn["text"] for turn in other["turns"]]
        assert one["totals"]["cache_n"] > 0 == other["totals"]["cache_n"]
        assert one["totals"]["accepted"] == other["totals"]["accepted"]


def test_ctrl_c_keeps_the_turns_that_are_done(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.experiments.bench import request as workload

    measure_request, calls = workload.measure_request, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure_request(*args)

    monkeypatch.setattr(workload, "measure_request", interrupted)
    outcome = cli("bench", "w1", "--demo", *QUICK, "--json")
    assert outcome.status == 130
    assert not outcome.json["complete"]
    assert [len(one["turns"]) for one in outcome.json["configurations"]][:2] == [3, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MTP, "--spec-type", "draft-simple"], "draft-simple needs a draft model"),
        ([MTP, "--spec-type", "drft"], "--spec-type drft is unknown"),
        ([NO_HEAD, "--spec-type", "draft-mtp"], "needs an MTP head"),
        ([MTP, "--prompts", "no-such-set"], "no-such-set cannot be read"),
        ([MTP, "--out", "no/such/folder/x.json"], "--out no/such/folder/x.json cannot be written"),
        (["w1", "--demo", "--ctx-checkpoints", -1], "--ctx-checkpoints is negative"),
        (["w1", "--demo", "--no-cache-prompt", "-cms", 1], "has no effect without a prompt cache"),
        (["compare", "pyproject.toml", "pyproject.toml"], "is not a result file"),
        (["--demo", "-n", 0], "-n is 0"),
    ],
    ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, list) else "",
)
def test_wrong_usage(cli: Cli, words: list[object], message: str) -> None:
    outcome = cli("bench", *words)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in outcome.err.splitlines()[-1]


@pytest.mark.parametrize("words", [["bench"], ["bench", "w1"], ["match"]], ids=" ".join)
def test_chat_needs_a_template(cli: Cli, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.session.ChatTemplate.from_gguf", lambda file: None)
    outcome = cli(*words, MTP, *QUICK, "--chat")
    assert (outcome.status, outcome.out) == (2, "")
    assert "The model has no chat template" in outcome.err


def test_a_conversation_in_the_models_template(cli: Cli) -> None:
    words = ["bench", "w1", MTP, "--prompts", "python", *QUICK, "--spec-type", "none", "--json"]
    plain, chat = cli(*words).json, cli(*words, "--chat").json
    assert (plain["chat"], chat["chat"]) == (False, True)
    lengths = [
        [turn["prompt_tokens"] for turn in report["configurations"][0]["turns"]]
        for report in (plain, chat)
    ]
    assert all(long > short for short, long in zip(*lengths, strict=True))


def test_a_draft_model_beside_the_target_is_used(cli: Cli, two: Path) -> None:
    words = ["bench", "-m", DEMO_DRAFT, "-md", DEMO_DRAFT, "--prompts", two, *QUICK, "--json"]
    assert "draft-simple" in names(cli(*words).json)


def test_slots_side_by_side(cli: Cli, two: Path) -> None:
    outcome = cli(
        "bench",
        "slots",
        MTP,
        "--slots",
        "1,3",
        "--spec-type",
        "draft-mtp",
        "--prompts",
        two,
        "--json",
        "--repeat",
        2,
        *QUICK,
    )
    assert outcome.status == 0
    rows = outcome.json["rows"]
    assert [(row["configuration"], row["n_slots"]) for row in rows] == [
        ("plain", 1),
        ("plain", 3),
        ("draft-mtp", 1),
        ("draft-mtp", 3),
    ]
    assert [row["predicted_n"] for row in rows] == [6, 18, 6, 18]
    for one, three in (rows[:2], rows[2:]):
        assert one["ratio"] == 1
        assert three["ratio"] == three["tokens_per_second"] / one["tokens_per_second"]
    assert rows[0]["acceptance"] is None
    assert 0 <= rows[2]["acceptance"] <= 1


def test_slots_that_cannot_be(cli: Cli) -> None:
    outcome = cli("bench", "slots", MTP, "--slots", 65)
    assert outcome.status == 2
    assert "--slots 65 is above 64." in outcome.err


def test_recording_as_table_and_json(cli: Cli, two: Path) -> None:
    words = [
        "bench",
        "recording",
        MTP,
        "--spec-type",
        "draft-mtp",
        "--prompts",
        two,
        *QUICK,
        "--repeat",
        3,
    ]
    outcome = cli(*words, "--json")
    assert outcome.status == 0
    report = outcome.json
    assert (report["complete"], report["repeat"], report["prompt"]) == (True, 3, "first")
    assert names(report) == ["plain", "draft-mtp"]
    for one in report["configurations"]:
        assert one["options"]["ignore_eos"]
        assert [run["predicted_n"] for run in one["runs"]] == [6, 6, 6]
        shares = [run["share"] for run in one["runs"]]
        assert shares == [run["recording_s"] / run["wall_s"] for run in one["runs"]]
        assert 0 < min(shares) <= max(shares) < 1
        assert one["median_share"] == sorted(shares)[1]
    assert "[6/6] draft-mtp: " in outcome.err.splitlines()[-1]
    lines = cli(*words).out.splitlines()
    assert lines[1] == "one prompt: first"
    found = [line.split()[:2] for line in lines[4:-2]]
    assert found == [
        [name, row] for name in ("plain", "draft-mtp") for row in ("1", "2", "3", "median")
    ]
    # a column is as wide as its widest cell, so that the table stays straight
    assert len({len(line) for line in lines[3:-2]}) == 1


def test_every_policy_of_recording_is_a_configuration(cli: Cli, two: Path) -> None:
    words = ["bench", "recording", MTP, "--rollback", "ring,replay", "--prompts", two, *QUICK]
    report = cli(*words, "--json").json
    assert names(report) == ["plain", "draft-mtp ring", "draft-mtp replay"]
    assert [len(one["runs"]) for one in report["configurations"]] == [7, 7, 7]
