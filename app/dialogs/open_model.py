"""Asking for a model file."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QWidget

from app.settings import Settings

FILTER = "GGUF models (*.gguf);;All files (*)"


def ask_model(parent: QWidget, settings: Settings, title: str) -> Path | None:
    """A GGUF file chosen by the user, None when there was no choice."""
    name, _ = QFileDialog.getOpenFileName(
        parent,
        title,
        str(settings.folder("model")),
        FILTER,
        options=QFileDialog.Option.DontUseNativeDialog,
    )
    if not name:
        return None
    path = Path(name)
    settings.set_folder("model", path.parent)
    return path
