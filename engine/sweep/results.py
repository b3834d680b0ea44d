"""The results of a sweep as columns, for tables, plots and reports.

    results = read_results(Path("draft-lengths-sweep"))        # of engine.sweep.reader
    results.columns["predicted_per_second"]                    # float64 [n], NaN: not known
    results.columns["spec-draft-n-max"]                        # a setting, by its key in the plan
    results.axes                                               # settings that vary, first to last
    results.trace(3)                                           # the folder of row 3's trace

A file may come from anyone: everything in its rows is checked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceFileError
from engine.sweep.schema import DONE, FAILED, FIGURES, KEY, trace_folder

MOST_ROWS = 100_000
_MOST_KEYS = 256
_TEXTS = ("key", "status", "error", "finished", "output")
ROW_COLUMNS = (*_TEXTS, "number", "settings", "has_trace", "machine", "model")
"""What a row has before its figures. machine, model: numbers of descriptions, or None."""


@dataclass(frozen=True)
class SweepResults:
    """Finished jobs in the plan's order, [n].

    path: of the file. planned: jobs of the plan, of which n are finished. columns: figures
    (schema.FIGURES) as float64, NaN where a job has none; `number`, the job's place in the plan,
    as int64; `key`, `status` ("done" or "failed"), `error`, `finished` (UTC, ISO 8601) and
    `output` (a hash of the generated tokens: equal where the texts are) as objects of str;
    and each setting: float64 where all values are numbers or missing (NaN), else objects of str,
    empty where missing. axes: settings with more than one value, in the plan's order.
    """

    path: Path
    title: str
    planned: int
    columns: dict[str, np.ndarray]
    axes: tuple[str, ...]
    _settings: list[dict[str, Any]] = field(repr=False)
    _machines: list[int | None] = field(repr=False)
    _models: list[int | None] = field(repr=False)
    _has_trace: list[bool] = field(repr=False)
    _descriptions: dict[int, str] = field(repr=False)

    @property
    def n(self) -> int:
        """Finished jobs."""
        return len(self._settings)

    @cached_property
    def done(self) -> np.ndarray:
        """Which jobs have figures: bool [n]; the others failed."""
        return np.asarray(self.columns["status"] == DONE, bool)

    @cached_property
    def setting_names(self) -> frozenset[str]:
        """The columns that are settings."""
        return frozenset(name for one in self._settings for name in one)

    def settings(self, row: int) -> dict[str, Any]:
        """The settings of a job, as the plan gives them."""
        return self._settings[row]

    def machine(self, row: int) -> dict[str, Any]:
        """Hardware and versions that the job ran on; empty for one that failed before."""
        return self._described(self._machines[row])

    def model(self, row: int) -> dict[str, Any]:
        """The identity of the job's model (GgufFile.identity, perhaps with `draft`)."""
        return self._described(self._models[row])

    def trace(self, row: int) -> Path | None:
        """The folder of the job's trace, None where there is none (any more)."""
        if not self._has_trace[row]:
            return None
        folder = trace_folder(self.path, self.columns["key"][row])
        return folder if folder.is_dir() else None

    def _described(self, number: int | None) -> dict[str, Any]:
        text = self._descriptions.get(number) if number is not None else None
        return {} if text is None else _object(self.path, text)


def results_of(
    path: Path,
    title: Any,
    planned: int,
    rows: Sequence[Sequence[Any]],
    descriptions: Mapping[int, str],
) -> SweepResults:
    """Results from the rows of a file: ROW_COLUMNS and FIGURES of each, in the plan's order.

    Raises TraceFileError for more than MOST_ROWS, or values that a sweep does not write.
    """
    if len(rows) > MOST_ROWS:
        raise TraceFileError(f"{path} has more than {MOST_ROWS:,} rows.", "Split the sweep.")
    for at, row in enumerate(rows, 1):
        _check_row(path, at, row)
    settings = [_settings(path, at, row[6]) for at, row in enumerate(rows, 1)]
    by_name = _columns(rows)
    names = list(dict.fromkeys(name for one in settings for name in one))
    if len(names) > _MOST_KEYS:
        raise TraceFileError(f"{path} has more than {_MOST_KEYS} settings.", "Write it again.")
    for name in names:
        by_name.setdefault(name, _setting([one.get(name) for one in settings]))
    return SweepResults(
        path,
        checked_text(path, "title", title),
        max(planned, len(rows)),
        by_name,
        tuple(name for name in names if _varies([one.get(name) for one in settings])),
        settings,
        [row[8] for row in rows],
        [row[9] for row in rows],
        [row[7] == 1 for row in rows],
        dict(descriptions),
    )


def _check_row(path: Path, at: int, row: Sequence[Any]) -> None:
    for name, value in zip(_TEXTS, row, strict=False):
        checked_text(path, name, value, at)
    if not KEY.fullmatch(row[0]):
        raise _wrong(path, at, "key", "is no job's key")
    if row[1] not in (DONE, FAILED):
        raise _wrong(path, at, "status", f"is neither {DONE} nor {FAILED}")
    for name, value in zip(("number", "settings", "has_trace"), row[5:8], strict=True):
        if not isinstance(value, str if name == "settings" else int):
            raise _wrong(path, at, name, "has the wrong type")
    if not 0 <= row[5] <= 2**31:
        raise _wrong(path, at, "number", "is no place in a plan")
    for name, value in zip(("machine", "model", *FIGURES), row[8:], strict=True):
        if value is not None and not isinstance(value, (int, float)):
            raise _wrong(path, at, name, "is no number")


def _columns(rows: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {"number": np.array([row[5] for row in rows], np.int64)}
    for i, name in enumerate(_TEXTS):
        columns[name] = _objects([row[i] for row in rows])
    for i, name in enumerate(FIGURES, 10):
        values = [math.nan if row[i] is None else float(row[i]) for row in rows]
        columns[name] = np.array(values, np.float64)
    return columns


def _setting(values: list[Any]) -> np.ndarray:
    numbers = all(
        v is None or (isinstance(v, (int, float)) and type(v) is not bool) for v in values
    )
    if numbers:
        return np.array([math.nan if v is None else float(v) for v in values], np.float64)
    return _objects([setting_text(v) for v in values])


def setting_text(value: Any) -> str:
    """A setting for people: "yes" for true, the parts of a list joined, empty for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(setting_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _objects(values: list[str]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _varies(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


def _settings(path: Path, at: int, text: str) -> dict[str, Any]:
    found = _object(path, text, at)
    for name, value in found.items():
        parts = value if isinstance(value, list) else [value]
        plain = all(isinstance(part, (str, int, float, bool)) for part in parts)
        whole = not any(isinstance(p, int) and abs(p) > 2**53 for p in parts)
        if not (plain and whole and len(name) <= 64 and name not in FIGURES):
            raise _wrong(path, at, "settings", "are no settings of a job")
    return found


def _object(path: Path, text: str, at: int = 0) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _wrong(path, at, "a JSON text", "is no object")
    return value


def checked_text(path: Path, name: str, value: Any, at: int = 0) -> str:
    """A value that has to be text. at: its row, from 1. Raises TraceFileError for any other."""
    if not isinstance(value, str):
        raise _wrong(path, at, name, "is no text")
    return value


def _wrong(path: Path, at: int, name: str, what: str) -> TraceFileError:
    place = f"row {at}, {name}" if at else name
    return TraceFileError(f"{path}: {place} {what}.", "Run the sweep again.")
