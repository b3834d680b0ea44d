"""Asking what becomes of runs that were not exported when the window is closed."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QMessageBox, QWidget

from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import notes_of


class QuitChoice(enum.Enum):
    """What becomes of runs that were not exported when the window is closed."""

    KEEP = "kept for the next start"
    DISCARD = "discarded"
    STAY = "the window stays open"


def ask_before_quitting(parent: QWidget, recorded: Sequence[ModelRuns], problem: str) -> QuitChoice:
    """What the user chooses for the runs of these models; KEEP by default.

    problem: why they cannot be kept, if so; KEEP is not offered then and STAY is the default.
    """
    box = QMessageBox(parent)
    box.setIcon(QMessageBox.Icon.Warning if problem else QMessageBox.Icon.Question)
    box.setWindowTitle("Quit")
    box.setText("There are runs that were not exported.")
    lines = [f"{runs.model}: {_counted(runs)}" for runs in recorded]
    if problem:
        lines += ["", f"They cannot be kept. {problem} Cancel to export them (Ctrl+E)."]
    box.setInformativeText("\n".join(lines))
    for label in box.findChildren(QLabel):  # names of models are a file's
        label.setTextFormat(Qt.TextFormat.PlainText)
    roles = QMessageBox.ButtonRole
    discard = box.addButton("&Discard", roles.DestructiveRole)
    cancel = box.addButton(QMessageBox.StandardButton.Cancel)
    keep = cancel if problem else box.addButton("&Keep for the next start", roles.AcceptRole)
    box.setDefaultButton(keep)
    box.setEscapeButton(cancel)
    box.exec()
    chosen = box.clickedButton()
    if chosen is discard:
        return QuitChoice.DISCARD
    return QuitChoice.STAY if chosen is cancel else QuitChoice.KEEP


def _counted(runs: ModelRuns) -> str:
    n = sum(not notes_of(facts).deleted for facts in runs.store.runs.values())
    return f"{n} run" if n == 1 else f"{n} runs"
