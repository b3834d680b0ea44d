"""The report on the results of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.experiments.results.table import ExperimentResults, result_table, setting_text
from engine.report.common import machine_section, model_section, repeat_section, shown
from engine.report.parts import Facts, Part, Plot, Remark, Report, ReportTable, Section

_SPEED = "predicted_per_second"
_MOST_ROWS = 2000
_MOST_VALUES = 24
_BEST = 10


def sweep_report(results: ExperimentResults, command: Sequence[str] = ()) -> Report:
    """Tables and plots over the settings that vary, and what all jobs have in common."""
    heads, rows = result_table(results)
    speeds = results.columns[_SPEED]
    order = [i for i in np.argsort(-speeds, kind="stable").tolist() if speeds[i] == speeds[i]]
    n_failed = int((~results.done).sum())
    best = [rows[i] for i in order[:_BEST]]
    table: list[Part] = [ReportTable(heads, rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        table.append(Remark(f"and {len(rows) - _MOST_ROWS} more, in results.sqlite"))
    last = order[0] if order else 0
    return Report(
        f"Sweep: {results.title}",
        f"{results.n} of {results.planned} jobs, {n_failed} failed",
        [
            Section("Fastest", [ReportTable(heads, best)] if len(rows) > _BEST else []),
            Section("Plots", list(_plots(results))),
            Section("All jobs", table),
            Section("Settings of every job", list(_common(results))),
            *(_machines(results)),
            model_section(results.model(last) if results.n else {}),
            repeat_section(command),
        ],
    )


def _plots(results: ExperimentResults) -> Iterator[Part]:
    """Each setting that varies, at its best; two that vary against each other."""
    values = {axis: _values(results, axis) for axis in results.axes}
    few = {axis: found for axis, found in values.items() if 1 < len(found) <= _MOST_VALUES}
    for axis, found in few.items():
        yield Plot(
            "columns" if all(len(name) <= 8 for name in found) else "bars",
            f"Best speed by {axis}",
            found,
            {"best": [_best(results, {axis: name}) for name in found]},
            "tokens/s",
        )
    axes = list(few)
    for i, across in enumerate(axes[:3]):
        for down in axes[i + 1 : 3]:
            yield Plot(
                "heat",
                f"Best speed over {across} (across) and {down} (down)",
                few[across],
                {
                    y or "default": [_best(results, {across: x, down: y}) for x in few[across]]
                    for y in few[down][:8]
                },
                "tokens/s",
            )


def _values(results: ExperimentResults, axis: str) -> list[str]:
    found = (setting_text(results.settings(i).get(axis)) for i in range(results.n))
    return list(dict.fromkeys(found))


def _best(results: ExperimentResults, wanted: dict[str, str]) -> float | None:
    chosen = [
        float(results.columns[_SPEED][i])
        for i in range(results.n)
        if all(
            setting_text(results.settings(i).get(axis)) == value for axis, value in wanted.items()
        )
    ]
    return max((value for value in chosen if not math.isnan(value)), default=None)


def _common(results: ExperimentResults) -> Iterator[Part]:
    if results.n:
        every = results.settings(0)
        same = {name: shown(value) for name, value in every.items() if name not in results.axes}
        yield Facts(same)


def _machines(results: ExperimentResults) -> Iterator[Section]:
    """The machine, or each of several with its number of jobs."""
    known: dict[str, tuple[dict[str, Any], int]] = {}
    for i in range(results.n):
        machine = results.machine(i)
        key = json.dumps(machine, sort_keys=True)
        known[key] = machine, known.get(key, (machine, 0))[1] + 1
    for machine, n in list(known.values())[:20]:
        if machine:
            yield machine_section(machine, {"jobs": n} if len(known) > 1 else {})
