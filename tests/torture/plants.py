"""Faults planted in the program, each of which its campaign must notice.

python -m tests.torture.plants [--only NAME] [--seeds 1,2,3] [--minutes 3] plays each of them in the
campaign that it names, for that campaign's share of the minutes, up to the first failure.
`python -m tests.torture --plant NAME` plays any campaigns with one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.draft.drafter import Draft
from engine.errors import (
    DraftscopeError,
    OptionError,
    TraceFileError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from tests.torture.listed import NAMES, campaign
from tests.torture.new_plants import new_plants
from tests.torture.reworded import reworded

Plant = Callable[[], None]
_kept: list[object] = []
"""What planted faults hold for ever."""


def around(place: str, changed: Callable[..., Any]) -> Plant:
    """Replaces a function by changed(original, *args, **kwargs).

    place: "module:function" or "module:Class.method". Modules that have imported a function by
    its name get the changed one, too.
    """

    def plant() -> None:
        module_name, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: Any = import_module(module_name)
        for each in owners:
            owner = getattr(owner, each)
        held = owner.__dict__[name]
        wrapper = type(held) if isinstance(held, staticmethod | classmethod) else None
        original = held.__func__ if wrapper else held

        def planted(*args: Any, **kwargs: Any) -> Any:
            return changed(original, *args, **kwargs)

        holders = [owner] if owners else [m for m in list(sys.modules.values()) if m]
        for holder in holders:
            if getattr(holder, "__dict__", {}).get(name) is held:
                setattr(holder, name, wrapper(planted) if wrapper else planted)

    return plant


def words(place: str, old: str, new: str) -> Plant:
    """Replaces words of a function, as tests.torture.reworded takes them, wherever it is held."""

    def plant() -> None:
        owner, name, changed = reworded(place, old, new)
        owner.__dict__[name].__code__ = changed.__code__

    return plant


def _refuses_deep(
    start: Any, session: Any, prompts: Any, options: Any, *more: Any, **named: Any
) -> Any:
    if options.spec.types and options.spec.n_max >= 2:
        raise OptionError("This many drafted tokens are refused.", "Draft one.")
    return start(session, prompts, options, *more, **named)


def _one_short(seq_rm: Any, memory: Any, seq: int, p0: int, p1: int = -1) -> bool:
    deep = p1 < 0 and memory.seq_pos_max(seq) - p0 >= 3
    return bool(seq_rm(memory, seq, p0 + deep, p1))


def _drafts_nothing(original: Any, drafter: Any, requests: Any) -> Any:
    return [Draft(drafter=drafter.name) for _ in requests]


def _refuses_trace(original: Any, path: Any) -> Any:
    raise TraceFileError(f"{path} is refused.", "Choose another.")


def _freezes(original: Any, *args: Any) -> Any:
    ctypes.PyDLL(None).usleep(3_000_000)  # a PyDLL keeps the interpreter's lock
    return original(*args)


def _leaks(n_bytes: int) -> Callable[..., Any]:
    def leak(start: Any, *args: Any, **more: Any) -> Any:
        _kept.append(os.urandom(n_bytes))
        return start(*args, **more)

    return leak


def _leaves_open(start: Any, *args: Any, **more: Any) -> Any:
    os.open(os.devnull, os.O_RDONLY)
    return start(*args, **more)


def _refuses_type(find: Any, reader: Any, *args: Any) -> Any:
    info = find(reader, *args)
    if info.type.name == "Q5_1":
        raise UnsupportedModelError("Q5_1 is refused.", "Choose another file.")
    return info


def _breaks(original: Any, cls: Any, *args: Any) -> Any:
    try:
        return original(cls, *args)
    except DraftscopeError as error:
        raise KeyError("planted") from error


def _writes_in_place(original: Any, path: Path, *args: Any) -> Any:
    return contextlib.nullcontext(path)


def _leaves_worker(ask: Any, *args: Any) -> Any:
    _kept.append(subprocess.Popen(["true"]))
    return ask(*args)


def _loses_text(data: Any, request: Any, *args: Any) -> Any:
    _kept.append(request)
    return None if len(_kept) % 5 == 0 else data(request, *args)


def _does_nothing(*args: Any) -> None:
    pass


def _swallows(on_signal: Any, act: Any) -> Any:
    return on_signal(_does_nothing)


def _refuses_other_sizes(original: Any, target: Any, draft: Any) -> None:
    if target.n_vocab != draft.n_vocab:
        raise VocabularyMismatchError("The sizes differ.", "Choose another draft model.")
    original(target, draft)


PLANTS: dict[str, tuple[str, Plant]] = {
    "a wrong draft token is accepted as 4th or later": (
        "truth",
        words(
            "engine.decode.acceptance:match",
            "accepted.append(token)",
            "token = drafted if i >= 3 else token; accepted.append(token)",
        ),
    ),
    "every run with n_max >= 2 is refused": (
        "truth",
        around("engine.session:Session.start", _refuses_deep),
    ),
    "a rollback of 4 or more is one token short": (
        "truth",
        around("engine.memory.hybrid:HybridMemory.seq_rm", _one_short),
    ),
    "n-grams are never found": (
        "truth",
        around("engine.draft.ngram_drafter:NgramDrafter.draft", _drafts_nothing),
    ),
    "no finding is recorded": (
        "mutants",
        around("engine.analysis.findings.check:record_findings", _does_nothing),
    ),
    "every trace is refused": (
        "trace",
        around("engine.trace.session_file:read_session", _refuses_trace),
    ),
    "the interpreter is frozen for 3 s while a trace opens": (
        "trace",
        around("engine.trace.session_file:read_session", _freezes),
    ),
    "an export drops the last row": (
        "trace",
        words(
            "engine.trace.export:_write_tables",
            "rows |= {name: len(table) for",
            "rows |= {name: max(0, len(table) - 1) for",
        ),
    ),
    "an export ends after 300 rows": (
        "kill",
        words(
            "engine.trace.export:_write_tables",
            "rows |= {name: len(table) for",
            "rows |= {name: min(300, len(table)) for",
        ),
    ),
    "1 MiB is leaked per run": ("endure", around("engine.session:Session.start", _leaks(2**20))),
    "100 KiB are leaked per run": (
        "endure",
        around("engine.session:Session.start", _leaks(100 * 2**10)),
    ),
    "a file stays open per run": ("endure", around("engine.session:Session.start", _leaves_open)),
    "every model in Q5_1 is refused": (
        "gguf",
        around("engine.gguf.reader:TensorReader._find", _refuses_type),
    ),
    "a file that is not a model ends in a traceback": (
        "cli",
        around("engine.gguf.file:GgufFile.open", _breaks),
    ),
    "a signal is swallowed": ("cli", around("app.cli.output:on_signal", _swallows)),
    "a file is written in place": ("kill", around("engine.files:written_whole", _writes_in_place)),
    "an error of the engine is not reported": (
        "faults",
        around("app.engine_thread.worker:EngineWorker.end_run", _does_nothing),
    ),
    "a worker of templates is never reaped": (
        "template",
        around("engine.gguf.chat:_ask", _leaves_worker),
    ),
    "a part of what a server says is lost": (
        "servers",
        around("engine.observe.rounds.observed_run:ObservedRequest.data", _loses_text),
    ),
    "a draft model of another vocabulary's size is refused": (
        "vocab",
        around("engine.draft.draft_files:check_vocabularies", _refuses_other_sizes),
    ),
}
"""The campaign that must notice each of them, and what plants it."""
PLANTS |= new_plants(around)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.plants")
    parser.add_argument("--only", choices=PLANTS, action="append", metavar="NAME")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--minutes", type=float, default=3.0, help="of all campaigns")
    args = parser.parse_args()
    whole = sum(campaign(name).share for name in NAMES)
    n_missed = 0
    for name in args.only or PLANTS:
        own = args.minutes * campaign(PLANTS[name][0]).share / whole
        for seed in args.seeds.split(","):
            start = time.monotonic()
            caught = _caught(name, seed, own)
            n_missed += not caught
            how = f"caught: {caught}" if caught else "MISSED"
            sys.stdout.write(f"{name}  seed {seed}  {time.monotonic() - start:.1f} s  {how}\n")
            sys.stdout.flush()
    return int(bool(n_missed))


def _caught(name: str, seed: str, minutes: float) -> str:
    """What the campaign says of a planted fault, in a line; empty if nothing."""
    command = [sys.executable, "-m", "tests.torture", "--only", PLANTS[name][0], "--plant", name]
    command += ["--seed", seed, "--minutes", str(minutes), "--first"]
    done = subprocess.run(
        command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True
    )
    return (done.stderr.strip().splitlines() or ["no word"])[0][:160] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
