"""The rows of a results file, which may come from anyone: what is not written there is refused in a
sentence that names file, row and column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.experiments.results.schema import DONE, FAILED, FIGURES, KEY
from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import LARGEST, is_real

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
