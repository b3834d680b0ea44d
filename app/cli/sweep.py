"""`draftscope sweep`: the jobs of a plan, in sequence or on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from app.cli.option_lines import declare, refuse_given
from app.cli.output import in_columns, print_json, print_line, print_report, tell
from app.cli.recorded import check_report, deliver_report
from engine.errors import DraftscopeError, OptionError
from engine.experiments.results.reader import read_results
from engine.experiments.results.table import (
    SWEEP,
    ExperimentResults,
    number,
    result_table,
    setting_text,
)
from engine.experiments.results.writer import JobResult, known_jobs
from engine.experiments.sweep.on_ray import OnRay
from engine.experiments.sweep.plan import JOB_KEYS, SweepJob, SweepPlan, read_plan
from engine.experiments.sweep.sweep import Executor, Sweep, one_by_one, pending_jobs, sweep_report
from engine.plain_text import duration_text
from engine.trace.typed_json import strict_json
from resources import DEMO_DRAFT, DEMO_SWEEP, DEMO_TARGET, SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "\n".join(f"  {key:<17} {about}" for key, (about, *_) in JOB_KEYS.items())
    declare(parser, __name__, job_keys=about)


def run(args: argparse.Namespace) -> int:
    """Run the remaining jobs; exit status 1 if one failed."""
    check_report(args)
    plan = _plan(args)
    if args.ray is None:
        refuse_given(args, "--ray", "--ship")
    if plan.n_equal:
        tell(f"{plan.n_equal} jobs are the same as another one and left out")
    folder = args.out or Path(f"{plan.path.stem}-sweep")
    if args.list:
        return _list(args, plan, folder)
    execute: Executor = OnRay(args.ray, ship=args.ship) if args.ray is not None else one_by_one
    with Sweep(plan, folder, traces=not args.no_traces, retry_failed=args.retry_failed) as sweep:
        if sweep.n_done:
            tell(f"{sweep.n_done} of {sweep.total} jobs have results already")
        try:
            for job, result, left_s in sweep.run(execute):
                place = f"[{sweep.n_done:>{len(str(sweep.total))}}/{sweep.total}]"
                left = f" ({duration_text(left_s)} left)" if left_s is not None else ""
                tell(f"{place} {_said(job, result, sweep.varying)}{left}", name="")
        except (KeyboardInterrupt, DraftscopeError):
            tell(f"{sweep.n_done} of {sweep.total} jobs are done; repeat the command to resume")
            raise
    results = read_results(sweep.path)
    deliver_report(args, lambda words: sweep_report(results, words))
    print_report(args, results_json(results), _lines(results))
    tell(f"results written to {sweep.path}")
    return int(not results.done.all())


def results_json(results: ExperimentResults) -> dict[str, Any]:
    """The results as one object: a list of jobs with settings and figures."""
    figures = {
        name: column.tolist()
        for name, column in results.columns.items()
        if name not in results.setting_names
    }
    return {
        "kind": "draftscope sweep",
        "version": 1,
        "title": results.title,
        "planned": results.planned,
        "axes": list(results.axes),
        "jobs": [
            {
                "settings": results.settings(i),
                **strict_json({name: values[i] for name, values in figures.items()}),
                "machine": results.machine(i),
                "model": results.model(i),
            }
            for i in range(results.n)
        ],
    }


def _plan(args: argparse.Namespace) -> SweepPlan:
    path = args.plan or (DEMO_SWEEP if args.demo else None)
    if path is None:
        raise OptionError("No plan is given.", "Name a TOML file, or use --demo.")
    bundled = (DEMO_TARGET, DEMO_DRAFT), SUITES
    return read_plan(path, bundled, on_demo=args.demo, elsewhere=args.ray is not None)


def _list(args: argparse.Namespace, plan: SweepPlan, folder: Path) -> int:
    known = known_jobs(folder, SWEEP)
    pending = {job.key for job in pending_jobs(plan, known, retry_failed=args.retry_failed)}
    if args.json:
        jobs = [
            {"number": j.number, "has_result": j.key not in pending, "settings": dict(j.settings)}
            for j in plan.jobs
        ]
        print_json({"title": plan.title, "jobs": jobs})
        return 0
    for job in plan.jobs:
        state = "to do" if job.key in pending else "has a result"
        said = ", ".join(f"{key} {setting_text(value)}" for key, value in job.settings.items())
        print_line(f"{job.number:>5}  {state:<12}  {said}")
    return 0


def _lines(results: ExperimentResults) -> Iterator[str]:
    heads, rows = result_table(results)
    yield f"{results.title}: {results.n} of {results.planned} jobs"
    yield ""
    at_right = [not 0 < i <= len(results.axes) for i in range(len(heads) - 1)]
    yield from in_columns([heads, *rows], [*at_right, False])
    n_failed = int((~results.done).sum())
    if n_failed:
        yield ""
        yield f"{n_failed} failed; --retry-failed runs them again"


def _said(job: SweepJob, result: JobResult, varying: Collection[str]) -> str:
    said = ", ".join(
        f"{key} {setting_text(value)}" for key, value in job.settings.items() if key in varying
    )
    came = result.error or f"{number(float(result.figures['predicted_per_second'] or 0), 1)} tok/s"
    return f"{said}: {came}" if said else came
