"""The result of tuning as the result file of a sweep, which the window opens: real runs, and the
simulated settings beside them, told apart by the setting `figures`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.options import RunOptions
from engine.sweep.plan import SweepJob, SweepPlan
from engine.sweep.schema import RESULTS_FILE
from engine.sweep.writer import JobResult, ResultsWriter
from engine.trace.what_if.rules import FIXED
from engine.tune.tune import Tuned

MEASURED, ESTIMATED = "measured", "estimated"


def write_results(tuned: Tuned, folder: Path, model: Path) -> Path:
    """Write the file into a folder; returns where it is. Raises OptionError where it cannot be
    written, TraceFileError where the folder has something else of that name."""
    data = tuned.data
    machine = {**data["environment"], "device": data["device"]}
    del machine["date"]
    rows = [*_measured(data), *_estimated(tuned)]
    jobs = tuple(
        SweepJob(i, _key(settings), settings, model, None, RunOptions(), ())
        for i, (settings, _) in enumerate(rows, 1)
    )
    plan = SweepPlan(folder / RESULTS_FILE, f"tune: {data['model'].get('name')}", "", jobs, 0)
    with ResultsWriter(folder, plan) as writer:
        for job, (_, figures) in zip(jobs, rows, strict=True):
            writer.add(job, JobResult(figures=figures, machine=machine, model=data["model"]))
        return writer.path


def _measured(data: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
    rows = []
    for one in data["confirmed"]:
        costs = one["costs"] or {}
        settings = _settings(one["setting"], MEASURED)
        rows.append(
            (
                settings,
                {
                    "predicted_per_second": one["tokens_per_second"],
                    "predicted_per_second_low": one["low"],
                    "predicted_per_second_high": one["high"],
                    "draft_acceptance_rate": costs.get("acceptance"),
                    "memory_bytes": float(one["undo_bytes"]),
                },
            )
        )
    return rows


def _estimated(tuned: Tuned) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
    rows = []
    for one in tuned.found:
        if one.rule == FIXED.name:
            setting = {"drafter": one.drafter, "n_max": one.draft.n_max, "p_min": one.draft.p_min}
            rate = one.acceptance if one.acceptance == one.acceptance else None
            rows.append(
                (
                    _settings(setting, ESTIMATED),
                    {"predicted_per_second": one.tokens_per_second, "draft_acceptance_rate": rate},
                )
            )
    return rows


def _settings(setting: Mapping[str, Any] | None, figures: str) -> dict[str, Any]:
    if setting is None:
        return {"figures": figures, "spec-type": "none"}
    return {
        "figures": figures,
        "spec-type": setting["drafter"],
        "spec-draft-n-max": setting["n_max"],
        "spec-draft-p-min": setting["p_min"],
    }


def _key(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
