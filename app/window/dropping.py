"""What may be dropped on the window: models, exported traces, and files of other engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QEvent, QMimeData, QObject, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QWidget

from engine.experiments.results.reader import find_results
from engine.trace.reopen import find_trace

_MOST_LOOKED_AT = 8


@dataclass(frozen=True, slots=True)
class DroppedFiles:
    """Up to two models, the larger (the target) first; or the folder of a trace, or what another
    engine wrote; or results of a sweep."""

    models: tuple[Path, ...] = ()
    trace: Path | None = None
    results: Path | None = None

    @property
    def names(self) -> str:
        """What would be opened, in words."""
        if self.results is not None:
            return f"the results {self.results.name}"
        if self.trace is not None:
            return f"the trace {self.trace.name}"
        return " and ".join(path.name for path in self.models)


def what_is(data: QMimeData) -> DroppedFiles | None:
    """What a drop brings, None when nothing of it can be opened. Models go before traces."""
    paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()]
    models = [path for path in paths if path.suffix.lower() == ".gguf" and os.path.isfile(path)]
    if models:
        by_size = sorted(models, key=lambda path: path.stat().st_size, reverse=True)
        return DroppedFiles(tuple(by_size[:2]))
    results = [file for path in paths[:_MOST_LOOKED_AT] if (file := find_results(path)) is not None]
    if results:
        return DroppedFiles(results=results[0])
    traces = [folder for path in paths if (folder := find_trace(path)) is not None]
    if not traces:
        from engine.observe.files.importing import recognise_file

        traces = [path for path in paths[:_MOST_LOOKED_AT] if recognise_file(path)]
    return DroppedFiles(trace=traces[0]) if traces else None


class DropTarget(QObject):
    """Takes what is dropped on a widget, and says while it hovers what would be opened."""

    hovers = Signal(str)
    """In words; empty when it is gone."""
    dropped = Signal(object)  # DroppedFiles

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
            self.hovers.emit(f"Drop to open {found.names}")
        elif isinstance(event, QDropEvent) and event.type() == QEvent.Type.Drop:
            self.hovers.emit("")
            found = what_is(event.mimeData())
            if found is None:
                return False
            event.acceptProposedAction()
            self.dropped.emit(found)
        else:
            return super().eventFilter(watched, event)
        return True
