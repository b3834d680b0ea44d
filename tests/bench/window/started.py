"""`draftscope --demo` started once and timed: python -m tests.bench.window.started.

Prints one JSON object: time.monotonic() when the window was painted and when a token of the demo
was. Everything else is `draftscope --demo` with Run pressed as soon as it can be.
"""

from __future__ import annotations

import json
import sys
import time

from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtWidgets import QApplication

_POLL_MS = 10


class _Witness(QObject):
    """Sees the first window painted, presses Run, and closes the window at the first token."""

    def __init__(self, app: QApplication) -> None:
        super().__init__(app)
        self.seen: dict[str, float] = {}
        self._app = app
        self._poll = QTimer(self)
        self._poll.timeout.connect(self._look)
        app.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint and watched.objectName() == "main":
            self._app.removeEventFilter(self)
            QTimer.singleShot(0, self._painted)
        return False

    def _painted(self) -> None:
        self.seen["window"] = time.monotonic()
        self._poll.start(_POLL_MS)

    def _look(self) -> None:
        from app.window.dialogs.files import QuitChoice
        from app.window.window import MainWindow

        (window,) = (w for w in self._app.topLevelWidgets() if isinstance(w, MainWindow))
        if window.bridge.can_start and not window.bridge.store.runs:
            window.actions_by_id["run.start"].trigger()
        for area in window.tokens.areas.values():
            stream = area.stream
            if stream is not None and any(stream.rounds):  # a round after the prompt's
                self._poll.stop()
                area.viewport().repaint()
                self.seen["token"] = time.monotonic()
                window.actions_by_id["run.stop"].trigger()
                window.sessions.quit_choice = QuitChoice.DISCARD
                window.close()


def main() -> int:
    """Open the window, close it at the first token, print both times."""
    from app.__main__ import main as draftscope

    app = QApplication(["draftscope"])
    witness = _Witness(app)
    status = draftscope(["--demo"])
    print(json.dumps(witness.seen))
    return status


if __name__ == "__main__":
    sys.exit(main())
