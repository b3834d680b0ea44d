"""File dialogs: which model or trace to open, where to export a trace, and what to do with
unexported runs."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QFileDialog, QLabel, QMessageBox, QWidget

from app.saved.settings import Settings, unwritable
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import count_runs, notes_of, run_name
from app.widgets.build import ModelessDialog, made, words
from app.widgets.fields import add_row, file_path, new_form
from engine.plain_text import counted
from engine.trace.export import SESSION_FILE
from engine.trace.reopen import find_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_EXCEL_TIP = (
    "Text that a spreadsheet would treat as a formula (starting with = + - @ or a tab) gets an "
    "apostrophe in front, and files start with a byte order mark. Draftscope reads both kinds."
)


class ExportDialog(ModelessDialog):
    """Asks for an export folder. runs: only these are written. `chosen` gives the new folder and
    whether it is for Excel."""

    chosen = Signal(object, bool)  # Path

    def __init__(
        self, store: TraceStore, settings: Settings, parent: QWidget, runs: Sequence[RunRef] = ()
    ) -> None:
        super().__init__("Export run" if runs else "Export trace", parent)
        self._settings = settings
        tables = (one for one in store.tables.items() if one[1])
        rows = ", ".join(f"{name} ({counted(len(rows), 'row')})" for name, rows in tables)
        if runs:
            lanes = f" and the {len(runs) - 1} lanes next to it" if len(runs) > 1 else ""
            rows = f"only the rows of {run_name(runs[0])}{lanes}"
        about = words(f"A new folder with one CSV file per table: {rows}.")
        self.folder = file_path("")
        self.folder.setText(str(settings.folder("export")))
        self.folder.setMinimumWidth(60 * self.fontMetrics().averageCharWidth())
        add_row(form := new_form(), "&Into", self.folder, "Parent of the new folder")
        name = "Safe for &spreadsheets (Excel)"
        self.excel = made(QCheckBox, name, toolTip=_EXCEL_TIP, checked=settings.excel_safe)
        export = self.lay_out(about, form, self.excel, act="&Export")
        self.folder.textChanged.connect(lambda text: export.setEnabled(_can_hold(text)))

    def accept(self) -> None:
        parent = Path(self.folder.text()).absolute()
        self._settings.set_folder("export", parent)
        self._settings.set_folder("trace", parent)  # the next dialog starts there
        self._settings.excel_safe = self.excel.isChecked()
        self.chosen.emit(new_folder(parent, time.localtime()), self.excel.isChecked())
        super().accept()


def _can_hold(folder: str) -> bool:
    """Whether it is a folder, or can be created in one."""
    above = os.path.dirname(os.path.abspath(folder))
    is_new = bool(folder.strip()) and not os.path.exists(folder) and os.path.isdir(above)
    return is_new or os.path.isdir(folder)


def new_folder(parent: Path, now: time.struct_time) -> Path:
    """A free name inside `parent`, from date and time."""
    base = time.strftime("draftscope-trace-%Y%m%d-%H%M%S", now)
    folder, number = parent / base, 2
    while folder.exists():
        folder, number = parent / f"{base}-{number}", number + 1
    return folder


class LibraryDialog(ModelessDialog):
    """Asks for the llama.cpp build of lanes."""

    def __init__(self, path: str, parent: QWidget) -> None:
        super().__init__("llama.cpp library", parent)
        self.path = file_path("an installed package")
        self.path.setText(path)
        self.path.setMinimumWidth(60 * self.fontMetrics().averageCharWidth())
        form = new_form()
        tip = "Build tree, install prefix or wheel of llama.cpp; empty for an installed package"
        add_row(form, "&Build", self.path, tip)
        self.lay_out(QLabel(f"{tip}."), form, act="&OK")


MODEL_FILTER = "GGUF models (*.gguf);;All files (*)"
REPORT_FILTER = "HTML pages (*.html);;All files (*)"
PERFETTO_FILTER = "Traces of Perfetto (*.pftrace);;All files (*)"
TRACE_FILTER = (
    f"Traces, captures, logs and records ({SESSION_FILE} *.json *.jsonl *.gz *.log *.txt "
    "*.sse *.prom *.har *.csv *.md *.zip *.tar *.tgz);;All files (*)"
)
RESULTS_FILTER = "Results (*.sqlite *.json);;All files (*)"


def ask_model(parent: QWidget, settings: Settings, title: str) -> Path | None:
    """A GGUF file chosen by the user, None if cancelled."""
    return ask_file(parent, settings, "model", title, MODEL_FILTER)


class TraceDialog(QFileDialog):
    """Asks for traces: folders of exported ones, files in them, or files of other engines."""

    def __init__(self, parent: QWidget, folder: Path) -> None:
        super().__init__(parent, "Open trace", str(folder), TRACE_FILTER)
        self.setFileMode(QFileDialog.FileMode.ExistingFiles)

    def accept(self) -> None:
        """Qt enters a chosen folder; a trace's folder is the choice itself."""
        chosen = [Path(name) for name in self.selectedFiles()]
        if chosen and all(path.is_dir() and find_trace(path) for path in chosen):
            self.done(QFileDialog.DialogCode.Accepted)
        else:
            super().accept()


def ask_traces(parent: QWidget, settings: Settings) -> list[Path]:
    """The traces chosen by the user; none if cancelled."""
    dialog = TraceDialog(parent, settings.folder("trace"))
    if not dialog.exec():
        return []
    chosen = [Path(name) for name in dialog.selectedFiles()]
    settings.set_folder("trace", chosen[0].parent)
    return chosen


_PAGE = ".html", ".htm"


def place_page(parent: QWidget, settings: Settings, kind: str) -> Path | None:
    """A new HTML file in the last page's folder, at first the home folder; if that is not writable,
    the user's choice."""
    if unwritable(settings.folder("report")):
        return ask_new(parent, settings, kind)
    return _new_path(settings, kind, _PAGE)


def ask_new(
    parent: QWidget,
    settings: Settings,
    kind: str,
    accepted: str = REPORT_FILTER,
    suffixes: Sequence[str] = _PAGE,
) -> Path | None:
    """The output file for this kind; None if cancelled."""
    offered = str(_new_path(settings, kind, suffixes))
    name, _ = QFileDialog.getSaveFileName(parent, f"Write {kind}", offered, accepted)
    if not name:
        return None
    path = Path(name)
    settings.set_folder("report", path.parent)
    return path if path.suffix.lower() in suffixes else path.with_name(path.name + suffixes[0])


def _new_path(settings: Settings, kind: str, suffixes: Sequence[str]) -> Path:
    name = time.strftime(f"draftscope-{kind}-%Y%m%d-%H%M%S{suffixes[0]}")
    return settings.folder("report") / name


def ask_file(
    parent: QWidget, settings: Settings, purpose: str, title: str, accepted: str
) -> Path | None:
    """A file chosen by the user, starting in the last folder for this purpose; None if
    cancelled."""
    folder = str(settings.folder(purpose))
    name, _ = QFileDialog.getOpenFileName(parent, title, folder, accepted)
    if not name:
        return None
    path = Path(name)
    settings.set_folder(purpose, path.parent)
    return path


class QuitChoice(enum.Enum):
    """What to do with unexported runs when the window is closed."""

    KEEP = "kept for the next start"
    DISCARD = "discarded"
    STAY = "the window stays open"


def ask_before_quitting(parent: QWidget, recorded: Sequence[ModelRuns], problem: str) -> QuitChoice:
    """The user's choice for the runs of these models, which cannot be saved: DISCARD, or STAY, the
    default.

    problem: why they cannot be saved.
    """
    box = made(QMessageBox, parent, icon=QMessageBox.Icon.Warning, windowTitle="Quit")
    box.setText("Some runs were not exported and cannot be kept.")
    lines = [f"{runs.model}: {_counted(runs)}" for runs in recorded]
    lines += ["", f"{problem} Cancel to export them (Ctrl+E)."]
    box.setInformativeText("\n".join(lines))
    for label in box.findChildren(QLabel):  # model names come from a file
        label.setTextFormat(Qt.TextFormat.PlainText)
    discard = box.addButton("&Discard", QMessageBox.ButtonRole.DestructiveRole)
    cancel = box.addButton(QMessageBox.StandardButton.Cancel)
    box.setDefaultButton(cancel)
    box.setEscapeButton(cancel)
    box.exec()
    return QuitChoice.DISCARD if box.clickedButton() is discard else QuitChoice.STAY


def _counted(runs: ModelRuns) -> str:
    every = (RunRef(runs.store, i) for i in list(runs.store.runs))
    n = count_runs(run for run in every if not notes_of(run.facts).deleted)
    return counted(n, "run")
