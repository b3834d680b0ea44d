"""Traces and results in and out of the window: export, opening, dropping, autosave, and runs kept
for the next start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QMimeData, QObject, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import QWidget

from app.engine_thread.bridge import AnyJob
from app.engine_thread.jobs.files import (
    ExportTrace,
    ReadResults,
    ReadText,
    ReadTrace,
    WriteFile,
    is_pasted,
    write_page_on,
    write_report_on,
)
from app.engine_thread.jobs.judging import RunSweep
from app.saved.autosave import Autosave, DamagedTrace, ReadLibrary, discard
from app.saved.errors import log
from app.saved.settings import unwritable
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import count_runs, notes_of
from app.window.banner import Banner, BannerButton
from app.window.dialogs.files import (
    PERFETTO_FILTER,
    RESULTS_FILTER,
    ExportDialog,
    QuitChoice,
    ask_before_quitting,
    ask_file,
    ask_new,
    ask_traces,
    place_page,
)
from app.window.dialogs.help import environment
from app.window.dialogs.runs import SweepDialog
from app.window.panels import Panels
from engine.errors import DraftscopeError
from engine.experiments.results.reader import find_results
from engine.plain_text import counted
from engine.trace.reopen import find_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from app.panels.tune.results_view import ResultsView


_AUTOSAVES = "autosave"
_TOLD_MS = 8000
_JOIN_TIMEOUT = 5.0


class Sessions(QObject):
    """Belongs to one window. data: the user's data folder; without it nothing is autosaved, and
    closing asks no question. quit_choice: what to do with unexported runs at the end; None asks the
    user."""

    message = Signal(str, int)
    """A sentence for the status line, with its milliseconds."""
    runs_asked = Signal()
    """The user wants the list of all runs."""
    library_read = Signal()
    """The runs of earlier sessions are listed."""
    _posted = Signal(object)

    def __init__(self, panels: Panels, data: Path | None) -> None:
        super().__init__(panels.window)
        self._settings, self._banners = panels.settings, panels.banners
        self._bridge = bridge = panels.bridge
        self._data, self._window, self._feed = data, panels.window, panels.feed
        self.quit_choice: QuitChoice | None = None
        self._discarded: list[TraceStore] = []
        self._was_interrupted = False
        self._library: ReadLibrary | None = None
        self._n_interrupted = 0
        self._is_closed = False
        self.autosave: Autosave | None = None
        self._unkept: Banner | None = None
        """The message that runs cannot be saved."""
        self._posted.connect(self._receive)
        if data is not None:
            self.autosave = Autosave(
                data / _AUTOSAVES, self._own_traces, self, lambda: bridge.has_run
            )
            self.autosave.failed.connect(self._tell_unsaved)
            bridge.run_started.connect(lambda _: self._save(Autosave.save_early))
            bridge.run_ended.connect(lambda _: self._save(Autosave.save_soon))
            bridge.exported.connect(self.autosave.note_export)
            self.autosave.start()
        bridge.exported.connect(self._show_exported)
        bridge.trace_shown.connect(self._remember)

    def open(self, *paths: Path) -> None:
        """Read traces, each a folder, a file in it, or another engine's file, and show one after
        the other; for several also the list of all runs. Needs no model."""
        self._banners.clear()
        self.read(paths)

    def read(self, paths: Sequence[Path]) -> None:
        """As `open`, but messages stay."""
        if len(paths) > 1:
            self.runs_asked.emit()
        self._read_first(paths)

    def _read_first(self, paths: Sequence[Path]) -> None:
        if paths:
            first, *rest = paths
            self._bridge.ask(
                ReadTrace(find_trace(first) or first),
                lambda job: None if job.cancelled.is_set() else self._read_first(rest),
            )

    def open_text(self, text: str) -> None:
        """Show another engine's output that was copied or dropped as text."""
        self._banners.clear()
        self._bridge.ask(ReadText(text))

    def ask(self) -> None:
        """Let the user choose traces, and open them."""
        if paths := ask_traces(self._window, self._settings):
            self.open(*paths)

    def export(self, store: TraceStore, *runs: RunRef) -> None:
        """Ask for a folder, without blocking the window, then write a trace, or some runs of it."""
        dialog = ExportDialog(store, self._settings, self._window, runs)
        dialog.chosen.connect(
            lambda folder, excel: self._write(
                ExportTrace(store, folder, excel_safe=excel, runs=runs)
            )
        )
        dialog.show()

    def _write(self, job: AnyJob, then: Callable[[AnyJob], object] | None = None) -> None:
        """Write a file or folder; messages about earlier ones are removed."""
        self._banners.clear()
        self._bridge.ask(job, then)

    def perfetto(self, run: RunRef) -> None:
        """Ask for a file and write a run, or its comparison, as a Perfetto trace."""
        from engine.trace.perfetto import new_builder, write_perfetto

        try:
            new_builder()
        except DraftscopeError as error:
            self._banners.add("warning", error.message, error.remedy)
            return
        path = ask_new(self._window, self._settings, "perfetto", PERFETTO_FILTER, (".pftrace",))
        if path is not None:
            write = partial(write_perfetto, lanes_of(run) or (run,))
            self._write(WriteFile("Perfetto trace", path, write), self._show_perfetto)

    def _show_perfetto(self, job: WriteFile) -> None:
        if job.is_complete:
            self._banners.add(
                "info",
                f"{job.what} written to {job.path}.",
                "Open it at ui.perfetto.dev or chrome://tracing.",
                self._folder_button(job.path.parent),
            )

    def _show_exported(self, export: ExportTrace) -> None:
        button = self._folder_button(export.folder)
        self._banners.add("info", f"{export.what} exported to {export.folder}.", "", button)

    def _folder_button(self, folder: Path) -> BannerButton:
        """A button that shows a folder in the file manager."""
        remedy = "Open the folder in a file manager."
        return "Open &Folder", lambda: self._open(folder, remedy)

    def report(self, run: RunRef) -> None:
        """Ask for a file and write the report on the run on show and the overlaid one, if any, or
        on its comparison."""
        path = ask_new(self._window, self._settings, "report")
        if path is None:
            return
        lanes, overlay = lanes_of(run), self._feed.overlay
        # a comparison covers both
        overlaid = None if overlay is None or overlay.run in lanes else overlay.run
        write = partial(write_report_on, lanes or (run,), overlaid, environment())
        self._write(WriteFile("Report", path, write), self._show_page)

    def share(self, run: RunRef) -> None:
        """Write the trace's runs as a page that begins with this one, and show where it is."""
        if (path := place_page(self._window, self._settings, "session")) is not None:
            write = partial(write_page_on, run, lanes_of(run))
            self._write(WriteFile("Page", path, write), self._show_page)

    def _show_page(self, job: WriteFile) -> None:
        if job.is_complete:
            remedy = "Open it in a browser; the page needs no other file."
            show = "&Open", lambda: self._open(job.path, remedy)
            folder = self._folder_button(job.path.parent)
            self._banners.add("info", f"{job.what} written to {job.path}.", "", show, folder)

    def _open(self, path: Path, remedy: str) -> None:
        if not QDesktopServices.openUrl(QUrl.fromLocalFile(str(path.absolute()))):
            self._banners.add("warning", f"No program on this desktop opens {path}.", remedy)

    def open_library(self) -> None:
        """List the runs of earlier windows, and say if this one cannot save any."""
        if self._data is None:
            return
        problem = unwritable(self._data)
        if problem:
            self._unkept = self._banners.add(
                "warning",
                problem,
                "Runs and the log are not saved: export the runs to keep (Ctrl+E).",
                sticky=True,
            )
        self._library = ReadLibrary(self._data / _AUTOSAVES, self._posted.emit)
        self._library.start(self._posted.emit)

    def may_end(self) -> bool:
        """Save unexported runs for the next start; if that is not possible, ask the user. False:
        the window stays open. A running run is ended."""
        autosave = self.autosave
        if autosave is None or self._is_closed:
            return True
        gone = [store for store in self._own_traces() if _is_deleted(store)]
        unexported = [store for store in autosave.unexported() if store not in gone]
        quit_choice = self.quit_choice if unexported else QuitChoice.KEEP
        if quit_choice is None and autosave.problem is not None:
            recorded = [runs for runs in self._bridge.recorded if runs.store in unexported]
            quit_choice = ask_before_quitting(self._window, recorded, autosave.problem.message)
        if quit_choice is QuitChoice.STAY:
            return False
        self._discarded = gone + (unexported if quit_choice is QuitChoice.DISCARD else [])
        kept = self._keep(autosave, self._discarded)
        return kept or not unexported or quit_choice is QuitChoice.DISCARD

    def interrupt(self) -> None:
        """Close the window without a question, at Ctrl-C in its terminal. Runs that cannot be saved
        keep it open the first time."""
        before, self.quit_choice = self.quit_choice, QuitChoice.KEEP
        ended = self._window.close()
        self.quit_choice = before
        if not ended and self._was_interrupted:
            self.close()
            self._window.close()
        elif not ended:
            self._was_interrupted = True
            log.error("Runs cannot be saved, so the window stays open; Ctrl-C again closes it.")

    def close(self) -> None:
        """A clean end."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._library is not None:
            self._library.cancelled.set()
            self._library.join(_JOIN_TIMEOUT)
        if self.autosave is not None:
            self.autosave.close(discarded=self._discarded)

    def _save(self, how: Callable[[Autosave], None]) -> None:
        if self.autosave is not None and not self._is_closed:
            how(self.autosave)

    def _own_traces(self) -> list[TraceStore]:
        """Traces kept by this program, not in the user's own folders."""
        return [runs.store for runs in (*self._bridge.earlier, *self._bridge.recorded)]

    def _keep(self, autosave: Autosave, but: Collection[TraceStore]) -> bool:
        """Save the others; returns whether everything is on disk."""
        QGuiApplication.setOverrideCursor(Qt.CursorShape.WaitCursor)
        try:
            if self._bridge.has_run and self._bridge.session_store not in but:
                self._bridge.end_run()
            failed = autosave.keep(but)
        finally:
            QGuiApplication.restoreOverrideCursor()
        if failed is not None:
            self._tell_unsaved(failed)
        return failed is None

    def _receive(self, event: ModelRuns | DamagedTrace | ReadLibrary) -> None:
        if isinstance(event, ModelRuns) and self.autosave is not None:
            self._n_interrupted += len(event.interrupted)
            self.autosave.take(event.store)
            with suppress(DraftscopeError):  # it is reported again at the next start
                for run in event.interrupted:
                    self.autosave.note_facts(run, "stops")
            self._bridge.add_earlier(event)
        elif isinstance(event, tuple):
            self._tell_damaged(*event)
        elif isinstance(event, ReadLibrary):
            self._tell_library()
            self.library_read.emit()

    def _tell_library(self) -> None:
        stores = [traces.store for traces in self._bridge.earlier]
        runs = (RunRef(store, i) for store in stores for i in list(store.runs))
        n = count_runs(run for run in runs if not notes_of(run.facts).deleted)
        if n:
            runs_text = counted(n, "run")
            self.message.emit(
                f"{runs_text} of earlier sessions are listed in Runs (Ctrl+8).", _TOLD_MS
            )
        if self._n_interrupted:
            self._banners.add(
                "info",
                "The last session ended in the middle of a run.",
                "Runs has its rounds up to about half a minute before.",
                ("&Show runs", self.runs_asked.emit),
            )

    def _tell_damaged(self, folder: Path, failed: DraftscopeError) -> None:
        banner: Banner = self._banners.add(
            "error",
            f"Runs of an earlier session cannot be opened. {failed.message}",
            "",
            ("&Delete them", lambda: self._discard(folder, banner)),
            sticky=True,
        )

    def _tell_unsaved(self, failed: DraftscopeError) -> None:
        message = f"The runs are not saved. {failed.message}"
        remedy = "Export them to another folder (Ctrl+E)."
        self._banners.take_down(self._unkept)  # the message from before the first run
        self._unkept = banner = self._banners.add("error", message, remedy, sticky=True)
        if self.autosave is not None:  # shown once, so it stays until it is no longer true
            self.autosave.saved.connect(lambda: self._banners.take_down(banner))

    def _discard(self, folder: Path, banner: Banner) -> None:
        banner.dismissed.emit()
        discard(folder)

    def _remember(self, folder: Path | None) -> None:
        if folder is not None and not is_pasted(folder):
            self._settings.add_recent_trace(folder)


def _is_deleted(store: TraceStore) -> bool:
    """Whether the user has deleted all runs of a trace."""
    return bool(store.runs) and all(notes_of(facts).deleted for facts in list(store.runs.values()))


class OpenedResults:
    """Result files of one window, whose panels are complete before anything is opened."""

    def __init__(self, panels: Panels, sessions: Sessions) -> None:
        self._bridge, self._panels, self._docks = panels.bridge, panels, panels.docks
        self._sessions, self._settings, self._window = sessions, panels.settings, panels.window

    def connect(self, view: ResultsView) -> None:
        """Connect the panel's signals."""
        view.trace_asked.connect(self._open_trace)
        view.again_asked.connect(lambda results: self.open(results.path))

    def ask(self) -> None:
        """Let the user choose a file, and open it."""
        asked = self._window, self._settings, "results", "Open results", RESULTS_FILTER
        if (path := ask_file(*asked)) is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        """Read a result file, or the one in a folder, and show it."""
        self._panels.banners.clear()
        self._bridge.ask(ReadResults(path), self._show)

    def ask_sweep(self) -> None:
        """Let the user choose what is swept, without blocking the window."""
        dialog = SweepDialog(self._bridge, self._panels.run_panel, self._settings, self._window)
        dialog.chosen.connect(lambda job: self._bridge.ask(job, self._show_sweep))
        dialog.show()

    def _show_sweep(self, job: RunSweep) -> None:
        path, total = job.plan.path, len(job.plan.jobs)
        if job.n_done:
            self.open(path.parent)
        if job.n_done < total:
            again = f"`draftscope sweep {path} --out {path.parent}` continues it."
            said = f"The sweep ended after {job.n_done} of {total} jobs."
            self._panels.banners.add("info", said, again)

    def _show(self, job: ReadResults) -> None:
        if job.found is not None:
            self._panels.results.show_results(job.found)
            self._docks.reveal("results")
        elif job.checked is not None:
            self._docks.reveal("conform")
            if not self._panels.conform.show_all(*job.checked):
                self._panels.banners.add(
                    "info", "Kernel checks are running.", "Stop them, then open the file."
                )

    def _open_trace(self, row: int) -> None:
        results = self._panels.results.results
        if results is None:
            return
        folder, name = results.trace(row), results.columns[0].text(row)
        if folder is not None:
            self._sessions.open(folder)
        elif error := results.error(row):
            self._panels.banners.add("info", f"Job {name} has no trace: {error}")
        else:
            where = results.path.parent
            self._panels.banners.add("info", f"The trace of job {name} is not in {where}.")


_MOST_LOOKED_AT = 32
_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")


def what_is(data: QMimeData) -> tuple[list[Path], ...] | str | None:
    """What a drop contains, None for nothing and for URLs, which are not fetched: a text, or
    models, the largest (the target) first and a split one by its first part; results of a sweep;
    traces by folder; and folders of several models. Anything else is passed to the reader of other
    engines' files, which reports errors."""
    paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()]
    if not paths and data.hasUrls():
        return None
    if not paths:
        return text if (text := data.text()).strip() else None
    models, results, traces, folders = (list[Path]() for _ in range(4))
    for path in paths[:_MOST_LOOKED_AT]:
        if (file := find_results(path)) is not None:
            results.append(file)
        elif (trace := find_trace(path)) is None and (inside := _models(path)):
            if len(inside) == 1:
                models += inside
            else:
                folders.append(path)
        else:
            traces.append(trace or path)
    models.sort(key=lambda path: path.stat().st_size, reverse=True)
    return tuple(list(dict.fromkeys(some)) for some in (models, results, traces, folders))


def _models(path: Path) -> list[Path]:
    """The model that a file is, or those in a folder."""
    found = [path]
    with suppress(OSError):
        found = sorted(path.iterdir()) if path.is_dir() else found
    found = [one for one in found if one.suffix.lower() == ".gguf" and os.path.isfile(one)]
    firsts = ((one, one.with_name(_PART.sub("-00001", one.name))) for one in found)
    return list(dict.fromkeys(first if os.path.isfile(first) else one for one, first in firsts))


def _in_words(found: tuple[list[Path], ...] | str) -> str:
    if isinstance(found, str):
        return "the text"
    *others, traces, folders = ([path.name for path in some] for some in found)
    names = [*chain(*others), *(traces if len(traces) < 2 else [f"{len(traces)} traces"])]
    return " and ".join(names or [f"one of the models in {folders[0]}"])


class DropTarget(QObject):
    """Takes drops on a widget, and says while hovering what would be opened."""

    hovers = Signal(str)
    """A description; empty when the drag has left."""
    dropped = Signal(QMimeData)

    def __init__(self, widget: QWidget) -> None:
        super().__init__(widget)
        widget.setAcceptDrops(True)
        widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.DragLeave:
            self.hovers.emit("")
        elif isinstance(event, QDragEnterEvent):
            found = what_is(event.mimeData())
            if found is None:
                return False
            event.acceptProposedAction()
            self.hovers.emit(f"Drop to open {_in_words(found)}")
        elif isinstance(event, QDropEvent) and event.type() == QEvent.Type.Drop:
            self.hovers.emit("")
            event.acceptProposedAction()
            self.dropped.emit(event.mimeData())
        else:
            return super().eventFilter(watched, event)
        return True
