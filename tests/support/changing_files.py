"""Commands whose model files change in a round of theirs: run as a program, one after another in
one process, which a bus error would end.

Prints a line of JSON for each of CASES: its name, exit status, standard output and error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np

from engine.gguf.part_file import LOOK_S
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.gguf_writer import value
from tests.torture.gguf_parts import taken_apart

PROMPT = "def add(a, b):"
ROUND = 4
RUN = ("run", "{model}", "-p", PROMPT, "-n", "40", "--temp", "0", "-t", "1")
MTP = ("--spec-type", "draft-mtp")
SIMPLE = ("-md", "{draft}", "--spec-type", "draft-simple")
COMPARE = (
    "compare", "{model}", "-p", PROMPT, "-n", "12", "--spec-type", "draft-mtp", "-t", "1",
    "--lane", "replay",
)  # fmt: skip
BENCH = ("bench", "{model}", "--prompts", "{prompts}", "-n", "12", *MTP, "-t", "1")
TURNS = ("run", "{model}", "--turns", "{turns}", "-n", "8", "-t", "1")


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_others_over(path: Path) -> None:
    """Other weights of the same size, and the times of the file set back."""
    status, content = path.stat(), bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = content[half:][::-1]
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"no model")
    other.replace(path)


def remove(path: Path) -> None:
    path.unlink()


def leave(path: Path) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Case:
    """args: of the command. change: what happens to `file` in round ROUND, or with `at` when that
    function of the program is called first."""

    args: tuple[str, ...]
    change: Callable[[Path], None]
    file: str = "model.gguf"
    at: str = "engine.decode.recorder.Recorder.round"


LOADING = "engine.gguf.reader.TensorReader.take_blocks"
PARTS = "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"
CASES = {
    "plain": Case(RUN, leave),
    "cut": Case(RUN, cut_to_nothing),
    "halved": Case((*RUN, *MTP), cut_in_half),
    "rewritten": Case((*RUN, *MTP), write_others_over),
    "replaced": Case(RUN, replace),
    "removed": Case(RUN, remove),
    "mapped cut": Case((*RUN, *MTP, "--mmap"), cut_to_nothing),
    "mapped halved": Case((*RUN, "--mmap"), cut_in_half),
    "mapped rewritten": Case((*RUN, "--mmap", "--allow-non-finite"), write_others_over),
    "mapped replaced": Case((*RUN, "--mmap"), replace),
    "mapped removed": Case((*RUN, "--mmap"), remove),
    "draft cut": Case((*RUN, *SIMPLE), cut_to_nothing, "draft.gguf"),
    "mapped draft cut": Case((*RUN, *SIMPLE, "--mmap"), cut_to_nothing, "draft.gguf"),
    "part cut": Case((*RUN, "{parts}"), cut_to_nothing, PARTS[1]),
    "mapped part cut": Case((*RUN, "{parts}", "--mmap"), cut_to_nothing, PARTS[1]),
    "compare plain": Case(COMPARE, leave),
    "compare cut": Case(COMPARE, cut_to_nothing),
    "mapped compare cut": Case((*COMPARE, "--mmap"), cut_to_nothing),
    "mapped compare rewritten": Case((*COMPARE, "--mmap"), write_others_over),
    "bench cut": Case(BENCH, cut_to_nothing),
    "mapped bench rewritten": Case((*BENCH, "--mmap", "--allow-non-finite"), write_others_over),
    "mapped bench cut": Case((*BENCH, "--mmap"), cut_to_nothing),
    "turns cut": Case(TURNS, cut_to_nothing),
    "mapped turns cut": Case((*TURNS, "--mmap"), cut_to_nothing),
    "loading cut": Case(RUN, cut_to_nothing, at=LOADING),
    "loading rewritten": Case(RUN, write_others_over, at=LOADING),
    "loading replaced": Case(RUN, replace, at=LOADING),
    "mapped loading cut": Case((*RUN, "--mmap"), cut_to_nothing, at=LOADING),
    "hashing cut": Case(RUN, cut_to_nothing, at="engine.gguf.content.check_cancelled"),
    "plain at the end": Case((*RUN, "--mmap"), leave),
}


def split_in_two(source: Path, folder: Path) -> None:
    """Write a model as two files named PARTS."""
    whole = taken_apart(source.read_bytes())
    n = len(whole.tensors)
    for number, (name, own) in enumerate(
        zip(PARTS, (slice(n // 2), slice(n // 2, n)), strict=True)
    ):
        part = whole.copy()
        split: dict[str, Any] = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(2),
            "split.tensors.count": np.int32(n),
        }
        keys = [(key, value(one)) for key, one in split.items()]
        part.metadata = [*part.metadata, *keys] if not number else keys
        part.tensors = part.tensors[own]
        (folder / name).write_bytes(part.bytes())


def _once(name: str, when: Callable[[], bool], change: Callable[[], None]) -> Callable[[], None]:
    """Have a function of the program make the change before it is called; returns the way back."""
    module, _, function = name.rpartition(".")
    holder: Any = sys.modules.get(module)
    if holder is None:
        module, _, kind = module.rpartition(".")
        holder = getattr(sys.modules[module], kind)
    before = getattr(holder, function)

    def called(*args: Any, **kwargs: Any) -> Any:
        if when():
            change()
            sleep(LOOK_S)  # files are not looked at more often
        return before(*args, **kwargs)

    setattr(holder, function, called)
    return lambda: setattr(holder, function, before)


def _run(case: Case, folder: Path) -> dict[str, Any]:
    import engine.decode.recorder
    import engine.gguf.content
    import engine.session  # noqa: F401 - all that is replaced
    from app.__main__ import main

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(DEMO_TARGET, folder / "model.gguf")
    shutil.copyfile(DEMO_DRAFT, folder / "draft.gguf")
    split_in_two(DEMO_TARGET, folder)
    (folder / "prompts.json").write_text(json.dumps([{"name": "one", "text": PROMPT}]))
    (folder / "turns.json").write_text(json.dumps(["Hello", "Again", "More"]))
    names = {"model": "model.gguf", "draft": "draft.gguf"}
    paths = {name: str(folder / file) for name, file in names.items()}
    paths |= {name: str(folder / f"{name}.json") for name in ("prompts", "turns")}
    if "{parts}" in case.args:
        paths["model"] = str(folder / PARTS[0])
    args = [one.format_map(paths) for one in case.args if one != "{parts}"]
    if args[0] != "bench":
        args += ["--trace", str(folder / "trace")]
    calls = iter(range(1 << 30))
    at = ROUND if case.at.endswith("round") else 0
    undo = _once(case.at, lambda: next(calls) == at, lambda: case.change(folder / case.file))
    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main(args)
    finally:
        undo()
    trace = folder / "trace"
    rows, session, found = (trace / x for x in ("rounds.csv", "session.json", "findings.csv"))
    return {
        "status": status,
        "out": out.getvalue(),
        "err": errors.getvalue(),
        "rounds": len(rows.read_text().splitlines()) - 1 if rows.exists() else None,
        "runs": list(json.loads(session.read_text())["runs"].values()) if rows.exists() else [],
        "findings": found.read_text() if found.exists() else "",
    }


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        line = json.dumps({"name": name, **_run(CASES[name], Path(sys.argv[1]))})
        sys.stdout.write(line + "\n")
