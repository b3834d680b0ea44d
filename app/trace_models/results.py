"""Results of a suite, a sweep or tune for the window: named columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.trace_models.shown_text import NOT_OBSERVED, significant
from engine.experiments.results.reader import read_results
from engine.experiments.results.table import FIGURES, SUITE, TUNE, ExperimentResults, setting_text
from engine.plain_text import size_text

SPEED, MEMORY = "predicted_per_second", "memory_bytes"
_HEADS = {
    "predicted_per_second": "tok/s",
    "predicted_per_second_low": "slowest",
    "predicted_per_second_high": "fastest",
    "draft_acceptance_rate": "acceptance",
    "mean_acceptance_length": "tok/round",
    "prompt_per_second": "prompt tok/s",
    "memory_bytes": "memory",
    "snapshot_bytes": "snapshot",
    "weight_bytes": "weights",
    "num_findings": "findings",
    "num_restores": "restores",
}
_FIRST = (
    "predicted_per_second",
    "predicted_per_second_low",
    "predicted_per_second_high",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "memory_bytes",
    "num_findings",
)
"""Figures shown before the others."""
_LOWER_IS_BETTER = ("_ms", "_bytes", "_s")
_FEWER_IS_BETTER = ("n_rs_seq", "num_restores", "num_findings")

_ROWS = {SUITE: "request", TUNE: "setting"}
"""Names of rows by kind of experiment."""
_LONGEST, _LONGEST_TIP = 60, 600
"""Characters of a text in a cell, and in its tooltip."""


@dataclass(frozen=True)
class ResultColumn:
    """values: float64 [n], NaN if missing, or objects of str. is_figure: measured, not set.
    is_better_low: whether smaller is better."""

    name: str
    title: str
    tip: str
    values: np.ndarray
    is_figure: bool = False

    @property
    def is_text(self) -> bool:
        return self.values.dtype == object

    @property
    def is_better_low(self) -> bool:
        """Whether smaller is better: times, sizes, counts of errors."""
        return self.name.endswith(_LOWER_IS_BETTER) or self.name in _FEWER_IS_BETTER

    def text(self, row: int) -> str:
        value = self.values[row]
        return short_text(str(value)) if self.is_text else self.said(float(value))

    def said(self, number: float) -> str:
        """A number in this column's format."""
        if not math.isfinite(number):
            return NOT_OBSERVED
        if self.name.endswith("_bytes") and number >= 0:
            return size_text(number)
        if number == round(number) and abs(number) < 1e9:
            return f"{round(number):,}" if self.is_figure else str(round(number))
        return significant(number) if self.is_figure else f"{number:g}"

    def order(self) -> np.ndarray:
        """Row indices in ascending order, missing values last: int64 [n]."""
        if not self.is_text:
            return np.argsort(self.values, kind="stable")
        return np.array(
            sorted(
                range(len(self.values)), key=lambda row: (not self.values[row], self.values[row])
            ),
            np.int64,
        )


@dataclass(frozen=True)
class Results:
    """n rows. axes: names of the varied settings. note: applies to all rows. trace: a row's trace
    folder, or None; error: why a row has no figures, else empty; about: all settings of a row in
    words."""

    path: Path
    title: str
    n: int
    columns: tuple[ResultColumn, ...]
    axes: tuple[str, ...]
    note: str
    trace: Callable[[int], Path | None] = field(compare=False)
    error: Callable[[int], str] = field(compare=False)
    about: Callable[[int], str] = field(compare=False)

    def column(self, name: str) -> ResultColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    @property
    def figures(self) -> list[ResultColumn]:
        """Measured columns with at least one value."""
        return [c for c in self.columns if c.is_figure and np.isfinite(c.values).any()]


def read(path: Path) -> Results:
    """Read a results file. Raises TraceFileError if it cannot be read or is something else."""
    found = read_results(path)
    return of_experiment(found, _ROWS.get(found.facts.get("kind", ""), "job"))


def of_experiment(found: ExperimentResults, row: str = "job") -> Results:
    """Results for display. Constant settings are listed once, in the note. row: name of a row."""
    values = found.columns
    columns = [ResultColumn("number", row, f"Number of the {row}", values["number"] * 1.0)]
    columns += [
        ResultColumn(name, _setting_title(name), f"Setting {name}", values[name])
        for name in found.axes
    ]
    names = (*_FIRST, *(name for name in FIGURES if name not in _FIRST))
    columns += [
        ResultColumn(name, _HEADS.get(name, name), _about(name), values[name], is_figure=True)
        for name in names
        if np.isfinite(values[name]).any() or name == SPEED
    ]
    columns.append(ResultColumn("result", "result", "done, or why it failed", _outcome(found)))
    failed = int((~found.done).sum())
    of = f" of {found.planned:,}" if found.n < found.planned else ""
    parts = [f"{found.n:,}{of} {row}s"]
    if failed:
        parts.append(f"{failed:,} failed")
    same = sorted(found.setting_names - set(found.axes))
    if found.n and same:
        parts.append(
            ", ".join(f"{n} {short_text(setting_text(found.settings(0)[n]))}" for n in same)
        )
    return Results(
        found.path,
        short_text(found.title) or found.path.parent.name,
        found.n,
        tuple(columns),
        found.axes,
        " · ".join(parts),
        found.trace,
        lambda row: "" if found.done[row] else short_text(values["error"][row], _LONGEST_TIP),
        lambda row: short_text(_all_settings(found.settings(row)), _LONGEST_TIP),
    )


def _all_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {short_text(setting_text(v))}" for name, v in settings.items())


def _setting_title(name: str) -> str:
    """n_max for spec-draft-n-max, as everywhere in the window."""
    _, found, rest = name.partition("spec-draft-")
    return rest.replace("-", "_") if found else name


def _about(name: str) -> str:
    words = FIGURES[name]
    return f"{words[0].upper()}{words[1:]} ({name})"


def _outcome(found: ExperimentResults) -> np.ndarray:
    words = np.empty(found.n, object)
    words[:] = [
        "done" if done else f"failed: {error}"
        for done, error in zip(found.done, found.columns["error"], strict=True)
    ]
    return words


def short_text(text: str, longest: int = _LONGEST) -> str:
    """The beginning of a text in one line."""
    line = " ".join(text[: 2 * longest].split())
    is_whole = len(line) <= longest and len(text) <= 2 * longest
    return line if is_whole else f"{line[:longest]}…"
