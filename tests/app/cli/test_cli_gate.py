"""check-rollback as a gate: what is new since a baseline, for machines and for reviewers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from app.__main__ import main
from resources import ROOT
from tests.support.fake_llama import FakeLlama, use, with_scripts
from tests.support.golden_runs import DATA, MTP_MODELS, session

MODEL = str(DATA / f"{MTP_MODELS[0]}.gguf")
SCRIPT = "checkpoint-and-slot-file"
# the scenario with lanes of every kind
SHORT = ("--depths", "2", "-n", "5", "--only", "every depth", "--only", SCRIPT)
ACTION = ROOT / "ci" / "check-rollback"


@pytest.fixture(autouse=True)
def few_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_scripts(monkeypatch, SCRIPT)


def check(*args: str) -> int:
    return main(["check-rollback", MODEL, *SHORT, *args])


def result_of(monkeypatch: pytest.MonkeyPatch, path: Path, **wrong: float | bool) -> Path:
    """What --json prints for a double that is wrong in this way."""
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), **wrong))  # type: ignore[arg-type]
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        check("--json")
    return path


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("baselines")
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_scripts(monkeypatch, SCRIPT)
        return {
            "drifts": result_of(monkeypatch, folder / "drifts.json", drift=0.01),
            "as-0c1e570": result_of(monkeypatch, folder / "known.json"),
            "mended": result_of(monkeypatch, folder / "mended.json", refuses=True),
        }


def test_only_what_is_new_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    baselines: dict[str, Path],
) -> None:
    files = ("--junit", str(tmp_path / "gate.xml"), "--markdown", str(tmp_path / "gate.md"))
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), drift=0.01))
    assert check("--baseline", str(baselines["drifts"]), *files) == 0
    assert "0 new failures, 0 fixed" in capsys.readouterr().out
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert (suite.get("failures"), suite.get("tests")) == ("0", str(len(suite.findall("testcase"))))
    assert check("--baseline", str(baselines["as-0c1e570"]), *files) == 1
    assert " new failures, 0 fixed" in capsys.readouterr().out
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    failed = [case.get("name", "") for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.get("failures", "0")) > 0
    assert all("checkpoint" in name for name in failed)
    summary = (tmp_path / "gate.md").read_text()
    assert len([line for line in summary.splitlines() if line]) == 5
    assert f"{len(failed)} new failures" in summary and "`llama.cpp 0.0-fake`" in summary


def test_a_known_defect_that_is_back_is_new_and_one_that_is_gone_is_fixed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    baselines: dict[str, Path],
) -> None:
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0])))
    assert check("--baseline", str(baselines["mended"]), "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["new"]) == 2
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), refuses=True))
    assert check("--baseline", str(baselines["as-0c1e570"])) == 0
    assert "0 new failures, 2 fixed" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"lanes": [{"name": 1}]}', '{"lanes": []}'])
def test_what_is_no_baseline_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before.json").write_text(text)
    assert check("--baseline", str(tmp_path / "before.json")) == 2
    assert "draftscope check-rollback MODEL --llama-cpp BUILD --json" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
def test_the_steps_of_the_action(tmp_path: Path, status: int) -> None:
    """Run by its own `run` lines in a clean folder, with a command in place of the program."""
    program = tmp_path / "draftscope"
    program.write_text(
        "#!/bin/sh\n"
        'printf "%s\\n" "$@" > "$RUNNER_TEMP/words"\n'
        'echo "**Summary**" > "$RUNNER_TEMP/rollback/summary.md"\n'
        "echo '{}'\n"
        f"exit {status}\n"
    )
    program.chmod(0o755)
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    inputs = {name: one["default"] for name, one in action["inputs"].items()}
    inputs |= {"command": str(program), "options": "-ngl 99 -fa on", "baseline": "before.json"}
    env = os.environ | {
        "GITHUB_ACTION_PATH": str(ACTION),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "RUNNER_TEMP": str(tmp_path / "temp"),
    }
    for step in action["runs"]["steps"]:
        if "inputs.command == ''" in step.get("if", ""):
            continue
        named = {
            name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, value in step["env"].items()
        }
        words = ["sh", "-e", "-c", step["run"]]
        done = subprocess.run(words, env=env | named, cwd=tmp_path, check=False)
    assert done.returncode == status
    folder = tmp_path / "temp" / "rollback"
    given = (tmp_path / "temp" / "words").read_text().split()
    assert given == [
        *("check-rollback", "--demo", "--llama-cpp", "build", "--json"),
        *("--junit", f"{folder}/junit.xml", "--markdown", f"{folder}/summary.md"),
        *("--baseline", "before.json", "-ngl", "99", "-fa", "on"),
    ]
    outputs = dict(line.split("=") for line in (tmp_path / "output").read_text().splitlines())
    assert outputs == {"result": f"{folder}/result.json", "junit": f"{folder}/junit.xml"}
    assert (tmp_path / "summary").read_text() == "**Summary**\n"
    assert (folder / "result.json").read_text() == "{}\n"
