"""Asking for a model file or an exported trace."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QWidget

from app.saved.settings import Settings
from engine.trace.export import SESSION_FILE

MODEL_FILTER = "GGUF models (*.gguf);;All files (*)"
TRACE_FILTER = f"Exported traces ({SESSION_FILE})"


def ask_model(parent: QWidget, settings: Settings, title: str) -> Path | None:
    """A GGUF file chosen by the user, None when there was no choice."""
    return _ask(parent, settings, "model", title, MODEL_FILTER)


def ask_trace(parent: QWidget, settings: Settings) -> Path | None:
    """The folder of an exported trace, chosen by its session.json; None without a choice."""
    path = _ask(parent, settings, "trace", "Open trace", TRACE_FILTER)
    return None if path is None else path.parent


def _ask(
    parent: QWidget, settings: Settings, purpose: str, title: str, accepted: str
) -> Path | None:
    name, _ = QFileDialog.getOpenFileName(
        parent,
        title,
        str(settings.folder(purpose)),
        accepted,
        options=QFileDialog.Option.DontUseNativeDialog,
    )
    if not name:
        return None
    path = Path(name)
    settings.set_folder(purpose, path.parent)
    return path
