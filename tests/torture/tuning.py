"""`draftscope tune` in this process while something fails: its files are whole or not there."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from app.__main__ import main
from engine.errors import DraftscopeError
from engine.experiments.results.reader import read_results
from engine.experiments.results.table import RESULTS_FILE
from tests.torture.fault import Fault

_TOLD = (DraftscopeError, OSError, MemoryError)
"""Errors that become a sentence; any other is a mistake of the program, which shows where it is."""


def tune_under(fault: Fault, model: Path, folder: Path) -> None:
    """Tune, and then decode. Raises AssertionError for silence, half a file, and other tokens."""
    prompts, found, results = folder / "p.json", folder / "t.json", folder / "results"
    prompts.write_text(json.dumps([{"prompt": "x y x y", "name": "one"}]))
    words = ["tune", str(model), "--prompts", str(prompts), "-n", "8", "--ignore-eos"]
    words += ["--spec-type", "draft-mtp", "--pairs", "6"]
    words += ["--json", str(found), "--out", str(results)]
    with fault:
        status, said = _ended(words)
    assert (status == 0) != fault.struck, f"{status} in spite of a fault: {said[-500:]}"
    if found.exists():
        json.loads(found.read_text())
    if (results / RESULTS_FILE).exists():
        read_results(results)
    if not fault.struck:
        assert found.exists() and (results / RESULTS_FILE).exists()
    left = {path.name for path in folder.iterdir()} - {prompts.name, found.name, results.name}
    assert not left, f"left behind: {left}"
    assert _text(model) == first_text(model), "tuning has changed what is decoded"


def _ended(words: list[str]) -> tuple[int, str]:
    """Status, -1 for a mistake of the program, and what was said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except BaseException:
            return -1, err.getvalue()
    said = err.getvalue()
    if "Traceback (most recent call last)" in said:
        name = said.rstrip().rpartition("\n")[2].partition(":")[0].rpartition(".")[2]
        assert name not in [error.__name__ for error in _TOLD], f"{name} is not a sentence"
        return -1, said
    last = said.rpartition("draftscope: error: ")[2]
    assert status == 0 or (last and last.count("\n") == 1), said
    return status, said


@cache
def first_text(model: Path) -> Any:
    """What the model decodes before anything has failed; to be asked for early."""
    return _text(model)


def _text(model: Path) -> Any:
    """Tokens of every sequence."""
    out = io.StringIO()
    words = ["run", str(model), "-p", "x y", "-n", "6", "--spec-type", "draft-mtp", "--json"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(words) == 0
    return [sequence["tokens"] for sequence in json.loads(out.getvalue())["sequences"]]
