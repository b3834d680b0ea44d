"""The dialogs of the help menu: versions and the report for bug reports, and all shortcuts."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import PySide6
from PySide6.QtCore import Qt, qVersion
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QDialogButtonBox,
    QHeaderView,
    QLabel,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.actions import SPECS
from app.actions.actions import Actions
from app.engine_thread.events import OpenedFiles
from engine.version import version

_PACKAGES = ("torch", "numpy", "pyqtgraph", "gguf", "tokenizers")


def environment() -> dict[str, str]:
    """Versions and machine; reads package metadata, imports nothing."""
    found = {
        "Draftscope": version(),
        "Python": platform.python_version(),
        "PySide6": f"{PySide6.__version__} (Qt {qVersion()})",
    }
    for name in _PACKAGES:
        found[name] = metadata.version(name)
    found["system"] = f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs"
    return found


def environment_text() -> str:
    """The same as a Markdown list."""
    return "".join(f"- {name}: {value}\n" for name, value in environment().items())


def report(files: OpenedFiles | None, compute: str, log_lines: Sequence[str]) -> str:
    """Environment, model and the last log lines as Markdown."""
    lines = [f"- {name}: {value}" for name, value in environment().items()]
    if files is not None:
        lines.append(f"- model: {files.target.name}, {files.info.architecture}, {compute or '-'}")
        lines.append(f"- model identity: {files.identity}")
    drafts = files.drafts if files is not None else ()
    lines += [f"- draft: {draft.path.name}, {draft.drafter}" for draft in drafts]
    return "\n".join([*lines, "", "```", *(log_lines or ("log is empty",)), "```", ""])


class AboutDialog(QDialog):
    """Version, licence and environment; it does not block the window."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle("About Draftscope")
        rows = "\n".join(f"{name} {value}" for name, value in environment().items())
        text = QLabel(
            "Inspect speculative decoding on hybrid recurrent language models: accepted and "
            "rejected drafts, rollbacks, snapshots and their cost.\n\n"
            f"{rows}\n{sys.executable}\n\nMIT licence"
        )
        text.setWordWrap(True)
        text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        copy = buttons.addButton("&Copy environment", QDialogButtonBox.ButtonRole.ActionRole)
        copy.setToolTip("Copy versions and machine as Markdown")
        copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(environment_text()))
        column = QVBoxLayout(self)
        column.addWidget(text)
        column.addWidget(buttons)


class ShortcutsDialog(QDialog):
    """Made from the actions themselves, so that it cannot be out of date."""

    def __init__(self, actions: Actions, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle("Keyboard shortcuts")
        self.table = QTableWidget(len(SPECS), 3)
        self.table.setHorizontalHeaderLabels(["Action", "Keys", "What it does"])
        self.table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.table.verticalHeader().hide()
        for row, spec in enumerate(SPECS):
            keys = actions[spec.id].shortcut().toString(QKeySequence.SequenceFormat.NativeText)
            for column, text in enumerate((spec.text.replace("&", ""), keys, spec.tip)):
                self.table.setItem(row, column, QTableWidgetItem(text))
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setStretchLastSection(True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.addWidget(self.table)
        layout.addWidget(buttons)
        self.resize(self.fontMetrics().averageCharWidth() * 110, 520)
