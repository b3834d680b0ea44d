"""The Server page: facts of a server, its slots, and its counters."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QLabel, QScrollArea, QWidget

from app.engine_thread.events import ServerConnected, ServerSeen
from app.trace_models.run_facts import counted_since
from app.trace_models.server_facts import known_facts, slot_lines
from app.trace_models.shown_text import NOT_OBSERVED, plain_tip
from app.widgets.build import scrolling, vbox, words
from app.widgets.fields import new_form

_FACTS = ("server", "build", "model", "parameters", "context", "slots", "drafting", "key")
_COUNTS = {
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "tokens_predicted_total": "generated",
}


class ServerPage(QScrollArea):
    """What the server reports; anything else is "not observed"."""

    def __init__(self) -> None:
        super().__init__()
        self._server: ServerConnected | None = None
        self._status = ServerSeen()
        self._first_run = 0
        """The store's first run since the connection."""
        self._labels = {name: words(selectable=True) for name in _FACTS}
        self._slots, self._counters = words(selectable=True), words(selectable=True)
        form = new_form()
        form.setVerticalSpacing(2)
        for name, label in self._labels.items():
            form.addRow(_muted(name), label)
        counted = _muted("Counters of the server since the connection, of all clients")
        parts = form, _muted("Slots"), self._slots, counted, self._counters, 1
        vbox(*parts, of=(page := QWidget()), margins=(6, 6, 6, 6), spacing=4)
        scrolling(self, page, "Server")

    @property
    def facts(self) -> dict[str, str]:
        shown = {name: label.text() for name, label in self._labels.items()}
        return shown | {"slot lines": self._slots.text(), "counters": self._counters.text()}

    def set_server(self, server: ServerConnected) -> None:
        """Show a server's facts from its first responses."""
        self._server, self._first_run = server, len(server.store.runs)
        self.set_status(ServerSeen())

    def set_status(self, status: ServerSeen) -> None:
        self._status = status
        self.refresh()

    def refresh(self) -> None:
        """Update after more was recorded."""
        status = self._status
        if self._server is None:
            return
        known = known_facts(self._server.facts, status.slots)
        texts = {
            **known,
            "key": {
                "keyring": "kept in the system's keyring",
                "session": "kept only for this session: there is no keyring",
            }.get(self._server.key_kept, "none"),
        }
        for name, label in self._labels.items():
            _show(label, str(texts.get(name) or NOT_OBSERVED))
        role = QPalette.ColorRole.BrightText if status.gone else QPalette.ColorRole.WindowText
        self._labels["server"].setForegroundRole(role)
        self._labels["server"].setToolTip(plain_tip(status.gone))
        if status.gone:
            _show(self._labels["server"], f"{known['server']} · not responding")
        when = ["when last connected:"] if status.gone else []
        _show(self._slots, "\n".join([*when, *slot_lines(status.slots)]))
        counts = counted_since(self._server.store, self._first_run)
        here = "Recorded here: no drafts yet"
        if counts is not None:
            here = "Recorded here: {:,} drafted, {:,} accepted".format(*counts)
        _show(self._counters, f"{_counted(status.counters)}\n{here}")


def _counted(counters: Mapping[str, float] | None) -> str:
    if counters is None:
        return "not available: the server runs without --metrics"
    known = [f"{counters[key]:,.0f} {word}" for key, word in _COUNTS.items() if key in counters]
    return ", ".join(known) or "nothing yet"


def _show(label: QLabel, text: str) -> None:
    if label.text() != text:
        label.setText(text)


def _muted(text: str) -> QLabel:
    return words(text, muted=True, alignment=Qt.AlignmentFlag.AlignTop)
