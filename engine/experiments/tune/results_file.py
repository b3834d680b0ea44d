"""The result of tuning as the result file of a sweep, which the window opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.experiments.sweep.plan import SweepJob, SweepPlan
from engine.experiments.sweep.schema import RESULTS_FILE
from engine.experiments.sweep.writer import JobResult, ResultsWriter
from engine.experiments.tune.result_rows import result_rows
from engine.options import RunOptions


def write_results(data: Mapping[str, Any], folder: Path, model: Path) -> Path:
    """Write the file into a folder; returns where it is. data: of
    engine.experiments.tune.tune.Tuned. Raises OptionError where it cannot be written,
    TraceFileError where the folder has something else of that name."""
    machine = {**data["environment"], "device": data["device"]}
    del machine["date"]
    rows = result_rows(data)
    jobs = tuple(
        SweepJob(i, row.key, row.settings, model, None, RunOptions(), ())
        for i, row in enumerate(rows, 1)
    )
    plan = SweepPlan(folder / RESULTS_FILE, f"tune: {data['model'].get('name')}", "", jobs, 0)
    with ResultsWriter(folder, plan) as writer:
        for job, row in zip(jobs, rows, strict=True):
            writer.add(job, JobResult(figures=row.figures, machine=machine, model=data["model"]))
        return writer.path
