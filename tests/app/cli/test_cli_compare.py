"""compare: the table, JSON and trace of real comparisons, exit statuses, every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.verdict import judge
from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.clean import PASSED, passed
from tests.support.fake_llama import without_packages

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
MTP = DATA / "qwen35-c-v2x-mtp-f32.gguf"
PLAIN = DATA / "qwen35-a-f32.gguf"
QUICK = ("--tokens", "5,6,7,8", "-n", 30, "--ignore-eos", "--compute", "f32", "--threads", 1)
FAULTY = "planes,fault=no-conv-rollback"


def test_the_default_lanes_as_a_table(cli: Cli) -> None:
    outcome = cli("compare", MTP, *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    first, _, heads, *lanes = outcome.out.splitlines()
    assert first.startswith("30 tokens, bound on the NMSE of the logits ")
    assert 1e-9 <= float(first.split()[-1]) < 1e-7
    assert heads.split()[:3] == ["lane", "verdict", "band"]
    verdicts = [[line.split()[0], passed(line.split()[1])] for line in lanes[:4]]
    assert verdicts == [
        ["reference", "reference"],
        ["noise", "passed"],
        ["checkpoint", "passed"],
        ["planes", "passed"],
    ]
    assert len({len(line) for line in [heads, *lanes[:4]]}) == 1


def test_a_wrong_state_is_exit_status_1(cli: Cli) -> None:
    outcome = cli("compare", MTP, *QUICK, "--lane", "ring", "--lane", FAULTY, "--json")
    assert outcome.status == 1
    report = outcome.json
    names = {"lanes", "bound", "cost", "noise_checks", "states", "sequences", "options", "findings"}
    assert set(report) == names
    lanes = {lane["lane"]: lane for lane in report["lanes"]}
    assert list(lanes) == ["reference", "noise", "ring", FAULTY]
    drift = report["states"][FAULTY]
    assert max(max(one["state_error"]) for one in drift) == lanes[FAULTY]["state_error"]
    assert [passed(lane["verdict"]) for lane in lanes.values()] == [
        "reference",
        "passed",
        "passed",
        "suspect",
    ]
    assert lanes[FAULTY]["first_round"] == lanes[FAULTY]["after_round"] + 1
    assert report["options"]["spec"]["types"] == ["draft-mtp"]
    (plain,) = cli("run", MTP, *QUICK, "--json").json["sequences"]
    names = ("prompt_tokens", "tokens", "text")
    assert report["sequences"] == [{name: plain[name] for name in names}]
    assert plain["prompt_tokens"] == [5, 6, 7, 8]


def test_several_prompts_with_scripted_drafts(cli: Cli) -> None:
    words = (*QUICK[2:], "--spec-draft-n-max", 4, "--draft-accept", "0,3", "--lane", "ring,free")
    prompts = ("--tokens", "5,6,7,8", "--tokens", "9,8,7")
    both = cli("compare", MTP, *prompts, *words, "--json")
    assert (both.status, both.err) == (0, "")
    report = both.json
    assert [s["prompt_tokens"] for s in report["sequences"]] == [[5, 6, 7, 8], [9, 8, 7]]
    assert [lane["n_positions"] for lane in report["lanes"]] == [0, 60, 60]
    assert (report["options"]["parallel"], report["options"]["spec"]["types"]) == (2, [])
    one_by_one = cli("compare", MTP, *prompts, *words, "--json", "--parallel", 1).json
    assert one_by_one["sequences"] == report["sequences"]
    assert "60 tokens, bound" in cli("compare", MTP, *prompts, *words).out


def test_the_table_names_modes_and_forks(cli: Cli) -> None:
    fork = "planes,free,fault=plane-off-by-one"
    outcome = cli("compare", MTP, *QUICK, "--lane", "planes,compute=int8", "--lane", fork)
    assert outcome.status == 1
    lines = outcome.out.splitlines()
    assert any(line.split()[:2] == ["reference,compute=int8", "mode"] for line in lines)
    clean = next(line for line in lines if line.split()[:1] == ["planes,compute=int8"])
    assert clean.split()[1] in PASSED
    assert any(line.startswith("planes,compute=int8: bound ") for line in lines)
    (told,) = [line for line in lines if line.startswith(f"{fork} forked: sequence 0, position ")]
    assert "after the rollback of round" in told and "top-2 gap" in told


def test_the_peer_lane_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    outcome = cli("compare", MTP, *QUICK, "--lane", "peer")
    assert outcome.status == 2
    assert "pip install xllamacpp" in outcome.err


def test_a_bound_decides_the_exit_status(cli: Cli) -> None:
    # passes of more than eight tokens, which do not sum in the order of one
    words = ["compare", MTP, *QUICK, "--spec-draft-n-max", "12", "--lane", "planes"]
    assert cli(*words, "--bound", "1e-20").status == 1
    assert cli(*words, "--bound", "1e-6").status == 0
    assert cli(*words[:-1], FAULTY, "--bound", "100").status == 0


def test_a_lane_that_had_to_stop_says_why(cli: Cli) -> None:
    lane = "checkpoint,fault=keep-stale-kv"
    outcome = cli("compare", MTP, *QUICK, "-c", 44, "--lane", lane)
    assert outcome.status == 1
    assert f"{lane} stopped: Sequence 0 has" in outcome.out


def test_the_trace_holds_every_lane(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("compare", MTP, *QUICK, "--lane", FAULTY, "--json", "--trace", tmp_path / "out")
    assert outcome.status == 1
    assert f"trace written to {tmp_path / 'out'}" in outcome.err
    store = open_trace(tmp_path / "out")
    assert [run["lane"] for run in store.runs.values()] == ["reference", "noise", FAULTY]
    assert set(store.divergence.texts("lane")) == {"noise", FAULTY}
    assert len(store.divergence) == 60
    again = judge(store, 2, outcome.json["bound"])
    assert again.first_pos == outcome.json["lanes"][2]["first_pos"]
    assert np.isfinite(store.divergence.column("nmse")).all()


def test_a_draft_model_drafts(cli: Cli) -> None:
    outcome = cli("compare", "--demo", "-md", DEMO_DRAFT, *QUICK, "--json")
    assert outcome.status == 0
    assert outcome.json["options"]["spec"]["types"] == ["draft-simple"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--lane", "planes,split=diagonal"], "Lane 'planes,split=diagonal'"),
        (["--lane", "gdn"], "'gdn' is not a rollback policy"),
        (["--lane", "ring", "--lane", "ring"], "Lane 'ring' is given twice"),
        (["--bound", "-1"], "--bound is negative"),
        (["--bound", "much"], "is not a finite number"),
        (["--spec-type", "none"], "No drafter is chosen"),
        (["--spec-type", "draft-simple"], "draft-simple needs a draft model"),
        (["--draft-accept", "1,x"], "is not a list of whole numbers"),
        (["--draft-accept", "4"], "is not within drafts of 3"),
        (["--draft-accept", "1", "--spec-type", "draft-mtp"], "and a drafter are both given"),
        (["--parallel", "0"], "is not a whole number of 1 or more"),
        (["--lane", "planes,compute=fp8"], "compute 'fp8' is unknown"),
        (["--rollback", "planes"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_compared_is_wrong_usage(cli: Cli, words: list[str], what: str) -> None:
    outcome = cli("compare", MTP, *QUICK, *words)
    assert outcome.status == 2
    assert what in outcome.err
    assert outcome.out == ""


def test_no_prompt_no_model_no_head(cli: Cli) -> None:
    assert "There is no prompt" in cli("compare", MTP).err
    assert "No model is given" in cli("compare", "-p", "x").err
    outcome = cli("compare", PLAIN, *QUICK)
    assert outcome.status == 2
    assert "has no MTP block" in outcome.err and "--draft-accept 0,3,1" in outcome.err
    assert cli("compare", PLAIN, *QUICK, "--draft-accept", "0,3,1").status == 0


def test_a_fault_that_changes_nothing_is_named(cli: Cli) -> None:
    idle, acts = "planes,fault=stale-plane", FAULTY
    outcome = cli("compare", MTP, *QUICK, "--lane", idle, "--lane", acts)
    said = [line for line in outcome.out.splitlines() if "its fault never had an effect" in line]
    assert [line.partition(": ")[0] for line in said] == [idle]
