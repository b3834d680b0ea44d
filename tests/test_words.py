"""The check of words: what it reads in a file, and what it finds."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "words"

_loader = SourceFileLoader("words", str(SCRIPT))
_spec = spec_from_loader("words", _loader)
assert _spec is not None
words = module_from_spec(_spec)
_loader.exec_module(words)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""It is told."""\n', [1]),
        ("told = 1  # a name is code\nx = told  # what was told\n", [2]),
        ('f"{n} so many"\n', [1]),
        ('"""One\n\nline behind another, and beside it.\n"""\n', [3, 3]),
        ('"x is no trace"\n"there is no trace"\n"it is no longer there"\n', [1]),
        ('"-a goes not with -b"\n', [1]),
        ('"untold, standstill, left"\n', []),
        ('f"{told} is in `told`: " + facts["told"]\n', []),
        ('def f(told):\n    """Text.\n\n    told: what was told.\n    """\n', [4]),
        ('"what it stands for is left behind"\n', []),
    ],
)
def test_words_of_python(tmp_path: Path, text: str, lines: list[int]) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert [line for line, _ in words.found(path)] == lines


def test_words_of_prose(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("Nobody\n\nelse stands here.\n")
    assert words.found(path) == [(1, "Nobody"), (3, "stands")]


def test_a_word_anywhere_fails(tmp_path: Path) -> None:
    """In a repository of its own, with the script as it is."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "words"
    script.write_text(SCRIPT.read_text())
    page = tmp_path / "a.md"

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
        command = [sys.executable, str(script), *more]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    page.write_text("told behind\n")
    failed = run()
    assert failed.returncode == 1 and "a.md:1: behind" in failed.stdout
    assert run("a.md").stdout == failed.stdout
    page.write_text("after\n")
    assert run().returncode == 0
