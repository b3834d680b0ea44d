"""Facts of runs in an exported trace, changed where they stand: the tables are not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.files import written_whole
from engine.trace.export import SESSION_FILE, write_session
from engine.trace.session_file import read_json
from engine.trace.typed_json import strict_json


def change_facts(folder: Path, facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Add facts to runs of an exported trace, by id; one that is there already is replaced.

    A crash at any moment leaves session.json as it was or as it is to be. Raises TraceFileError
    where it cannot be read or written, or lacks a run.
    """
    path = folder / SESSION_FILE
    session = read_json(path)
    runs = session.get("runs")
    for run_id, added in facts.items():
        known = runs.get(str(run_id)) if isinstance(runs, dict) else None
        if not isinstance(known, dict):
            raise TraceFileError(f"{path}: runs.{run_id} is missing.", "Export the trace again.")
        known.update(strict_json(added))
    with written_whole(path, TraceFileError) as part:
        write_session(part, session)
