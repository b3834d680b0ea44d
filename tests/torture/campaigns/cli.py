"""Any options with any values, and signals at any time: a documented status, a sentence, no
traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from argparse import Action, ArgumentParser
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from app.__main__ import main
from app.cli.parser import SUBCOMMANDS, parser_of
from engine.run import Run
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures

_AWKWARD = ("--", "", "-", "-1", "0", "nan", "-inf", "1e999", str(2**63), "9" * 5000, "x" * 5000)
_AWKWARD += ("a\nb", "1,,2", "[" * 5000, "\udcff", "é", "../..", "/dev/null", "/dev/full", "/", "~")
_USUAL = ("1", "2", "3", "5", "0.5", "all", "none", "1,2", "new.json", "new", "new/x", "16")
_FILES = ("m.gguf", "a.txt", "p.json", "folder", "trace", "missing", "cut.gguf", "plan.toml")
_MODELS = (("m.gguf",), ("m.gguf",), ("m.gguf",), ("missing",), ("a.txt",), ("folder",), ("-",))
_SHORT = {"run": ["-n", "6", "-p", "x y"], "compare": ["-n", "4", "-p", "x y"]}
_STOP_S = 4.0
_SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
_NEVER = ("--ray", "--llama-cpp-lib", "--llama-cpp")
"""They write gigabytes, or start what is not of this program."""


@cache
def _options(name: str) -> list[Action]:
    parser: ArgumentParser = parser_of(name)
    return [a for a in parser._actions if a.option_strings and a.option_strings[-1] not in _NEVER]


_WHOLE = (
    ["run", "m.gguf", "-n", "6", "-p", "x y"],
    ["run", "m.gguf", "-n", "6", "-p", "x y", "--spec-type", "draft-mtp", "--trace", "new"],
    ["info", "m.gguf", "--json"],
    ["tokenize", "m.gguf", "x y"],
    ["compare", "m.gguf", "-n", "4", "-p", "x y", "--lane", "ring"],
)
"""Commands that end well."""
_LONG = ["run", "m.gguf", "-p", "x y", "-n", "4000", "--ignore-eos", "-c", "4096"]
_LATE = 2
"""Stretches of rounds that may begin after a signal: a command looks between two of them."""


def _draw(random: np.random.Generator, number: int) -> Case:
    """One of four ends well, and one of four is a long one that a signal ends in a round."""
    number, kind = divmod(number, 4)
    case: Case = {"model": [], "usual": [], "options": [], "after_s": 60.0, "at": 0}
    if kind == 0:
        words = _WHOLE[number % len(_WHOLE)]
        return case | {"command": words[0], "usual": words[1:], "signal": "", "whole": True}
    if kind == 1:
        case |= {"signal": list(_SIGNALS)[number % len(_SIGNALS)], "at": int(random.integers(1, 9))}
        return case | {"command": _LONG[0], "usual": _LONG[1:], "whole": False}
    number = 2 * number + kind - 2
    name = list(SUBCOMMANDS)[number % len(SUBCOMMANDS)]
    given = [_given(random, _pick(random, _options(name))) for _ in range(int(random.integers(4)))]
    stop = _STOP_S if random.random() < 0.7 else float(random.random() ** 2 * _STOP_S)
    return {
        "command": name,
        "model": list(_pick(random, _MODELS)),
        "usual": _SHORT.get(name, []) if random.random() < 0.9 else [],
        "options": given,
        "signal": _pick(random, tuple(_SIGNALS)),
        "after_s": round(stop, 3),
        "at": 0,
        "whole": False,
    }


def _pick(random: np.random.Generator, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _given(random: np.random.Generator, action: Action) -> list[str]:
    option = _pick(random, action.option_strings)
    if action.nargs == 0:
        return [option]
    tables: list[Any] = [_AWKWARD, _USUAL, _FILES]
    if action.choices:
        tables += [[str(choice) for choice in action.choices]] * 3
    values = [_pick(random, _pick(random, tables)) for _ in range(2 if action.nargs == 2 else 1)]
    if action.nargs == 2 or not option.startswith("--"):
        return [option, *values]
    return [f"{option}={values[0]}"]


def _play(case: Case, folder: Path) -> Figures:
    shutil.copytree(_files(), folder, dirs_exist_ok=True, symlinks=True)
    os.chdir(folder)
    words = [case["command"], *case["model"], *case["usual"]]
    words += [word for given in case["options"] for word in given]
    number = getattr(signal, case["signal"] or "SIGTERM")
    err = folder / "err"
    timer = threading.Timer(case["after_s"], os.kill, (os.getpid(), number))
    timer.daemon = True
    for each in _SIGNALS:
        signal.signal(getattr(signal, each), _not_heard)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"text of standard input\n"))
    with err.open("w", errors="backslashreplace") as sys.stderr:
        try:
            timer.start()
            with _signalled(number, case["at"]):
                status = main(words)
            for each in _SIGNALS:
                signal.signal(getattr(signal, each), signal.SIG_IGN)
            timer.cancel()
        except _NotHeardError:
            assert not case["at"], "a signal is not heard"
            return {"not_heard": 1}
    said = err.read_text(errors="replace")
    ends = (0, 1, 2, _SIGNALS.get(case["signal"], 0))
    if case["whole"]:
        ends = (0,)
    elif case["at"]:
        ends = (_SIGNALS[case["signal"]],)
    assert status in ends, f"{words}: status {status}, {said[-500:]}"
    assert "Traceback" not in said, f"{words}: {said[-1500:]}"
    if status in (1, 2) and case["command"] not in _SAYS_BY_STATUS:
        assert said.strip(), f"{words}: status {status} without a word"
    if status == 2:
        assert "error: " in said, f"{words}: {said[-500:]}"
    return {f"status_{status}": 1, "whole": case["whole"], "signals": bool(case["at"])}


@contextlib.contextmanager
def _signalled(number: int, at: int) -> Iterator[None]:
    """This process gets a signal in a round of decoding, and decodes little after it; 0 = none."""
    step, advance = Run.step, Run.advance
    n, n_late = 0, 0

    def counted(run: Run) -> bool:
        nonlocal n
        n += 1
        if n == at:
            os.kill(os.getpid(), number)
        return step(run)

    def watched(run: Run, *args: Any) -> bool:
        nonlocal n_late
        n_late += n >= at
        if n_late > _LATE:
            raise _NotObeyedError("decodes on after a signal")
        return advance(run, *args)

    if not at:
        yield
        return
    with patch.object(Run, "step", counted), patch.object(Run, "advance", watched):
        yield


class _NotObeyedError(BaseException):
    """A signal did not end what it should."""


_SAYS_BY_STATUS = ("compare", "memory", "check-rollback", "rescore", "triage", "match", "sweep")
"""Status 1 is their verdict, and what they print says why."""


class _NotHeardError(BaseException):
    """A signal before the command listens, or after its end."""


def _not_heard(number: int, _: object) -> None:
    raise _NotHeardError


@cache
def _files() -> Path:
    """What commands are given: models, prompts, a plan, a trace."""
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-cli-"))
    (folder / "m.gguf").symlink_to(DATA / "qwen35-c-v2x-mtp-f32.gguf")
    whole = (DATA / "qwen3-f-f32.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "a.txt").write_text("some text\n")
    (folder / "p.json").write_text(json.dumps([{"prompt": "x y", "name": "one"}]))
    (folder / "plan.toml").write_text('title = "t"\n[settings]\nmodel = "m.gguf"\nprompt = "x"\n')
    (folder / "folder").mkdir()
    words = ["-n", "6", "-p", "x y", "--spec-type", "draft-mtp", "--trace", str(folder / "trace")]
    assert main(["run", str(folder / "m.gguf"), *words]) == 0
    return folder


def _prepare() -> None:
    for name in SUBCOMMANDS:
        _options(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _files()


CAMPAIGN = Campaign(
    "cli",
    "A status as documented, an error in a sentence, no traceback.",
    _draw,
    _play,
    _prepare,
    seconds=20.0,
    n_bytes=2**30,
    n_least=16,
)
