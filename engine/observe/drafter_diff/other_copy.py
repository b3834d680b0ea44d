"""Another copy of this program as a source of drafts: its own engine decodes in a process of its
own, and what its drafters compute is kept."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import OptionError
from engine.observe.drafter_diff.stage_values import StageValues
from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_LEAST_WORDS = 400


def decode_with_copy(
    tree: Path, models: Sequence[Path], compute: str, prompt: Prompt, options: RunOptions
) -> tuple[RunRef, StageValues]:
    """A run of the copy in folder `tree`. models: target and drafters. Raises OptionError where
    there is none, or it fails."""
    if not (tree / "engine" / "observe" / "drafter_diff" / "other_copy.py").is_file():
        raise OptionError(
            f"{tree} is not a copy of this program that can be watched.",
            "Name the folder that has `engine` in it, of this version or a later one.",
        )
    asked = pickle.dumps(([path.resolve() for path in models], compute, prompt, options))
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=asked, capture_output=True, cwd=tree, check=False)
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip()[-_LEAST_WORDS:]
        raise OptionError(f"The copy in {tree} failed: {why}", "Run it there by itself.")
    store, run_id, calls = pickle.loads(done.stdout)
    values = StageValues()
    values.calls = calls
    return RunRef(store, run_id), values


def _main() -> None:
    (target, *drafts), compute, prompt, options = pickle.load(sys.stdin.buffer)
    session, store, values = (
        Session.open(target, drafts, compute=compute),
        TraceStore(),
        StageValues(),
    )
    with values.watch():
        run = session.start([prompt], options, store)
        while run.step():
            pass
    sys.stdout.buffer.write(pickle.dumps((store, run.run_id, values.calls)))


if __name__ == "__main__":
    _main()
