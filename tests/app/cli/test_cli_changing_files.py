"""Model files that are cut short, written over, replaced or removed while a command uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.changing_files import CASES, PARTS, ROUND

DIFFERS, CHANGED = "info: model-file-differs", "error: model-file-changed"
linux = pytest.mark.skipif(sys.platform != "linux", reason="bus errors are caught on Linux")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of every case, all in one process: each opens models after the one before."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.changing_files", tmp_path_factory.mktemp("m") / "x"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == len(CASES), (done.returncode, done.stderr)
    return {line["name"]: line for line in lines}


def text(case: dict[str, Any]) -> str:
    """What a run printed before its findings and figures."""
    return str(case["out"]).split("\n\n")[0]


def findings(case: dict[str, Any]) -> list[str]:
    lines = str(case["out"]).splitlines()
    return [line for line in lines if line.startswith(("error:", "warning:", DIFFERS))]


@pytest.mark.parametrize("name", ["cut", "halved", "rewritten", "draft cut", "part cut"])
def test_copied_weights_are_safe_from_a_file_that_is_written_to(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    case = found[name]
    assert case["status"] == 0
    assert text(case) == text(found["plain"])
    assert [line.split(":")[1].split(" (")[0] for line in findings(case)] == [" model-file-differs"]
    assert f"(round {ROUND})" in findings(case)[0]
    assert CASES[name].file in findings(case)[0]
    (facts,) = case["runs"]
    assert facts["mmap"] is False


@pytest.mark.parametrize("name", ["replaced", "removed", "mapped replaced", "mapped removed"])
def test_a_file_that_is_replaced_or_removed_does_no_harm(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    case = found[name]
    assert case["status"] == 0
    assert text(case) == text(found["plain"])
    assert len(findings(case)) == ("replaced" in name)
    assert all(line.startswith(DIFFERS) for line in findings(case))
    (facts,) = case["runs"]
    assert facts["mmap"] is ("mapped" in name)


@linux
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mapped cut", "model.gguf"),
        ("mapped halved", "model.gguf"),
        ("mapped draft cut", "draft.gguf"),
        ("mapped part cut", PARTS[1]),
        ("mapped turns cut", "model.gguf"),
        ("mapped compare cut", "model.gguf"),
        ("mapped bench cut", "model.gguf"),
    ],
)
def test_a_mapped_file_that_is_cut_short_ends_the_run_with_a_sentence(
    found: dict[str, dict[str, Any]], name: str, file: str
) -> None:
    case = found[name]
    assert case["status"] == 1
    last = case["err"].splitlines()[-1]
    assert last.startswith(f"draftscope: error: {file}: file: was cut short while")
    if "run" in CASES[name].args:
        if "--turns" not in CASES[name].args:
            assert text(found["plain"]).startswith(text(case)), "no token of that pass is shown"
        assert f"The file {file} changed" in case["findings"]
        assert case["rounds"] == ROUND + 1
        (facts,) = case["runs"]
        assert facts["stops"] and facts["mmap"] is True


def test_weights_that_are_written_over_where_they_are_mapped_are_a_finding(
    found: dict[str, dict[str, Any]],
) -> None:
    case = found["mapped rewritten"]
    assert case["status"] == 0
    assert findings(case)[0].startswith(f"{CHANGED} (round {ROUND}): The file model.gguf changed")
    (facts,) = case["runs"]
    assert facts["file_changes"] == [
        {"file": "model.gguf", "change": "written", "mapped": True, "round": ROUND, "after": None}
    ]


def test_lanes_of_a_comparison_are_safe_and_say_so(found: dict[str, dict[str, Any]]) -> None:
    plain, cut = found["compare plain"], found["compare cut"]
    assert plain["status"] == cut["status"] == 0
    assert len({facts["mmap"] for facts in cut["runs"]}) == 1
    assert any(line.startswith(DIFFERS) for line in findings(cut))
    assert not any(line.startswith(CHANGED) for line in findings(cut))
    rewritten = found["mapped compare rewritten"]
    assert rewritten["status"] == 1 or any(line.startswith(CHANGED) for line in findings(rewritten))


def test_figures_of_a_benchmark_are_right_or_refused(found: dict[str, dict[str, Any]]) -> None:
    assert found["bench cut"]["status"] == 0
    refused = found["mapped bench rewritten"]
    assert refused["status"] == 1
    assert "model.gguf: file: has changed since it was opened." in refused["err"]


def test_every_turn_of_a_conversation_is_answered(found: dict[str, dict[str, Any]]) -> None:
    case = found["turns cut"]
    assert case["status"] == 0
    assert len(case["runs"]) == 3
    assert not any(line.startswith("error") for line in findings(case))


@pytest.mark.parametrize("name", ["loading cut", "loading rewritten", "mapped loading cut"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    assert found[name]["status"] == 1
    assert found[name]["err"].splitlines()[-1] == (
        "draftscope: error: model.gguf: file: has changed while it was being read. Open it again "
        "when it is complete."
    )


@pytest.mark.parametrize("name", ["loading replaced", "hashing cut", "plain at the end"])
def test_the_run_goes_on_as_if_nothing_had_happened(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    assert found[name]["status"] == 0
    assert text(found[name]) == text(found["plain"])
    if name == "hashing cut":
        (facts,) = found[name]["runs"]
        assert facts["model"]["content"] is None
