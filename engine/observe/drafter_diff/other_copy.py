"""Another copy of this program as a source of drafts: its engine decodes in a process of its own,
and its drafters' values are recorded."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import OptionError
from engine.observe.drafter_diff.stage_values import Call, StageValues
from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore


def decode_with_copy(
    tree: Path, models: Sequence[Path], compute: str, prompt: Prompt, options: RunOptions
) -> tuple[RunRef, StageValues]:
    """A run of the copy in folder `tree`. models: target and drafters. Raises OptionError if it is
    not there, it fails, or its output has another version."""
    if not (tree / "engine" / "observe" / "drafter_diff" / "other_copy.py").is_file():
        raise OptionError(
            f"{tree} is not a copy of this program that can be compared.",
            "Name the folder that has `engine` in it, of this version or a later one.",
        )
    with TemporaryDirectory() as folder:
        asked = ([path.resolve() for path in models], compute, prompt, options, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps(asked),
            capture_output=True,
            cwd=tree,
            check=False,
        )
        if done.returncode:
            why = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise OptionError(f"The copy in {tree} failed: {''.join(why)}", "Run it there.")
        try:
            form, run_id, calls = pickle.loads(Path(folder, _VALUES).read_bytes())
        except (OSError, ValueError, *_NOT_OURS):
            form = run_id = calls = None
        if form != _FORM:
            raise OptionError(
                f"The copy in {tree} is another version, whose values cannot be read here.",
                "Compare two copies of the same version, or record a run there and name its trace.",
            )
        store = open_trace(Path(folder))
    values = StageValues()
    values.calls = calls
    return RunRef(store, run_id), values


_VALUES = "values.pickle"
_FORM = Call.__slots__
_NOT_OURS = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError)
"""Exceptions of unpickling another version's objects."""


def _main() -> None:
    (target, *drafts), compute, prompt, options, folder = pickle.load(sys.stdin.buffer)
    session = Session.open(target, drafts, compute=compute)
    store, values = TraceStore(), StageValues()
    with values.watch():
        run = session.start([prompt], options, store)
        while run.step():
            pass
    export_csv(store, folder)
    (folder / _VALUES).write_bytes(pickle.dumps((_FORM, run.run_id, values.calls)))


if __name__ == "__main__":
    _main()
