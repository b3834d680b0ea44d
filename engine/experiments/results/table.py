"""The results of the suite, a sweep or tune as columns, for tables, plots and reports.

    results = read_results(Path("draft-lengths-sweep"))        # of engine.experiments.results
    results.columns["predicted_per_second"]                    # float64 [n], NaN: not known
    results.columns["spec-draft-n-max"]                        # a setting, by its key in the plan
    results.axes                                               # settings that vary, first to last
    results.trace(3)                                           # the folder of row 3's trace

A file may come from anyone: what its rows hold is checked (engine.experiments.results.schema).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import realpath
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceFileError
from engine.experiments.results.schema import (
    DONE,
    FIGURES,
    TEXT_COLUMNS,
    checked_settings,
    checked_text,
    json_object,
    trace_folder,
)

_MOST_KEYS = 256


@dataclass(frozen=True)
class ExperimentResults:
    """Finished jobs in the plan's order, [n].

    path: of the file. facts: of the file, `kind` (schema.SUITE …) among them. planned: jobs of the
    plan, of which n are finished. columns: figures
    (schema.FIGURES) as float64, NaN where a job has none; `number`, the job's place in the plan,
    as int64; `key`, `status` ("done" or "failed"), `error`, `finished` (UTC, ISO 8601) and
    `output` (a hash of the generated tokens: equal where the texts are) as objects of str;
    and each setting: float64 where all values are numbers or missing (NaN), else objects of str,
    empty where missing. axes: settings with more than one value, in the plan's order.
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
        """What the results are of."""
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
        """Hardware and versions that the job ran on; empty for one that failed before."""
        return self._described(self._machines[row])

    def model(self, row: int) -> dict[str, Any]:
        """The identity of the job's model (GgufFile.identity, perhaps with `draft`)."""
        return self._described(self._models[row])

    def trace(self, row: int) -> Path | None:
        """The folder of the job's trace, None where there is none (any more), and where a link
        leads away from the folder of the results."""
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
    """Results from checked rows of a file (engine.experiments.results.schema), in the plan's
    order.

    facts: `title` is checked to be text. places: numbers of the rows in the file, without it from
    1. Raises TraceFileError for settings that are not written.
    """
    places = places or range(1, len(rows) + 1)
    settings = [checked_settings(path, at, row[6]) for at, row in zip(places, rows, strict=True)]
    by_name = _columns(rows)
    names = list(dict.fromkeys(name for one in settings for name in one))
    if len(names) > _MOST_KEYS:
        raise TraceFileError(f"{path} has more than {_MOST_KEYS} settings.", "Write it again.")
    for name in names:
        by_name.setdefault(name, _setting([one.get(name) for one in settings]))
    return ExperimentResults(
        path,
        {**facts, "title": checked_text(path, "title", facts.get("title", ""))},
        max(planned, len(rows)),
        by_name,
        tuple(name for name in names if _varies([one.get(name) for one in settings])),
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


def _varies(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


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
