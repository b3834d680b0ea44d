"""`draftscope memory`: bundled and own scripts, the table, the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.__main__ import main
from resources import MEMORY_SCRIPTS
from tests.support.fake_llama import FakeLlama, use
from tests.support.golden_runs import session

MODEL = str(Path(__file__).resolve().parents[2] / "data" / "qwen35-a-f32.gguf")
GOOD = "context A\ncontext B\ndecode A 0: 1 2\ndecode B 0: 1 2\ncheck A 0 0:2 = B 0 exact\n"


def test_all_scripts_over_a_policy(capsys, tmp_path):
    folder = str(tmp_path / "t")
    status = main(["memory", "--all", "-m", MODEL, "--rollback", "ring", "--trace", folder])
    out = capsys.readouterr().out
    assert status == 0
    assert "12 of 12 passed" in out
    assert [line.split()[2] for line in out.splitlines()[1:10]] == ["passed"] * 9
    assert (tmp_path / "t" / "divergence.csv").read_text().count("ring B") >= 6


def test_a_script_of_ones_own_that_fails(capsys, tmp_path):
    path = tmp_path / "mine.memory"
    path.write_text(GOOD + "expect A 0 pos=7\n")
    assert main(["memory", str(path), MODEL, "--rollback", "ring,planes"]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 passed" in out
    assert "mine, ring, line 6: expect A 0 pos=7: pos is 1, not 7" in out


def test_json(capsys, tmp_path):
    path = tmp_path / "mine.memory"
    path.write_text("policies ring\n" + GOOD)
    assert main(["memory", str(path), "-m", MODEL, "--json", "--fill", "3E"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compute"] == "f32"
    verdicts = {row["policy"]: row["verdict"] for row in found["scripts"]}
    assert verdicts.pop("ring") == "passed"
    assert set(verdicts.values()) == {"not for this policy"}


def test_list_needs_no_model(capsys):
    assert main(["memory", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == sorted(path.stem for path in MEMORY_SCRIPTS.glob("*.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", MODEL], "No script is given."),
        (["--all"], "No model is given."),
        (["--all", "tests"], "tests is not a regular file but a folder. Name a file in it."),
        (["nothing-here", "-m", MODEL], "no script 'nothing-here'. Name a file, or one of 1-save"),
        (["idle-neigh", "-m", MODEL], "Name a file, or one of 12-idle-neighbours."),
        (["--all", "-m", MODEL, "--rollback", "spiral"], "'spiral' is not one of planes, carry"),
    ],
)
def test_wrong_usage(capsys, arguments, message):
    assert main(["memory", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_script_is_one_sentence_with_file_and_line(capsys, tmp_path):
    path = tmp_path / "bad.memory"
    path.write_text("context A\nseq_rm A 0 few\n")
    assert main(["memory", str(path), "-m", MODEL]) == 2
    error = capsys.readouterr().err
    assert "bad.memory, line 2: 'few' is not a whole number. Correct that line;" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.thinned(4)
def test_llama_cpp_plays_what_its_interface_has(monkeypatch, capsys, refuses):
    """A build that accepts what it should refuse fails the scripts that expect a refusal."""
    use(monkeypatch, FakeLlama(session("qwen35-a-f32"), refuses=refuses))
    words = ["memory", "--all", "-m", MODEL, "--engine", "llama.cpp", "--json"]
    assert main(words) == (0 if refuses else 1)
    scripts = json.loads(capsys.readouterr().out)["scripts"]
    verdicts = {one["script"]: one["verdict"] for one in scripts if one["policy"] == "planes"}
    failed = {name for name, verdict in verdicts.items() if verdict == "failed"}
    assert failed == (set() if refuses else {"6-active-gap", "8-depth-bookkeeping"})
    assert list(verdicts.values()).count("passed") + len(failed) == 10
    (why,) = {one["why_not"] for one in scripts if "fault=stale-plane" in one.get("why_not", "")}
    assert "which llama.cpp does not support" in why


@pytest.mark.parametrize("words", [("--rollback", "ring"), ("--trace", "t"), ("--fill", "00")])
def test_llama_cpp_has_two_policies_and_records_nothing(capsys, words):
    assert main(["memory", "--all", "-m", MODEL, "--engine", "llama.cpp", *words]) == 2
    assert "choose from planes, checkpoint" in capsys.readouterr().err
