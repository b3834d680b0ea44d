"""The results file of `bench suite`, `sweep` and `tune`: one SQLite database, a row per finished
job.

    results.sqlite     table `facts`: kind, title, plan, number of planned jobs; `detail KEY`: what
                       a job has beyond its figures, as JSON
                       table `descriptions`: machines and models as JSON, each once
                       table `results`: one row per job, done or failed
    traces/KEY/        the exported trace of the job with this key

The file is known by its application id, its version and the exact text of its tables, so that
nothing else (a view, a generated column, a trigger) is ever read. Rows may come
from anyone: what is not written there is refused in a sentence that names file, row and column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import LARGEST, is_real

RESULTS_FILE = "results.sqlite"
TRACES = "traces"
APPLICATION_ID = 0x44535731  # "DSW1"
VERSION = 1
SUITE, SWEEP, TUNE = "suite", "sweep", "tune"
"""What a file is of; earlier versions did not write it."""
DONE, FAILED = "done", "failed"
KEY = re.compile(r"[0-9a-f]{16}")

FIGURES: dict[str, str] = {
    "predicted_per_second": "generated tokens per second, all sequences together",
    "predicted_per_second_low": "the slowest of the repeated runs",
    "predicted_per_second_high": "the fastest of the repeated runs",
    "prompt_per_second": "prompt tokens per second",
    "prompt_n": "prompt tokens",
    "prompt_ms": "forward passes over the prompts, milliseconds",
    "predicted_n": "generated tokens",
    "predicted_ms": "time in which any sequence was generating, milliseconds",
    "draft_n": "drafted tokens",
    "draft_n_accepted": "drafted tokens that were accepted",
    "draft_acceptance_rate": "accepted / drafted",
    "mean_acceptance_length": "tokens per step, the target's own included",
    "num_spec_steps": "rounds that verified a draft",
    "draft_ms": "drafting, milliseconds",
    "verify_ms": "forward passes of the target after the prompts, milliseconds",
    "num_restores": "checkpoints put back",
    "weight_bytes": "weights of the target as loaded",
    "memory_bytes": "attention cells and recurrent states",
    "snapshot_bytes": "one snapshot of the recurrent states",
    "n_rs_seq": "snapshots kept beyond the live state",
    "num_findings": "warnings and errors among the findings",
    "wall_s": "the run from its first round to its last, seconds",
}
"""Numbers of a finished job; null where a run has none. Names are those of a run's summary."""

_FIGURE_COLUMNS = "".join(f", {name} REAL" for name in FIGURES)

TABLES = {
    "facts": "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT)",
    "descriptions": "CREATE TABLE descriptions (id INTEGER PRIMARY KEY, text TEXT UNIQUE)",
    "results": (
        "CREATE TABLE results (key TEXT PRIMARY KEY, number INTEGER, status TEXT, error TEXT, "
        "finished TEXT, settings TEXT, output TEXT, has_trace INTEGER, machine INTEGER, "
        f"model INTEGER{_FIGURE_COLUMNS})"
    ),
}
"""The statement that makes each table, as SQLite keeps it."""


def results_file(path: Path) -> Path:
    """The file that a path means: itself, or the one in a folder."""
    return path / RESULTS_FILE if path.is_dir() else path


def trace_folder(results: Path, key: str) -> Path:
    """Where the trace of a job is, next to its results file."""
    return results.parent / TRACES / key


def not_ours(path: Path) -> TraceFileError:
    """The file is something else."""
    return TraceFileError(
        f"{path} is not a result file of `draftscope bench suite`, `sweep` or `tune`.",
        "Name the folder that --out named, or the results.sqlite in it.",
    )


MOST_ROWS = 100_000
TEXT_COLUMNS = ("key", "status", "error", "finished", "output")
ROW_COLUMNS = (*TEXT_COLUMNS, "number", "settings", "has_trace", "machine", "model")
"""What a row has before its figures. machine, model: numbers of descriptions, or None."""
NUMBER_AT = ROW_COLUMNS.index("number")
_MOST_PARTS = 1024
"""Values of a setting that is a list."""


def check_row(path: Path, at: int, row: Sequence[Any]) -> None:
    """Raises TraceFileError unless the values of ROW_COLUMNS and FIGURES are such as are
    written; settings are checked by `checked_settings`. at: number of the row."""
    for name, value in zip(TEXT_COLUMNS, row, strict=False):
        checked_text(path, name, value, at)
    if not KEY.fullmatch(row[0]):
        raise wrong(path, at, "key", "is not a job's key")
    if row[1] not in (DONE, FAILED):
        raise wrong(path, at, "status", f"is neither {DONE} nor {FAILED}")
    for name, value in zip(("number", "settings", "has_trace"), row[5:8], strict=True):
        if not isinstance(value, str if name == "settings" else int):
            raise wrong(path, at, name, "has the wrong type")
    if not 0 <= row[NUMBER_AT] <= 2**31:
        raise wrong(path, at, "number", "is not a place in a plan")
    for name, value in zip(("machine", "model"), row[8:10], strict=True):
        if value is not None and not isinstance(value, int):
            raise wrong(path, at, name, "is not a number of a description")
    for name, value in zip(FIGURES, row[10:], strict=True):
        if value is not None and not is_figure(value):
            raise wrong(path, at, name, "is not a number from 0 to 2^53")


def is_figure(value: Any) -> bool:
    """Whether a value can have been measured: a number, neither negative nor without end."""
    return is_real(value, LARGEST)


def checked_settings(path: Path, at: int, text: str) -> dict[str, Any]:
    """The settings of a row, as the plan gives them. Raises TraceFileError."""
    found = json_object(path, text, at)
    for name, value in found.items():
        parts = value if isinstance(value, list) else [value]
        plain = all(isinstance(part, (str, int, float, bool)) for part in parts)
        whole = not any(isinstance(p, int) and abs(p) > LARGEST for p in parts)
        short = len(name) <= 64 and len(parts) <= _MOST_PARTS
        if not (plain and whole and short and name not in FIGURES):
            raise wrong(path, at, "settings", "are no settings of a job")
    return found


def json_object(path: Path, text: str, at: int = 0) -> dict[str, Any]:
    """The object that a text of a row is. Raises TraceFileError for anything else."""
    try:
        value = parse_json(text)
    except JsonError:
        value = None
    if not isinstance(value, dict):
        raise wrong(path, at, "a JSON text", "is not an object")
    return value


def checked_text(path: Path, name: str, value: Any, at: int = 0) -> str:
    """A value that has to be text. at: its row, 0 for none. Raises TraceFileError for any other."""
    if not isinstance(value, str):
        raise wrong(path, at, name, "is not text")
    return value


def too_many_rows(path: Path) -> TraceFileError:
    """The error about more than MOST_ROWS."""
    return TraceFileError(f"{path} has more than {MOST_ROWS:,} rows.", "Split the plan.")


def wrong(path: Path, at: int, name: str, what: str) -> TraceFileError:
    """The error about a value. at: its row, 0 for none. name: of the column."""
    place = f"row {at}, {name}" if at else name
    return TraceFileError(f"{path}: {place} {what}.", "Measure again.")
