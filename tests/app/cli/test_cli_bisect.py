"""`draftscope bisect` on a repository whose library is a text, copied by CMake."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.compare.rollback_outcomes import RIGHT, WRONG
from engine.experiments.bisect import builds as judge
from engine.experiments.bisect.builds import LIBRARY, CMakeBuilds, SkippedError
from engine.experiments.bisect.history import chosen, commits

Cli = Callable[..., Any]
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("git", "cmake", "ninja"))), reason="needs git, cmake and ninja"
)
PROJECT = f"""cmake_minimum_required(VERSION 3.14)
project(fake LANGUAGES NONE)
file(GLOB sources ${{CMAKE_SOURCE_DIR}}/*.txt)
add_custom_command(OUTPUT bin/{LIBRARY} DEPENDS ${{CMAKE_SOURCE_DIR}}/code
  COMMAND sh ${{CMAKE_SOURCE_DIR}}/compile ${{CMAKE_SOURCE_DIR}}/code bin/{LIBRARY})
add_custom_target(llama DEPENDS bin/{LIBRARY})
"""
COMPILE = "! grep -q syntax $1 || { echo 'code:1: error: no such word'; exit 1; }\ncp $1 $2\n"


def git(repo: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", *settings, "-C", str(repo), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine commits: the third and fourth do not build, the sixth breaks "one", the eighth mends
    "two"; a hook would stop every checkout."""
    folder = tmp_path_factory.mktemp("clone")
    git(folder, "init", "-q")
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "compile").write_text(COMPILE)
    (folder / "llama.h").write_text("// none\n")
    for i in range(1, 10):
        words = ["right", "syntax"][i in (3, 4)], "one" if i >= 6 else "", "two" if i < 8 else ""
        (folder / "code").write_text(f"{i} {' '.join(words)}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"change {i} | \x1b[31mred")
        git(folder, "tag", f"c{i}")
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    return folder


JUDGE = f"sh -c '! grep -q one {{}}/lib/{LIBRARY}'"


def bisect(repo: Path, work: Path, *words: str) -> list[str]:
    ends = ("--good", "c1", "--bad", "c9", "--repo", str(repo), "--work", str(work))
    return ["bisect", *ends, "--judge-command", JUDGE, *words]


def test_the_commit_is_found_and_the_clone_left_alone(repo: Path, tmp_path: Path, cli: Cli) -> None:
    before = git(repo, "status", "--porcelain"), git(repo, "rev-parse", "HEAD")
    work, page = tmp_path / "work", tmp_path / "page.md"
    found = cli(*bisect(repo, work, "--json", "--markdown", str(page)))
    assert found.status == 0, found.err
    [fault] = found.json["faults"]
    assert [one["key"] for one in fault["suspects"]] == [git(repo, "rev-parse", "c6")]
    assert fault["is_sure"] and fault["checks"] == {judge.OWN: [WRONG, ""]}
    assert (git(repo, "status", "--porcelain"), git(repo, "rev-parse", "HEAD")) == before
    skipped = [one["skipped"] for one in found.json["judged"] if one["skipped"]]
    assert all(text == "does not build: code:1: error: no such word" for text in skipped)
    text = page.read_text()
    assert "change 6 \\|" in text and "Again: `draftscope bisect --good c1" in text
    again = cli(*bisect(repo, work))
    assert "verdicts are known from an earlier search" in again.err
    short = git(repo, "rev-parse", "--short=9", "c6")
    assert f"{short} change 6 | \\x1b[31mred" in again.out
    assert {path.name[:9] for path in work.glob("kept-*/*")} == {
        short,
        git(repo, "rev-parse", "--short=9", "c5"),
    }
    [kept] = work.glob(f"kept-*/{short}*")
    assert (kept / "include" / "llama.h").is_file()


def test_a_relative_work_folder_is_not_one_of_the_clone(
    repo: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = ("--good", "c5", "--bad", "c6", "--repo", repo, "--work", "work")
    found = cli("bisect", *ends, "--judge-command", JUDGE)
    assert found.status == 0, found.err
    assert (tmp_path / "work" / "tree" / "code").is_file() and not (repo / "work").exists()


def test_an_end_that_cannot_be_judged_is_one_sentence(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / LIBRARY).touch()
    build = tmp_path / ("b" * 70)
    build.symlink_to(".")
    words = ("bisect", "--work", tmp_path / "w", "--builds", build, build)
    found = cli(*words, "--judge-command", "sh -c 'echo Not here. >&2; exit 125'")
    assert found.status == 1 and "cannot be tested: Not here. Choose another commit" in found.err
    assert f"…{'b' * 59}  cannot be" in found.err


def test_a_reason_keeps_its_quotation_marks(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('CMake Error: The source directory "/ab/tree" is not there\n')
    assert judge._why(tmp_path / "log") == 'CMake Error: The source directory "tree" is not there'


def test_commits_and_ranges_of_them(repo: Path, tmp_path: Path) -> None:
    history, note = commits(repo, "c2", "c9")
    assert (len(history), note) == (8, "")
    assert [one.title[:8] for one in history.revisions] == [f"change {i}" for i in range(2, 10)]
    assert chosen(repo, history, ["c3", "c5..c7"]) == {1, 4, 5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repo", "{repo}", "--good", "c1", "--bad", "no"], "has no commit 'no'"),
        (["--repo", "{repo}", "--good", "c9", "--bad", "c1"], "c1 is an ancestor of c9"),
        (["--repo", "{work}", "--good", "c1", "--bad", "c9"], "git rev-parse fails in"),
        (["--repo", "{work}/no", "--good", "c1", "--bad", "c9"], "There is no folder"),
        (["--repo", "{repo}", "--good", "--x", "--bad", "c9"], "expected one argument"),
        (["--repo", "{repo}", "--good", "c1"], "--good and --bad are commits of a repository"),
        (["--good", "c1", "--bad", "c9"], "No commits or builds to search are given"),
        (
            ["--builds", "{work}", "{work}", "--target", "x"],
            "--target has no effect without --repo",
        ),
        (["--builds", "{work}", "{work}", "-j", "2"], "-j has no effect without --repo"),
        (["--builds", "{work}", "{work}", "--skip", "c1"], "--skip has no effect without --repo"),
        (
            ["--builds", "{work}", "{work}", "--cmake-args=-DX=1"],
            "--cmake-args has no effect without --repo",
        ),
        (["--builds", "{work}"], "At least two builds are needed"),
        (["--builds", "{work}", "{work}/no"], "There is no build at"),
        (["--builds", "{work}", "{work}", "--judge-command", "'"], "Close the quotation"),
        (["--builds", "{work}", "{work}", "--judge-command", ""], "--judge-command is empty"),
        (
            ["--builds", "{work}", "{work}", "--demo", "--judge", "run"],
            "cannot be tested with 'run'",
        ),
    ],
)
def test_wrong_usage(repo: Path, tmp_path: Path, cli: Cli, words: list[str], message: str) -> None:
    given = [word.format(repo=repo, work=tmp_path) for word in words]
    if "--demo" not in given and "--judge-command" not in given:
        given += ["--judge-command", "true"]
    outcome = cli("bisect", *given, "--work", str(tmp_path / "work"))
    assert outcome.status == 2, outcome.err
    assert message in outcome.err


def test_builds_in_a_row_and_the_words_of_a_judge(tmp_path: Path, cli: Cli) -> None:
    for i, text in enumerate(("right", "right", "wrong", "wrong")):
        (tmp_path / f"b{i}").mkdir()
        (tmp_path / f"b{i}" / LIBRARY).write_text(text)
    builds = [str(tmp_path / f"b{i}") for i in range(4)]
    command = (
        f"sh -c 'test -n \"$DRAFTSCOPE_BUILD\" && grep -q right {{}}/{LIBRARY} && exit 0; exit 3'"
    )
    words = ("bisect", "--work", str(tmp_path / "work"), "--judge-command", command)
    found = cli(*words, "--json", "--builds", *builds)
    assert found.status == 0, found.err
    assert found.json["faults"][0]["suspects"][0]["title"].endswith("b2")
    same = cli(*words, "--builds", *builds[:2])
    assert same.status == 1 and "pass the same checks" in same.err


def test_limits_of_time_and_what_cannot_judge(repo: Path, tmp_path: Path) -> None:
    history, _ = commits(repo, "c1", "c2")
    builds = CMakeBuilds(repo, tmp_path, limit_s=0.0)
    with pytest.raises(SkippedError, match="did not build within 0 s"):
        builds(history.revisions[0])
    for command, said in (
        (["sleep", "60"], "was not tested within 0.1 s"),
        (["sh", "-c", "echo no model >&2; exit 125"], "cannot be tested: no model"),
        (["no-such-program"], "cannot be tested"),
    ):
        with pytest.raises(SkippedError, match=said):
            judge.judge_command(command, 0.1 if command[0] == "sleep" else 60.0)(tmp_path, ())
    assert judge.judge_command(["false"], 60.0)(tmp_path, ()) == {judge.OWN: (WRONG, "")}
    assert judge.judge_command(["true"], 60.0)(tmp_path, ()) == {judge.OWN: (RIGHT, "")}


def test_replies_of_our_commands_become_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lane = {"name": "mixed, planes, 3 drafted", "outcome": WRONG, "about": "x"}
    compared = {"lane": "llama.cpp,rollback=planes", "verdict": "suspect", "error": ""}
    compared |= {"worst_nmse": 0.5, "first_pos": 7}
    replies = {
        "check-rollback": {"lanes": [lane]},
        "compare": {"lanes": [compared, {"lane": "noise", "verdict": "suspect"}]},
    }
    asked: list[list[str]] = []

    def ran(program: Path, words: list[object], *_: object) -> tuple[int, bytes, str]:
        asked.append(list(map(str, words)))
        return 1, json.dumps(replies[asked[-1][2]]).encode(), ""

    monkeypatch.setattr(judge, "_ran", ran)
    model = tmp_path / "m.gguf"
    judged = judge.judge_of(model, ["check-rollback", "--depths", "3"], 60.0)(tmp_path, ())
    assert judged == {"mixed, planes, 3 drafted": (WRONG, "x")}
    assert asked[-1][-4:] == [str(tmp_path), "--json", "--depths", "3"]
    judge.judge_of(model, ["check-rollback"], 60.0)(tmp_path, [*judged, "slots, checkpoint"])
    assert asked[-1][-7:] == ["--json", "--only", "mixed", "--only", "slots", "--depths", "3"]
    assert judge.judge_of(model, ["compare"], 60.0)(tmp_path, ()) == {
        "llama.cpp,rollback=planes": (WRONG, "NMSE 0.5, first at position 7")
    }
    replies["compare"] = {"lanes": 3}
    with pytest.raises(SkippedError, match="exit status 1 without a result"):
        judge.judge_of(model, ["compare"], 60.0)(tmp_path, ())


def test_a_captured_request_judges(tmp_path: Path) -> None:
    body = {"prompt": "def f(x):"}
    sent = {"path": "/completion", "body": body, "sent_ms": 0.0}
    capture = tmp_path / "c.json"
    capture.write_text(json.dumps({"format": "draftscope-capture", "requests": [sent]}))
    words = judge.request_words(capture, 1, tmp_path / "kept")
    assert words[:2] == ["compare", "-f"] and Path(words[2]).read_text() == "def f(x):"
    assert "llama.cpp,rollback=planes" in words
