"""The results of the suite, a sweep or tune as columns, for tables, plots and reports.

    results = read_results(Path("draft-lengths-sweep"))        # of engine.experiments.results
    results.columns["predicted_per_second"]                    # float64 [n], NaN: not known
    results.columns["spec-draft-n-max"]                        # a setting, by its key in the plan
    results.axes                                               # settings that vary, first to last
    results.trace(3)                                           # the folder of row 3's trace

It is read from one SQLite database, a row per finished job:

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

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import realpath
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceFileError, check_most
from engine.foreign import LARGEST, JsonError, is_real, parse_json

RESULTS_FILE = "results.sqlite"
TRACES = "traces"
APPLICATION_ID = 0x44535731  # "DSW1"
VERSION = 1
SUITE, SWEEP, TUNE = "suite", "sweep", "tune"
"""Kind of a file; earlier versions did not write it."""
DONE, FAILED = "done", "failed"
KEY = re.compile(r"[0-9a-f]{16}")

FIGURES: dict[str, str] = {
    "predicted_per_second": "generated tokens per second of all sequences",
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
    "mean_acceptance_length": "tokens per round, including the target's own",
    "num_spec_steps": "rounds that verified a draft",
    "draft_ms": "drafting, milliseconds",
    "verify_ms": "forward passes of the target after the prompts, milliseconds",
    "num_restores": "checkpoints put back",
    "weight_bytes": "weights of the target as loaded",
    "memory_bytes": "KV cells and recurrent states",
    "snapshot_bytes": "one snapshot of the recurrent states",
    "n_rs_seq": "snapshots in addition to the live state",
    "num_findings": "warnings and errors among the findings",
    "wall_s": "the run from its first round to its last, seconds",
}
"""Figures of a finished job; null if not available. Names are those of a run's summary."""

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
    """The file that a path refers to: itself, or the one in a folder."""
    return path / RESULTS_FILE if path.is_dir() else path


def trace_folder(results: Path, key: str) -> Path:
    """Trace folder of a job, next to its results file."""
    return results.parent / TRACES / key


def not_ours(path: Path) -> TraceFileError:
    """An error for a file of another kind."""
    return TraceFileError(
        f"{path} is not a result file of `draftscope bench suite`, `sweep` or `tune`.",
        "Name the folder that --out named, or the results.sqlite in it.",
    )


MOST_ROWS = 100_000
TEXT_COLUMNS = ("key", "status", "error", "finished", "output")
ROW_COLUMNS = (*TEXT_COLUMNS, "number", "settings", "has_trace", "machine", "model")
"""Columns before the figures. machine, model: numbers of descriptions, or None."""
NUMBER_AT = ROW_COLUMNS.index("number")
_MOST_PARTS = 1024
"""Elements of a list setting."""


def check_row(path: Path, at: int, row: Sequence[Any]) -> None:
    """Raises TraceFileError unless the values of ROW_COLUMNS and FIGURES are valid; settings are
    checked by `checked_settings`. at: number of the row."""
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
    """Whether a value is a possible figure: a finite non-negative number."""
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
    """A text value. at: its row, 0 for none. Raises TraceFileError for other types."""
    if not isinstance(value, str):
        raise wrong(path, at, name, "is not text")
    return value


def wrong(path: Path, at: int, name: str, what: str) -> TraceFileError:
    """An error about a value. at: its row, 0 for none. name: of the column."""
    place = f"row {at}, {name}" if at else name
    return TraceFileError(f"{path}: {place} {what}.", "Measure again.")


_MOST_KEYS = 256


@dataclass(frozen=True)
class ExperimentResults:
    """Finished jobs in the plan's order, [n].

    path: of the file. facts: of the file, `kind` (SUITE …) among them. planned: jobs of the plan; n
    of them are finished. columns: FIGURES as float64, NaN where a job has none; `number`, the job's
    place in the plan, as int64; `key`, `status` ("done" or "failed"), `error`, `finished` (UTC, ISO
    8601) and `output` (a hash of the generated tokens: equal where the texts are) as objects of
    str; and each setting: float64 where all values are numbers or missing (NaN), else objects of
    str, empty where missing. axes: settings with more than one value, in the plan's order.
    """

    path: Path
    facts: Mapping[str, str] = field(repr=False)
    planned: int
    columns: dict[str, np.ndarray]
    axes: tuple[str, ...]
    _settings: list[dict[str, Any]] = field(repr=False)
    _machines: list[int | None] = field(repr=False)
    _models: list[int | None] = field(repr=False)
    _has_trace: list[bool] = field(repr=False)
    _descriptions: dict[int, str] = field(repr=False)

    @property
    def title(self) -> str:
        """Title of the results."""
        return self.facts.get("title", "")

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
        """Hardware and versions of the job; empty for one that failed before."""
        return self._described(self._machines[row])

    def model(self, row: int) -> dict[str, Any]:
        """The identity of the job's model (GgufFile.identity, possibly with `draft`)."""
        return self._described(self._models[row])

    def trace(self, row: int) -> Path | None:
        """The job's trace folder, None if there is none (any more), or if a link leads out of the
        results folder."""
        if not self._has_trace[row]:
            return None
        folder = trace_folder(self.path, self.columns["key"][row])
        # a link to itself leads nowhere, and resolve() would raise
        is_here = Path(realpath(folder)).is_relative_to(realpath(self.path.parent))
        return folder if is_here and folder.is_dir() else None

    def _described(self, number: int | None) -> dict[str, Any]:
        text = self._descriptions.get(number) if number is not None else None
        return {} if text is None else json_object(self.path, text)


def results_of(
    path: Path,
    facts: Mapping[str, Any],
    planned: int,
    rows: Sequence[Sequence[Any]],
    descriptions: Mapping[int, str],
    places: Sequence[int] = (),
) -> ExperimentResults:
    """Results from checked rows of a file, in the plan's order.

    facts: `title` is checked to be text. places: numbers of the rows in the file, from 1 if not
    given. Raises TraceFileError for settings that are not valid.
    """
    places = places or range(1, len(rows) + 1)
    settings = [checked_settings(path, at, row[6]) for at, row in zip(places, rows, strict=True)]
    by_name = _columns(rows)
    names = list(dict.fromkeys(name for one in settings for name in one))
    check_most(str(path), len(names), _MOST_KEYS, "settings", "Write it again.")
    for name in names:
        by_name.setdefault(name, _setting([one.get(name) for one in settings]))
    return ExperimentResults(
        path,
        {**facts, "title": checked_text(path, "title", facts.get("title", ""))},
        max(planned, len(rows)),
        by_name,
        tuple(n for n in names if any(one.get(n) != settings[0].get(n) for one in settings)),
        settings,
        [row[8] for row in rows],
        [row[9] for row in rows],
        [row[7] == 1 for row in rows],
        dict(descriptions),
    )


def _columns(rows: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {"number": np.array([row[5] for row in rows], np.int64)}
    for i, name in enumerate(TEXT_COLUMNS):
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


FIGURE_HEADS: Mapping[str, tuple[str, int]] = {
    "predicted_per_second": ("tokens/s", 1),
    "draft_acceptance_rate": ("acceptance", 3),
    "mean_acceptance_length": ("mean length", 2),
}
"""Figures in the table: their heads and digits."""

_LONGEST = 60


def result_table(results: ExperimentResults) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row per job in the plan's order; the error of a failed one is its last cell."""
    heads = ["job", *results.axes, *(head for head, _ in FIGURE_HEADS.values()), "result"]
    rows = []
    for i in range(results.n):
        settings = results.settings(i)
        rows.append(
            [
                str(results.columns["number"][i]),
                *(_short(setting_text(settings.get(axis))) for axis in results.axes),
                *(
                    number(float(results.columns[name][i]), digits)
                    for name, (_, digits) in FIGURE_HEADS.items()
                ),
                results.columns["error"][i] if not results.done[i] else "done",
            ]
        )
    return heads, rows


def number(value: float, digits: int) -> str:
    """A figure with its decimals, "n/a" for NaN."""
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
