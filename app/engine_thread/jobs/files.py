"""File jobs: traces and results read, traces and reports written, while the engine decodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from app.engine_thread.events import mark_of
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import SideJob
from app.trace_models.results import Results, read
from app.trace_models.run_comparison import compare_runs, text_difference
from app.trace_models.run_facts import run_names
from engine.experiments.results.reader import CONFORM, kind_of_json
from engine.long_work import ReportProgress
from engine.report.parts import Report
from engine.trace.export import SavedRows, append_csv, export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef, trace_of
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.conform.runner import Outcome


class ReadTrace(SideJob):
    """Read a trace or another engine's file and show it, or offer to if something else is on show
    by then. It is listed until it is closed."""

    has_progress = True
    busy = "reading"
    read: TraceStore | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._n_shown = 0

    def on_ask(self, status: EngineStatus) -> None:
        super().on_ask(status)
        self._n_shown = status.n_shown

    def run(self, progress: ReportProgress) -> None:
        progress(0, 1, "reading the trace")
        if self._folder.is_file():
            from engine.observe.files.importing import import_file

            store, cancelled = TraceStore(), self.cancelled.is_set
            import_file(store, self._folder, progress=progress, cancelled=cancelled)
            self.read = store
        else:
            self.read = open_trace(self._folder, progress=progress, cancelled=self.cancelled.is_set)

    def on_finish(self, status: EngineStatus) -> None:
        if self.read is not None and not self.cancelled.is_set():
            self.take(status, self.read)

    def take(self, status: EngineStatus, read: TraceStore) -> None:
        if status.n_shown == self._n_shown:
            status.show_trace(self._folder, read)
        else:
            status.trace_read.emit(self._folder, read)


_TEXT_NAME = "Pasted text"


def is_pasted(folder: Path) -> bool:
    """Whether this is the pseudo folder of a pasted text."""
    return re.fullmatch(rf"{_TEXT_NAME}( \d+)?", folder.name) is not None


class ReadText(ReadTrace):
    """Read another engine's output from a text, and show it like a file."""

    def __init__(self, text: str) -> None:
        super().__init__(Path(_TEXT_NAME))
        self._text = text

    def on_ask(self, status: EngineStatus) -> None:
        super().on_ask(status)
        n = status.n_texts = status.n_texts + 1
        self._folder = Path(f"{_TEXT_NAME} {n}" if n > 1 else _TEXT_NAME)

    def run(self, progress: ReportProgress) -> None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder) / self._folder
            self._folder.write_bytes(self._text.encode("utf-8", "replace"))
            super().run(progress)


class ReadRows(ReadTrace):
    """Reload the rows of a trace from its folder."""

    def __init__(self, store: TraceStore, folder: Path) -> None:
        super().__init__(folder)
        self._store = store

    def take(self, status: EngineStatus, read: TraceStore) -> None:
        status.take_rows(self._store, read)


class ExportTrace(SideJob):
    """Export a trace. runs: those to write, () = all. mark: size of the trace at the start, which
    the folder contains at least. is_complete: everything is written."""

    has_progress = is_awaited = True
    busy = "exporting"
    is_complete = False

    def __init__(
        self,
        store: TraceStore,
        folder: Path,
        *,
        excel_safe: bool = False,
        runs: Sequence[RunRef] = (),
    ) -> None:
        super().__init__()
        self.store, self.folder, self._excel_safe = store, folder, excel_safe
        self.runs = tuple(runs)
        self.what = "Run" if self.runs else "Trace"
        self.mark = mark_of(store)

    def run(self, progress: ReportProgress) -> None:
        export_csv(
            trace_of(self.runs) if self.runs else self.store,
            self.folder,
            progress=progress,
            cancelled=self.cancelled.is_set,
            excel_safe=self._excel_safe,
        )
        self.is_complete = True

    def on_finish(self, status: EngineStatus) -> None:
        if self.is_complete:
            status.exported.emit(self)


class SaveTrace(ExportTrace):
    """Append new rows of a trace to the folder that holds `saved` of it, None = nothing."""

    def __init__(self, store: TraceStore, folder: Path, saved: SavedRows | None) -> None:
        super().__init__(store, folder)
        self.saved = saved

    def run(self, progress: ReportProgress) -> None:
        self.saved = append_csv(
            self.store, self.folder, self.saved, progress=progress, cancelled=self.cancelled.is_set
        )
        self.is_complete = True


class ReadResults(SideJob):
    """Read a result file, or the one in a folder."""

    busy = "reading_results"
    found: Results | None = None
    checked: tuple[str, list[Outcome]] | None = None
    """Outcomes of conform (engine.conform.report.read_json), if the file holds them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def run(self, progress: ReportProgress) -> None:
        if kind_of_json(self._path) == CONFORM:
            from engine.conform.report import read_json

            self.checked = read_json(self._path)
        else:
            self.found = read(self._path)


class WriteFile(SideJob):
    """Write a file. what: its description. write: called with the path. is_complete: it is
    written."""

    is_complete = False

    def __init__(self, what: str, path: Path, write: Callable[[Path], object]) -> None:
        super().__init__()
        self.what, self.path, self._write = what, path, write

    def run(self, progress: ReportProgress) -> None:
        self._write(self.path)
        self.is_complete = True


def write_report_on(
    runs: Sequence[RunRef], overlaid: RunRef | None, environment: Mapping[str, str], path: Path
) -> None:
    """Write a report. runs: the run, or the lanes. overlaid: a second run to compare with."""
    from engine.report.page import write_report
    from engine.report.run import compare_report, run_report

    first = runs[0]
    if overlaid is not None:
        report = _report_on_two((first, overlaid), environment)
    elif first.facts.lane:
        report = compare_report(runs, environment)
    else:
        report = run_report(first, environment)
    write_report(report, path)


def write_page_on(shown: RunRef, lanes: Sequence[RunRef], path: Path) -> None:
    """Write the runs of a trace as one page, or if they are too many, only the lanes of the run on
    show, or that run alone."""
    from app.trace_models.session_page import write_session_page
    from engine.report.common import name_of
    from engine.report.session_data import chosen_runs, fits

    every = tuple(chosen_runs(shown.store))
    runs = next((some for some in (every, lanes) if some and fits(some)), (shown,))
    write_session_page(runs, f"Speculative decoding of {name_of(shown.facts)}", path, shown)


def _report_on_two(runs: tuple[RunRef, RunRef], environment: Mapping[str, str]) -> Report:
    from engine.report.run import pair_report

    figures = [
        (pair.label, pair.text(0), pair.text(1), pair.ratio_text) for pair in compare_runs(*runs)
    ]
    return pair_report(runs, run_names(*runs), figures, text_difference(*runs), environment)
