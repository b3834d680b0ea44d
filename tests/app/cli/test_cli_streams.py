"""Standard streams that are closed, or whose reader has gone: no traceback, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.trace.reopen import open_trace

ROOT = Path(__file__).parents[3]
CAPTURE = ROOT / "tests" / "data" / "captures" / "mtp.json.gz"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


def shell(words: str, redirection: str) -> tuple[int, str]:
    """Status and standard error of `draftscope words` in a shell."""
    command = f"exec {sys.executable} -m app {words} {redirection}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


def with_reader_gone(words: str) -> tuple[int, str]:
    """The same where whatever reads its output has gone before anything is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "app", *words.split()],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "redirection"),
    [("info --demo", ">&-"), ("tokenize --help", "<&- >&-"), ("info --demo", "<&- >&- 2>&-")],
)
def test_closed_streams(words: str, redirection: str) -> None:
    assert shell(words, redirection) == (0, "")


def test_an_error_is_told_without_standard_output() -> None:
    status, told = shell("info no-such.gguf", ">&-")
    assert status == 1 and told.startswith("draftscope: error: no-such.gguf")


def test_a_closed_input_is_an_empty_one() -> None:
    status, told = shell("info no-such.gguf", "<&-")
    assert status == 1 and "Traceback" not in told


@pytest.mark.parametrize(("words", "expected"), [("info --demo --json", {1}), ("--help", {0, 1})])
def test_a_reader_that_has_gone(words: str, expected: set[int]) -> None:
    status, told = with_reader_gone(words)
    assert status in expected and told == ""


def test_files_are_written_though_nothing_can_be_printed(tmp_path: Path) -> None:
    """Of a run whose reader has gone before its first word: the trace and the report."""
    folder, report = tmp_path / "trace", tmp_path / "report.html"
    status, told = with_reader_gone(f"run --demo -p a -n 4 --trace {folder} --report {report}")
    assert status == 1 and told.count("written to") == 2 and told.count("\n") == 2
    assert len(open_trace(folder).rounds) > 0 and report.stat().st_size


PRINTS_FIRST = """
import argparse, os, sys, types
import app.__main__ as program
from app.cli.option_lines import output_file

def run(args):
    print("a" * 100_000, flush=True)
    args.junit.write_text("b")
    return 0

def parser_of(name):
    parser = argparse.ArgumentParser()
    parser.add_argument("--junit", type=output_file)
    return parser

closed, writing = os.pipe()
os.close(closed)
os.dup2(writing, 1)
program.import_module = lambda name: types.SimpleNamespace(run=run)
program.parser_of = parser_of
sys.exit(program.main(["info", "--junit", PATH]))
"""


def test_any_file_of_a_command_outlasts_its_reader(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    path = tmp_path / "checks.xml"
    done = python(PRINTS_FIRST.replace("PATH", repr(str(path))))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert path.read_text() == "b"


def test_files_are_written_though_no_stream_is_open(tmp_path: Path) -> None:
    """None of them gets the number of a closed stream: what is printed would go into it."""
    folder = tmp_path / "trace"
    assert shell(f"import {CAPTURE} --trace {folder}", "<&- >&- 2>&-") == (0, "")
    assert len(open_trace(folder).rounds) > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
@pytest.mark.parametrize("words", ["info --demo", "import {capture} --trace {folder}"])
def test_an_output_that_is_full(tmp_path: Path, words: str) -> None:
    folder = tmp_path / "trace"
    words = words.format(capture=CAPTURE, folder=folder)
    status, told = shell(words, "> /dev/full")
    said = "draftscope: error: The system refuses: No space left on device"
    assert status == 1 and said in told and "Traceback" not in told
    assert "import" in words or (told.startswith(said) and told.count("\n") == 1)
    assert folder.exists() == ("import" in words)
