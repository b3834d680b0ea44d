"""Traces written and read on threads of their own, beside whatever the engine does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine_thread.events import (
    ProgressMade,
    ReportWritten,
    RunsTriaged,
    TraceExported,
    failure,
    mark_of,
    throttled,
)
from app.trace_models.results import Results, read
from app.trace_models.run_comparison import compare_runs, text_difference
from app.trace_models.run_facts import run_names
from app.trace_models.tune_surface import SurfaceRequest, TuneSurface, estimate
from engine.errors import Cancelled
from engine.report.parts import Report
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore


@dataclass(frozen=True)
class TraceRead:
    """A trace that was read from a folder, or made of what another engine wrote into a file."""

    folder: Path
    store: TraceStore


@dataclass(frozen=True)
class RowsRead:
    """The rows of a trace whose facts are in `store`, read again."""

    store: TraceStore
    rows: TraceStore


class ReadingEnded:
    """Nothing is read any more; TraceRead came before unless it was cancelled or failed."""


@dataclass(frozen=True)
class ResultsRead:
    """What a result file holds; None where it failed."""

    results: Results | None


@dataclass(frozen=True)
class SpeedsEstimated:
    """What came of a request; None where the run has no draft, or where it failed."""

    request: SurfaceRequest
    found: TuneSurface | None


class TraceJob:
    """One thread that writes or reads a trace; it may be cancelled and joined."""

    def __init__(self, name: str, work: Callable[[Callable[[], bool]], None]) -> None:
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=work, args=(self._cancelled.is_set,), name=name, daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end; False if it did not come in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


Post = Callable[[Any], None]


def start_export(store: TraceStore, folder: Path, excel_safe: bool, post: Post) -> TraceJob:
    """Write the tables; posts ProgressMade, perhaps CommandFailed, and TraceExported."""

    mark = mark_of(store)

    def work(cancelled: Callable[[], bool]) -> None:
        written: Path | None = None
        try:
            export_csv(
                store, folder, progress=throttled(post), cancelled=cancelled, excel_safe=excel_safe
            )
            written = folder
        except Cancelled:
            pass
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))
        post(TraceExported(store, mark, written))

    return TraceJob("export", work)


def start_reading(folder: Path, post: Post, into: TraceStore | None = None) -> TraceJob:
    """Read an exported trace, or a file of another engine; posts ProgressMade, TraceRead or
    CommandFailed, ReadingEnded. into: the trace that gets the rows, with RowsRead."""

    def work(cancelled: Callable[[], bool]) -> None:
        try:
            post(ProgressMade(0, 1, "reading the trace"))
            if folder.is_file():
                store = _imported(folder)
            else:
                store = open_trace(folder, progress=throttled(post), cancelled=cancelled)
            if not cancelled():
                post(TraceRead(folder, store) if into is None else RowsRead(into, store))
        except Cancelled:
            pass
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))
        post(ReadingEnded())

    return TraceJob("read trace", work)


def _imported(file: Path) -> TraceStore:
    """What another engine wrote as a trace, with what the rules find in it."""
    from engine.analysis.findings.check import record_findings
    from engine.observe.files.importing import import_file

    store = TraceStore()
    record_findings(store, import_file(store, file))
    return store


def start_triage(shown: RunRef, overlaid: RunRef, post: Post) -> TraceJob:
    """Compare two runs that have ended; posts RunsTriaged or CommandFailed."""

    def work(cancelled: Callable[[], bool]) -> None:
        try:
            from engine.observe.rescoring.triage import triage

            found = triage(shown, overlaid)
            if not cancelled():
                post(RunsTriaged(shown, overlaid, found))
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))

    return TraceJob("triage", work)


def start_estimate(request: SurfaceRequest, post: Post) -> TraceJob:
    """Estimate a run's speed under other settings; posts SpeedsEstimated, perhaps CommandFailed."""

    def work(_cancelled: Callable[[], bool]) -> None:
        found: TuneSurface | None = None
        try:
            found = estimate(request)
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))
        post(SpeedsEstimated(request, found))

    return TraceJob("estimate", work)


def start_report(
    runs: Sequence[RunRef],
    overlaid: RunRef | None,
    path: Path,
    environment: Mapping[str, str],
    post: Post,
) -> TraceJob:
    """Write the report on a run, on it and a second one, or on the lanes of a comparison; posts
    ReportWritten or CommandFailed."""

    def work(cancelled: Callable[[], bool]) -> None:
        try:
            from engine.report.compare import compare_report
            from engine.report.run import run_report
            from engine.report.write import write_report

            if overlaid is not None:
                report = _report_on_two((runs[0], overlaid), environment)
            elif runs[0].facts.lane:
                report = compare_report(runs, environment)
            else:
                report = run_report(runs[0], environment)
            write_report(report, path)
            post(ReportWritten(path))
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))

    return TraceJob("report", work)


def _report_on_two(runs: tuple[RunRef, RunRef], environment: Mapping[str, str]) -> Report:
    from engine.report.pair import pair_report

    figures = [
        (pair.label, pair.text(0), pair.text(1), pair.ratio_text) for pair in compare_runs(*runs)
    ]
    return pair_report(runs, run_names(*runs), figures, text_difference(*runs), environment)


def start_reading_results(path: Path, post: Post) -> TraceJob:
    """Read a result file, or the one in a folder; posts ResultsRead, perhaps CommandFailed."""

    def work(_cancelled: Callable[[], bool]) -> None:
        found: Results | None = None
        try:
            found = read(path)
        except BaseException as error:  # nobody waits for what a thread raises
            post(failure(error))
        post(ResultsRead(found))

    return TraceJob("read results", work)
