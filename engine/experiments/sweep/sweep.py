"""Sweeps from plan to results: pending jobs are run, each result written at once.

Jobs run one after another in a separate process, so that one that crashes it costs only its own
result. Exported traces travel between machines as the bytes of their files. The report covers the
results of a sweep.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import Cancelled, DraftscopeError, ModelFileError, OptionError
from engine.experiments.results.table import (
    FAILED,
    SWEEP,
    ExperimentResults,
    result_table,
    setting_text,
    trace_folder,
)
from engine.experiments.results.writer import JobResult, ResultsWriter
from engine.experiments.sweep.plan import MODEL, SweepJob, SweepPlan
from engine.files import unwritable
from engine.gguf.file import GgufFile
from engine.report.common import machine_section, model_section, repeat_section, shown
from engine.report.parts import Part, Plot, Remark, Report, ReportTable, Section
from engine.trace.export import check_target
from engine.trace.replacing import is_alive, replacing

if TYPE_CHECKING:
    from engine.experiments.sweep.worker import SweepWorker


Results = Generator[tuple[SweepJob, JobResult], None, None]
TraceOf = Callable[[SweepJob], Path | None]


Executor = Callable[[Sequence[SweepJob], TraceOf], Results]
"""Runs jobs somewhere; yields each with its result, in any order. Closing the generator cancels the
rest."""


def pending_jobs(
    plan: SweepPlan, known: Mapping[str, str], *, retry_failed: bool
) -> list[SweepJob]:
    """The jobs that are still to run. known: the status of each job that has a row, by key."""
    kept = {key for key, status in known.items() if not (retry_failed and status == FAILED)}
    return [job for job in plan.jobs if job.key not in kept]


class Sweep:
    """A plan and its results folder, ready to resume. A context manager: within it no other sweep
    writes to the folder."""

    def __init__(
        self, plan: SweepPlan, folder: Path, *, traces: bool = True, retry_failed: bool = False
    ) -> None:
        """Raises OptionError for a folder that cannot be written or a model file that has changed
        since the first results, TraceFileError for a folder with other contents."""
        self._writer = ResultsWriter(folder, SWEEP, plan.title, len(plan.jobs), plan.text)
        self.path = self._writer.path
        self._traces = traces
        self.total = len(plan.jobs)
        self.varying = frozenset(
            key
            for one in plan.jobs
            for key in {**plan.jobs[0].settings, **one.settings}
            if one.settings.get(key) != plan.jobs[0].settings.get(key)
        )
        self.pending = pending_jobs(plan, self._writer.finished(), retry_failed=retry_failed)
        try:
            self._check_models()
        except BaseException:
            self._writer.close()
            raise

    @property
    def n_done(self) -> int:
        """Jobs of the plan with a row."""
        return self.total - len(self.pending)

    def run(self, execute: Executor) -> Iterator[tuple[SweepJob, JobResult, float | None]]:
        """Run pending jobs; the row of a job is written before it is yielded, with the expected
        time left, seconds, from the mean since the start; None if nothing is left.

        Raises DraftscopeError if a row or trace cannot be written: the job stays pending.
        """
        began, at_start, pending = monotonic(), self.n_done, list(self.pending)
        with closing(execute(pending, self._trace_of)) as results:
            for job, result in results:
                if result.unwritable:
                    raise DraftscopeError(result.unwritable, "Free some space, then sweep again.")
                self._writer.add(job.key, job.number, job.settings, self._with_trace(job, result))
                self.pending.remove(job)
                done = self.n_done
                mean = (monotonic() - began) / (done - at_start)
                left = mean * len(self.pending) if self.pending else None
                yield job, result, left

    def _trace_of(self, job: SweepJob) -> Path | None:
        return trace_folder(self.path, job.key) if self._traces else None

    def _with_trace(self, job: SweepJob, result: JobResult) -> JobResult:
        """The result, once its trace is in place."""
        folder = self._trace_of(job)
        if result.trace and folder is not None:
            unpack_trace(result.trace, folder)
        return result

    def _check_models(self) -> None:
        """Check that each name still refers to the same model file."""
        known = self._writer.models()
        for job in self.pending:
            for identity in known.pop(str(job.settings[MODEL]), []):
                with suppress(ModelFileError):  # reported by the job's result
                    if job.model.is_file() and not _same_model(job.model, identity):
                        raise OptionError(
                            f"{job.model.name} has changed since the first results in "
                            f"{self.path.parent}.",
                            "Name another folder with --out.",
                        )

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _same_model(path: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a file equals that of earlier results, which may be elsewhere."""
    with GgufFile.open(path) as file:
        found = file.identity()
    content = found["content"], identity.get("content")
    return all(found[name] == identity.get(name) for name in ("size", "sha256")) and (
        None in content or content[0] == content[1]
    )


_LOOK_S, _POLL_S = 1.0, 0.1


def sweep_worker() -> SweepWorker:
    """A worker for real jobs; torch is imported here."""
    from engine.experiments.sweep.worker import SweepWorker

    return SweepWorker()


def one_by_one(
    jobs: Sequence[SweepJob],
    trace_of: Callable[[SweepJob], Path | None],
    make_worker: Callable[[], SweepWorker] = sweep_worker,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[tuple[SweepJob, JobResult], None, None]:
    """Run jobs in order and yield each with its result. trace_of: the folder for a job's trace.

    The process is killed when the generator is closed, and ends by itself soon after this one.
    Raises Cancelled.
    """
    process: _WorkerProcess | None = None
    try:
        for job in jobs:
            if process is None:
                process = _WorkerProcess(make_worker)
            result = process.run(job, trace_of(job), cancelled)
            if result is None:
                result, process = JobResult(process.how_it_ended()), None
            yield job, result
    finally:
        if process is not None:
            process.kill()


class _WorkerProcess:
    def __init__(self, make_worker: Callable[[], SweepWorker]) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._ours, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, make_worker, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()

    def run(
        self, job: SweepJob, trace: Path | None, cancelled: Callable[[], bool]
    ) -> JobResult | None:
        """The result of a job; None if the process has ended instead. Raises Cancelled."""
        try:
            self._ours.send((job, trace))
            while not self._ours.poll(_POLL_S):
                if cancelled():
                    raise Cancelled
            result = self._ours.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(result, JobResult)
        return result

    def how_it_ended(self) -> str:
        """Why there is no result. Waits for the end of the process."""
        self._process.join()
        code = self._process.exitcode or 0
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"status {code}"
        self._ours.close()
        return f"The process that ran the job ended with {name}. Check the memory needed."

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(connection: Connection, make_worker: Callable[[], SweepWorker], parent: int) -> None:
    """Main function of the process: runs jobs until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the sweep decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    worker = make_worker()
    with suppress(EOFError, OSError):
        while True:
            job, trace = connection.recv()
            connection.send(worker.run(job, trace))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


_FOLDER = "draftscope-sweep-"
_NAME = re.compile(r"[a-z][a-z0-9_]*\.(csv|json)")


def pack_trace(folder: Path) -> dict[str, bytes]:
    """Its files by name, compressed."""
    return {path.name: zlib.compress(path.read_bytes(), 1) for path in sorted(folder.iterdir())}


def unpack_trace(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into a folder, replacing an earlier trace. Raises OptionError."""
    try:
        with replacing(folder, check_target, lambda _: set(files)) as stage:
            for name, content in files.items():
                if _NAME.fullmatch(name):
                    (stage / name).write_bytes(zlib.decompress(content))
    except OSError as error:
        raise unwritable(folder, error, "Check the folder and its rights.") from error


def own_folder() -> Path:
    """A new temporary folder of this process.

    Folders of dead processes are removed, because workers may be killed at any moment.
    """
    places = Path(tempfile.gettempdir())
    for left in places.glob(f"{_FOLDER}*-*"):
        pid = left.name.removeprefix(_FOLDER).split("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=places))


_SPEED = "predicted_per_second"
_MOST_ROWS = 2000
_MOST_VALUES = 24
_BEST = 10


def sweep_report(results: ExperimentResults, command: Sequence[str] = ()) -> Report:
    """Tables and plots over the varied settings, and what all jobs have in common."""
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
    """Each varied setting at its best; two of them against each other."""
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
        yield same


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
