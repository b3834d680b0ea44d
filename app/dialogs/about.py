"""About, and the report that a user pastes into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import PySide6
from PySide6.QtCore import Qt, qVersion
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QVBoxLayout, QWidget

from app.engine_thread.events import ModelFiles
from engine.version import version

_PACKAGES = ("torch", "numpy", "pyqtgraph", "gguf", "tokenizers")


def environment() -> dict[str, str]:
    """Versions and machine; reads package metadata, imports nothing."""
    facts = {
        "Draftscope": version(),
        "Python": platform.python_version(),
        "PySide6": f"{PySide6.__version__} (Qt {qVersion()})",
    }
    for name in _PACKAGES:
        facts[name] = metadata.version(name)
    facts["system"] = f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs"
    return facts


def environment_text() -> str:
    """The same as a Markdown list."""
    return "".join(f"- {name}: {value}\n" for name, value in environment().items())


def report(files: ModelFiles | None, compute: str, log_lines: Sequence[str]) -> str:
    """Environment, model and the last log lines as Markdown."""
    lines = [f"- {name}: {value}" for name, value in environment().items()]
    if files is not None:
        lines.append(f"- model: {files.target.name}, {files.info.architecture}, {compute or '-'}")
        lines.append(f"- model identity: {files.identity}")
    if files is not None and files.draft is not None:
        lines.append(f"- draft: {files.draft.name}")
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
