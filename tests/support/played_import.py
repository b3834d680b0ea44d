"""A file given to `draftscope import`, and what it makes of it opened again."""

from __future__ import annotations

import argparse
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from app.cli import import_
from engine.errors import DraftscopeError
from engine.trace.reopen import open_trace


def play(data: bytes, folder: Path) -> str:
    """What was printed, or the error's sentences. Whatever else is raised is a fault, and so is a
    trace that does not open again."""
    file = folder / "given"
    file.write_bytes(data)
    args = argparse.Namespace(
        files=[file], log=None, model=None, name=None, trace=folder / "trace", json=False
    )
    out = StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(StringIO()):
            import_.run(args)
    except DraftscopeError as error:
        return f"refused: {error}"
    open_trace(args.trace)
    return out.getvalue()
