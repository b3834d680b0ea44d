"""Jobs one after another in a process of their own, so that one that ends it (a kernel that
crashes, memory that is not there) costs its own result and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from engine.experiments.results.writer import JobResult
from engine.experiments.sweep.plan import SweepJob

_LOOK_S = 1.0


class Worker(Protocol):
    """What runs jobs."""

    def run(self, job: SweepJob, trace: Path | None) -> JobResult: ...


def sweep_worker() -> Worker:
    """A worker that runs jobs for real; torch is imported here."""
    from engine.experiments.sweep.worker import SweepWorker

    return SweepWorker()


def one_by_one(
    jobs: Sequence[SweepJob],
    trace_of: Callable[[SweepJob], Path | None],
    make_worker: Callable[[], Worker] = sweep_worker,
) -> Generator[tuple[SweepJob, JobResult], None, None]:
    """Run jobs in order and give each with its result. trace_of: the folder for a job's trace.

    The process is killed when the generator is closed, and ends by itself soon after this one.
    """
    process: _WorkerProcess | None = None
    try:
        for job in jobs:
            if process is None:
                process = _WorkerProcess(make_worker)
            result = process.run(job, trace_of(job))
            if result is None:
                result, process = JobResult(process.how_it_ended()), None
            yield job, result
    finally:
        if process is not None:
            process.kill()


class _WorkerProcess:
    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._ours, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, make_worker, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()

    def run(self, job: SweepJob, trace: Path | None) -> JobResult | None:
        """The result of a job; None if the process has ended instead."""
        try:
            self._ours.send((job, trace))
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
        return f"The process that ran the job ended with {name}. See whether memory is enough."

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(connection: Connection, make_worker: Callable[[], Worker], parent: int) -> None:
    """The process: runs what it is sent until nobody sends any more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever asked for the sweep decides
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
