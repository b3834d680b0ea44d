"""Plans and results of sweeps without a model: a worker that only counts, and results by number.

As a program it runs a plan with that worker in a process of its own, so that a test can kill it:
`python -m tests.support.sweeps PLAN FOLDER LOG [MOST]`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from engine.experiments.results.writer import JobResult
from engine.experiments.sweep.plan import SweepJob, SweepPlan, read_plan
from engine.experiments.sweep.sweep import Sweep, TraceOf, one_by_one
from engine.gguf.file import GgufFile
from resources import DEMO_DRAFT, DEMO_TARGET, SUITES

BUNDLED = ((DEMO_TARGET, DEMO_DRAFT), SUITES)


def write_plan(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def plan_of(folder: Path, n_lengths: int, n_seeds: int) -> SweepPlan:
    """A plan of n_lengths * n_seeds jobs on the demo model."""
    lengths, seeds = list(range(1, n_lengths + 1)), list(range(n_seeds))
    text = (
        f'title = "lengths"\n[settings]\nmodel = "demo"\nprompt = "def f"\n'
        f'spec-type = "draft-mtp"\n'
        f"[grid]\nspec-draft-n-max = {lengths}\nseed = {seeds}\n"
    )
    return read_plan(write_plan(folder, text), BUNDLED)


@cache
def demo_identity() -> dict[str, Any]:
    with GgufFile.open(DEMO_TARGET) as file:
        return file.identity()


def result_of(job: SweepJob) -> JobResult:
    """Figures that tell the job they are of; every seventh job fails."""
    if job.number % 7 == 0:
        return JobResult(f"Job {job.number} failed.", machine={"node": "a"})
    speed = float(job.number)
    return JobResult(
        figures={"predicted_per_second": speed, "predicted_n": 10},
        machine={"processor": "a"},
        model=demo_identity(),
        output="0" * 16,
    )


def instantly(
    jobs: Sequence[SweepJob], trace_of: TraceOf
) -> Generator[tuple[SweepJob, JobResult], None, None]:
    """An executor that computes nothing."""
    yield from ((job, result_of(job)) for job in jobs)


def write_results(folder: Path, n_lengths: int, n_seeds: int) -> Path:
    """The results file of a finished sweep."""
    with Sweep(plan_of(folder, n_lengths, n_seeds), folder / "out") as sweep:
        for _ in sweep.run(instantly):
            pass
    return sweep.path


class CountingWorker:
    """Notes every job that it begins in a file. `most`: the job that never ends, counted there."""

    def __init__(self, log: Path, most: int = 0) -> None:
        self._log, self._most = log, most

    def run(self, job: SweepJob, trace: Path | None) -> JobResult:
        with self._log.open("a") as log:
            log.write(f"{job.number}\n")
        if len(self._log.read_text().split()) == self._most:
            threading.Event().wait()
        return result_of(job)


def main(plan: str, folder: str, log: str, most: str = "0") -> None:
    execute = partial(one_by_one, make_worker=partial(CountingWorker, Path(log), int(most)))
    with Sweep(read_plan(Path(plan), BUNDLED), Path(folder)) as sweep:
        for _ in sweep.run(execute):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
