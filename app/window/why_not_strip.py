"""One line that says why a run does not speculate, or not as requested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QLabel

from app.engine_thread.feed import Pacer
from app.looks import Theme, icon
from app.trace_models.run_rows import Position
from app.trace_models.shown_text import plain_tip
from app.widgets.build import flat_button, hbox
from app.widgets.fitted_labels import ClampedLabel
from engine.draft.registry import DRAFTERS, meaning
from engine.options import RunOptions
from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, NOISE, REFERENCE
from engine.trace.run_ref import RunColumns, RunRef
from engine.trace.store import TraceStore

_PERIOD_MS = 500
_ICON, _MOST_LINES = 14, 2


class WhyNotStrip(QFrame):
    """The current reason, a button that goes to its round, and one for the next reason.

    It takes no room without a reason, or after it is dismissed, until there is a new reason or
    another run is shown.
    """

    position_selected = Signal(object)  # Position

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        theme.changed.connect(self._recolour)
        self._run: RunRef | None = None
        self._sizes = (-1, -1)
        self._at = 0
        self._dismissed: set[str] = set()
        self.reasons: list[WhyNotReason] = []
        self._pacer = Pacer(self._read, _PERIOD_MS, self)
        self._icon = QLabel()
        self.text = ClampedLabel("")
        self.text.clamp(_MOST_LINES)
        where = "Go to the first round with it"
        self.show_button = flat_button("Show", where, clicked=self._go)
        self.next_button = flat_button("", "Show the next reason", accessibleName="Next reason")
        self.next_button.clicked.connect(lambda: self._show(self._at + 1))
        until, called = "Hide until there is another reason", "Dismiss the reasons"
        self.close_button = flat_button("", until, accessibleName=called, clicked=self._dismiss)
        row = hbox(self._icon, (self.text, 1), of=self, margins=(10, 1, 4, 1), spacing=6)
        for button in (self.show_button, self.next_button, self.close_button):
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            row.addWidget(button)
        self.hide()

    def show_run(self, run: RunRef | None) -> None:
        """Explain a run, or nothing."""
        self._pacer.stop()
        if run != self._run:
            self._dismissed = set()
        self._run = run
        self._sizes, self._at = (-1, -1), 0
        self._read()

    def refresh(self) -> None:
        """Update the reasons soon, if the trace has grown."""
        if self._run is not None and self._sizes_now(self._run) != self._sizes:
            self._pacer.ask()

    def set_cursor(self, _position: Position | None) -> None:
        """Reasons are about the run, wherever the cursor is."""

    def _recolour(self) -> None:
        self._show(self._at)

    def _read(self) -> None:
        run = self._run
        reasons: list[WhyNotReason] = []
        if run is not None:
            self._sizes = self._sizes_now(run)
            reasons = why_not(run.store, run.run_id)
        if reasons != self.reasons:
            self.reasons = reasons
            self._show(self._at)

    @staticmethod
    def _sizes_now(run: RunRef) -> tuple[int, int]:
        return len(run.store.rounds), len(run.store.drafts)

    def _show(self, at: int) -> None:
        n = len(self.reasons)
        news = any(reason.topic not in self._dismissed for reason in self.reasons)
        self.setVisible(news)
        if not news:
            return
        self._at = at % n
        reason = self.reasons[self._at]
        drawing = icon(reason.severity, self._theme, f"status.{reason.severity}")
        self._icon.setPixmap(drawing.pixmap(QSize(_ICON, _ICON), self.devicePixelRatioF()))
        self.close_button.setIcon(icon("close", self._theme))
        self.setToolTip(plain_tip("\n".join(one.sentence for one in self.reasons)))
        self.setAccessibleName(f"{reason.severity}: {reason.sentence}")
        self.show_button.setVisible(reason.place is not None)
        self.next_button.setVisible(n > 1)
        self.next_button.setText(f"{self._at + 1} of {n}")
        self.text.say(reason.sentence)
        self.update()

    def _dismiss(self) -> None:
        self._dismissed = {reason.topic for reason in self.reasons}
        self.hide()

    def _go(self) -> None:
        place = self.reasons[self._at].place
        if place is not None and self._run is not None:
            seq_id, round_ = place
            self.position_selected.emit(Position(self._run, seq_id, round_, None))

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self._theme.color("ui.raised"))
        painter.fillRect(0, 0, self.width(), 1, self._theme.color("ui.border"))
        painter.end()


_ORDINARY = ("limit", "n_max")
"""Reasons for an empty draft that every run has at its end."""
_MOSTLY_EMPTY = 0.5
"""Lookup drafters often find nothing; a larger share of empty drafts is mentioned."""


@dataclass(frozen=True, slots=True)
class WhyNotReason:
    """One sentence. topic: what it is about, the same while its figures change. place: (sequence,
    round) of its first occurrence, None for the whole run."""

    topic: str
    severity: str
    sentence: str
    place: tuple[int, int] | None = None


def why_not(store: TraceStore, run_id: int) -> list[WhyNotReason]:
    """The reasons so far, errors first, then warnings, then the others."""
    run = store.runs.get(run_id, RunFacts())
    options = run.options
    found = _invalid(run) + _rollbacks(store, run_id) + _drafts(store, run_id, options)
    if run.speculative_types == ["none"]:
        sentence = "Speculation is off: the server was started without a drafter."
        found.append(WhyNotReason("off", "info", sentence))
    lane = (run.lane or "").partition(",")[0]
    drafted = RunColumns(store, "rounds", run_id)["num_draft_tokens"]  # even without an option
    drafts = run.draft_accept or run.synthetic or (drafted > 0).any()
    if options and not options.spec.types and lane not in (REFERENCE, NOISE) and not drafts:
        found.append(WhyNotReason("off", "info", "Speculation is off: this run has no drafter."))
    return sorted(found, key=lambda one: ("error", "warning", "info").index(one.severity))


def _invalid(run: RunFacts) -> list[WhyNotReason]:
    found = []
    if run.synthetic:
        found.append(
            WhyNotReason(
                "synthetic",
                "warning",
                "Synthetic acceptance: drafts are accepted at random, the output is invalid.",
            )
        )
    faults = run.options.faults if run.options else ()
    if faults:
        what = "Fault is" if len(faults) == 1 else f"{len(faults)} faults are"
        sentence = f"{what} switched on: {', '.join(faults)}. The output may be wrong."
        found.append(WhyNotReason(f"faults {sorted(faults)}", "warning", sentence))
    return found


def _rollbacks(store: TraceStore, run_id: int) -> list[WhyNotReason]:
    table, n = store.rounds, len(store.rounds)
    paths = table.column("rollback_path", 0, n)
    mine = table.column("run_id", 0, n) == run_id
    find = store.text_pool.find
    found = []
    for path, severity, what in (
        ("refused", "error", "was refused"),
        ("restore_depth", "warning", "fell back to a checkpoint"),
    ):
        code = find(path)
        rows = np.flatnonzero(mine & (paths == code)) if code >= 0 else np.zeros(0, np.int64)
        if not len(rows):
            continue
        first = table.row(int(rows[0]))
        place = f"round {first['round']:,}, sequence {first['seq_id']}"
        why = _bound(first)
        what = f"{what}: {why}" if why else what
        if len(rows) == 1:
            sentence = f"A rollback {what}, in {place}."
        else:
            sentence = f"{len(rows):,} rollbacks {what.replace('was', 'were')}, first in {place}."
        found.append(WhyNotReason(path, severity, sentence, (first["seq_id"], first["round"])))
    return found


def _bound(row: dict[str, Any]) -> str:
    """The limit that a rollback's depth exceeded."""
    depth, padded = row["rollback_depth"], ""
    if row["memory_rollback"] is not None and row["memory_rollback"] != depth:
        depth, padded = row["memory_rollback"], " with padding"
    for name, bound in (("n_rs_seq", row["n_rs_seq"]), ("valid depth", row["valid_depth"])):
        if depth is not None and bound is not None and depth > bound:
            return f"depth {depth}{padded} > {name} {bound}"
    return ""


def _drafts(store: TraceStore, run_id: int, options: RunOptions | None) -> list[WhyNotReason]:
    table, n = store.drafts, len(store.drafts)
    spec = options.spec if options else None
    lengths = table.column("num_draft_tokens", 0, n)
    drafters, reasons = (table.column(name, 0, n) for name in ("drafter", "reason"))
    mine = (table.column("run_id", 0, n) == run_id) & (lengths != MISSING)
    found = []
    for drafter in np.unique(drafters[mine]).tolist():
        asked = mine & (drafters == drafter)
        empty = np.flatnonzero(asked & (lengths == 0))
        name, n_asked = store.text_pool.text(drafter), int(asked.sum())
        known = DRAFTERS.get(name)
        counts = np.unique(reasons[empty], return_counts=True)
        by_reason = dict(zip(store.text_pool.decode(counts[0]), counts[1].tolist(), strict=True))
        for reason, how in (("p_min", "at length 0"), ("n_min", "as too short")):
            times = by_reason.pop(reason, 0)
            if times:
                own = getattr(spec, known.field, None) if known and known.field else spec
                limit = getattr(own, reason, None)
                bound = "" if limit is None else f" {limit}"
                verb = "ended" if reason == "p_min" else "discarded"
                what = f"{times:,} of {n_asked:,} drafts of {name}"
                row = empty[reasons[empty] == store.text_pool.find(reason)][0]
                sentence = f"{reason}{bound} {verb} {what} {how}."
                found.append(
                    WhyNotReason(f"{name} {reason}", "info", sentence, _place(store, int(row)))
                )
        rest = {reason: n for reason, n in by_reason.items() if reason not in _ORDINARY}
        share = 0 if known and known.needs else _MOSTLY_EMPTY
        if sum(rest.values()) > share * n_asked:
            most = max(rest, key=lambda reason: rest[reason])
            why = f": {meaning(most)}" if meaning(most) else ""
            row = empty[reasons[empty] == store.text_pool.find(most)][0]
            sentence = f"{name} found no draft in {sum(rest.values()):,} of {n_asked:,} rounds"
            found.append(
                WhyNotReason(
                    f"{name} empty",
                    "info",
                    f"{sentence}, mostly {most}{why}.",
                    _place(store, int(row)),
                )
            )
    return found


def _place(store: TraceStore, row: int) -> tuple[int, int]:
    seq_id, round_ = (store.drafts.column(name)[row] for name in ("seq_id", "round"))
    return int(seq_id), int(round_)
