"""What the window puts on the clipboard."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtGui import QGuiApplication

from app.engine_thread.bridge import Bridge
from app.engine_thread.feed import Feed
from app.saved.issue_text import issue_text
from app.window.dialogs.help import environment, environment_text, report
from app.window.panels import Panels

_MESSAGE_MS = 3000


class Copies:
    """`log_lines` gives the end of the log for reports."""

    def __init__(
        self, bridge: Bridge, panels: Panels, feed: Feed, log_lines: Callable[[], list[str]]
    ) -> None:
        self._bridge, self._panels, self._feed = bridge, panels, feed
        self._log_lines = log_lines

    def text(self) -> None:
        """The selected or generated text."""
        QGuiApplication.clipboard().setText(self._panels.tokens.copy_text())

    def step(self) -> None:
        """The round under the cursor, as Markdown."""
        self._put(self._panels.inspector.markdown())

    def issue(self) -> None:
        """Environment, model, options and the round in question, as Markdown."""
        run = self._feed.run
        if run is not None:
            self._put(issue_text(run, self._feed.cursor, environment()))

    def environment(self) -> None:
        """Versions and machine."""
        self._put(environment_text())

    def report(self) -> None:
        """Versions, model and the last log lines."""
        self._put(report(self._bridge.files, self._bridge.compute, self._log_lines()))

    def _put(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self._panels.status.showMessage("Copied", _MESSAGE_MS)
