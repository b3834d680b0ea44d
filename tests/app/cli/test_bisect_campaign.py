"""The campaign of planted faults, on sources whose library is a text: every commit is found."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine.experiments.bisect.builds import LIBRARY
from tests.support.bisect_campaign import (
    Edit,
    Fault,
    branch_of,
    command,
    judged,
    make_repository,
    play,
    table,
)

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("git", "cmake", "ninja"))), reason="needs git, cmake and ninja"
)
PROJECT = f"""cmake_minimum_required(VERSION 3.14)
project(fake LANGUAGES NONE)
add_custom_command(OUTPUT bin/{LIBRARY} DEPENDS ${{CMAKE_SOURCE_DIR}}/src/code
  COMMAND sh ${{CMAKE_SOURCE_DIR}}/src/compile ${{CMAKE_SOURCE_DIR}}/src/code bin/{LIBRARY})
add_custom_target(llama DEPENDS bin/{LIBRARY})
"""
COMPILE = "! grep -q syntax $1 || { echo 'code:1: error: no such word'; exit 1; }\ncp $1 $2\n"
HARMLESS = [
    Edit(f"note {i}", "src/code", *texts)
    for i, texts in enumerate(
        [("", "a"), ("", "syntax"), ("syntax", "b"), ("", "c"), ("", "d"), ("", "e")], 1
    )
]
FAULTS = [
    Fault("early", 1, Edit("early", "src/code", "start", "wrong"), 0, "none"),
    Fault("next to it", 3, Edit("next", "src/code", "start", "wrong"), 0, "none"),
    Fault("in between", 2, Edit("between", "src/code", "start", "wrong"), 0, "none"),
    Fault("late", 6, Edit("late", "src/code", "start", "wrong"), 0, "none"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a repository of the faults."""
    made = tmp_path_factory.mktemp("campaign")
    (made / "sources" / "src").mkdir(parents=True)
    (made / "sources" / "CMakeLists.txt").write_text(PROJECT)
    (made / "sources" / "src" / "compile").write_text(COMPILE)
    (made / "sources" / "src" / "code").write_text("start\n")
    make_repository(made / "sources", made / "repo", HARMLESS, FAULTS)
    return made


JUDGE = ("--judge-command", f"sh -c '! grep -q wrong {{}}/lib/{LIBRARY}'")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.thinned(4)
def test_a_planted_fault_is_found(folder: Path, fault: Fault) -> None:
    status, reply, said = play(folder / "repo", folder / "work", branch_of(fault), JUDGE)
    assert status == 0, said
    assert judged(fault, folder / "repo", reply).has_commit


def test_no_clean_commit_is_accused_and_the_table_makes_the_same_again(folder: Path) -> None:
    status, reply, said = play(folder / "repo", folder / "work", "clean", JUDGE)
    assert (status, reply) == (1, None) and "pass the same checks" in said
    make_repository(folder / "sources", folder / "again", HARMLESS, FAULTS)
    heads = [
        (folder / name / ".git" / "refs" / "heads" / "clean").read_text()
        for name in ("repo", "again")
    ]
    assert heads[0] == heads[1]


def test_it_goes_on_after_it_was_killed(folder: Path, tmp_path: Path) -> None:
    """While the third build is judged."""
    fault, count, third = FAULTS[-1], tmp_path / "count", tmp_path / "third"
    waits = f"echo . >> {count}; test $(wc -l < {count}) -ne 3 || {{ touch {third}; sleep 600; }}"
    words = ("--judge-command", f"sh -c '{waits}; ! grep -q wrong $DRAFTSCOPE_BUILD/lib/{LIBRARY}'")
    repo, work = folder / "repo", tmp_path / "work"
    with subprocess.Popen(command(repo, work, branch_of(fault), words)) as running:
        while not third.exists() and running.poll() is None:
            time.sleep(0.05)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    status, reply, said = play(repo, work, branch_of(fault), words)
    assert status == 0 and "2 verdicts are known from an earlier search" in said, said
    assert judged(fault, repo, reply).has_commit


def test_the_table_of_ten_faults() -> None:
    harmless, faults = table()
    assert len(harmless) >= 30 and len(faults) == 10
    assert len({fault.name for fault in faults}) == 10
    assert all(0 < fault.after < len(harmless) and fault.edit.old for fault in faults)
