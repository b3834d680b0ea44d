"""The card below a finished text: why it ended, its figures, and the most useful next step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QFrame, QPushButton

from app.trace_models.run_facts import LiveNumbers, is_ours
from app.trace_models.shown_text import plain_tip, significant
from app.widgets.build import Fitting, flat_button, hbox, made, vbox, words
from engine.analysis.findings.audit import audit_sentence
from engine.analysis.run_cost import LEAST_PAIRS, MOST_PAIRS, PlainRatio
from engine.plain_text import counted
from engine.report.run import why_it_ended
from engine.trace.run_ref import RunRef
from engine.trace.timings import summary

FINDING, TUNE, COMPARE = "finding", "tune", "compare"
_LOW_ACCEPTANCE = 0.5


@dataclass(frozen=True, slots=True)
class NextStep:
    """kind: one of FINDING, TUNE, COMPARE. why: a sentence. round, seq_id: of a finding, None for
    one about the whole run."""

    kind: str
    why: str
    round: int | None = None
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """reason: a sentence. figures: each in a few words. audit: the result of its audit, "" without
    one. vs_plain: speed-up over plain decoding, None if not measured. is_plain: nothing is drafted,
    so there is nothing to measure."""

    reason: str
    figures: tuple[str, ...]
    vs_plain: PlainRatio | None
    is_plain: bool
    next_step: NextStep | None
    audit: str = ""


def run_end(run: RunRef) -> RunEnd | None:
    """The card of a run whose rows are in memory; None while it runs, and for a lane: the
    comparison has a verdict on it."""
    facts = run.facts
    if not run.ended or facts.lane:
        return None
    numbers = LiveNumbers.told(facts.summary or summary(run.store, run.run_id))
    speed = numbers.tokens_per_second
    types = facts.options.spec.types if facts.options is not None else facts.speculative_types
    is_plain = types is not None and not set(types) - {"none"}
    ratio = None if is_plain else PlainRatio.of(facts)
    rates = [one.told.get("draft_acceptance_rate") for one in facts.requests or ()]
    n = len(rates) - rates.count(None)
    where = f" in {n:,} of {len(rates):,} replies" if 0 < n < len(rates) else ""
    rate = None if numbers.acceptance is None else significant(numbers.acceptance)
    figures = (
        None if numbers.tokens is None else counted(numbers.tokens, "token"),
        None if rate is None else f"acceptance {rate}{where}",
        None
        if numbers.tokens_per_step is None or is_plain
        else f"{significant(numbers.tokens_per_step)} tokens/round",
        None if speed is None else f"{significant(speed)} tok/s",
    )
    return RunEnd(
        why_it_ended(run),
        tuple(filter(None, figures)),
        ratio,
        is_plain,
        _next_step(run, numbers, ratio, is_plain=is_plain),
        audit_sentence(facts),
    )


def _next_step(
    run: RunRef, numbers: LiveNumbers, ratio: PlainRatio | None, *, is_plain: bool
) -> NextStep | None:
    if (found := gravest_finding(run)) is not None:
        return found
    if run.facts.error or not is_ours(run.facts) or not numbers.tokens or is_plain:
        return None
    if ratio is not None and ratio.high < 1:
        return NextStep(TUNE, "Drafting makes this run slower; other settings may be faster.")
    if numbers.acceptance is not None and numbers.acceptance < _LOW_ACCEPTANCE:
        return NextStep(TUNE, "Most drafted tokens are rejected; other settings may be better.")
    return NextStep(COMPARE, "Check that rollbacks do not change the text.")


def gravest_finding(run: RunRef) -> NextStep | None:
    """The first error among the run's findings, else the first warning."""
    table = run.store.findings
    n = len(table)
    rows = np.flatnonzero(table.column("run_id", 0, n) == run.run_id).tolist()
    for severity in ("error", "warning"):
        for row in map(table.row, rows):
            if row["severity"] == severity:
                is_why = str(row["message"]).rstrip(".") in (run.facts.error or "")
                why = str(row["suggestion"] if is_why else row["message"])
                return NextStep(FINDING, why, row["round"], row["seq_id"])
    return None


_STEPS = {
    FINDING: ("Show finding", "Show the findings and the round"),
    TUNE: ("Tune", "Estimate the speed under other settings from this run"),
    COMPARE: ("Compare", "Decode the prompt in several lanes and show where they diverge"),
}
_WHY_CHARACTERS, _BOTH_CHARACTERS = 44, 60
"""Widths from which there is room for the sentence, and for both buttons in a single line."""
_WHY_LINES = 3
"""Most lines of the sentence."""
_MARGINS = 60
"""Margins of the parts of a single line."""
_MOST_CHARACTERS = 100
"""Most characters of a text in a wide window, so that its button is near."""


class EndCard(Fitting, QFrame):
    """Hidden until a run has ended, and after the user has closed it."""

    plain_asked = Signal()
    """Asks to measure plain decoding of the same request."""
    step_asked = Signal(object)  # NextStep

    def __init__(self) -> None:
        super().__init__()
        self.end: RunEnd | None = None
        self._low = self._offers_plain = False
        self.setObjectName("tokens.end_card")
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.setAutoFillBackground(True)
        self.setBackgroundRole(QPalette.ColorRole.AlternateBase)
        self.reason = words(selectable=True, bold=True)
        self.figures, self.audit = words(selectable=True), words(selectable=True)
        self.why = words(selectable=True, muted=True)
        about = (
            f"Run the same request with drafts and without, {LEAST_PAIRS} to {MOST_PAIRS} times in "
            "alternation: the lowest and the highest ratio of their speeds"
        )
        self.plain = made(QPushButton, "Measure plain", toolTip=about, clicked=self.plain_asked)
        self.step = made(QPushButton, _STEPS[COMPARE][0], clicked=self._take_step)
        called, top = "Close this card", Qt.AlignmentFlag.AlignTop
        self._close = flat_button("✕", "Close", accessibleName=called, clicked=self.hide)
        self._head = hbox((self.reason, 1), 0, (self._close, 0, top), spacing=8)
        self._measured = hbox((self.figures, 1), self.plain, 0, spacing=8)
        self._next = hbox((self.why, 1), self.step, 0, spacing=8)
        rows = self._head, self._measured, self.audit, self._next
        vbox(*rows, of=self, margins=(10, 4, 6, 6), spacing=2)
        most = _MOST_CHARACTERS * self.fontMetrics().averageCharWidth()
        for text in (self.reason, self.figures, self.audit, self.why):
            text.setMaximumWidth(most)
        self.hide()

    def show_end(self, end: RunEnd | None, *, can_measure: bool, can_compare: bool) -> None:
        """Show the end of a run, or nothing. can_measure: plain decoding can be measured now.
        can_compare: lanes can be compared now."""
        if end is not None and end.next_step is not None:
            self.step.setEnabled(can_compare or end.next_step.kind != COMPARE)
        if end is not None and end == self.end:
            self._show_figures(end, can_measure)
            return  # but stay closed if the user has closed it
        self.end = end
        self.setVisible(end is not None)
        if end is None:
            return
        self.reason.setText(end.reason)
        self.audit.setText(end.audit)
        self._show_figures(end, can_measure)
        step = end.next_step
        self.step.setVisible(step is not None)
        if step is not None:
            self.why.setText(step.why)
            text, tip = _STEPS[step.kind]
            self.step.setText(text)
            self.step.setToolTip(plain_tip(f"{step.why} {tip}."))
        self.fit()
        self.setAccessibleName(
            " ".join((end.reason, self.figures.text(), end.audit, step.why if step else ""))
        )

    def set_low(self, low: bool) -> None:
        """Use a single line, with the figures in the tooltip, or show everything."""
        if low == self._low:
            return
        self._low = low
        if low:
            self._head.insertWidget(1, self.plain)
            self._head.insertWidget(2, self.step)
        else:
            self._measured.insertWidget(1, self.plain)
            self._next.insertWidget(1, self.step)
        self.fit()

    @property
    def spare(self) -> int:
        """Height that a single line would save, pixels."""
        if self.isHidden() or self._low:
            return 0
        kept = max(self._head.minimumSize().height(), self.plain.minimumSizeHint().height())
        rows = self._head, self._measured, self._next
        return sum(row.minimumSize().height() for row in rows) - kept

    def minimumSizeHint(self) -> QSize:
        """A single line has room for one of the buttons."""
        least = super().minimumSizeHint()
        if self._low and not self.plain.isHidden() and not self.step.isHidden():
            least -= QSize(self.plain.minimumSizeHint().width() + self._head.spacing(), 0)
        return least

    def fit(self) -> None:
        """In a narrow window the sentence of the next step is in its button's tooltip. In a single
        line the audit's result follows the reason, if there is room."""
        metrics = self.fontMetrics()
        room = self.width() - self.step.sizeHint().width() - _MARGINS
        is_short = self.why.heightForWidth(room) <= _WHY_LINES * metrics.lineSpacing()
        wide = is_short and self.width() >= _WHY_CHARACTERS * metrics.averageCharWidth()
        has_step = self.end is not None and self.end.next_step is not None
        self.why.setVisible(wide and has_step and not self._low)
        is_needed = self.figures.text() or self._offers_plain  # the button is in their line
        self.figures.setHidden(self._low or not is_needed)
        # equal widths if stacked
        self.step.setMinimumWidth(0 if self._low else self.plain.sizeHint().width())
        self.audit.setHidden(self._low or not self.audit.text())
        one = self._low and self.width() < _BOTH_CHARACTERS * metrics.averageCharWidth()
        self.plain.setVisible(self._offers_plain and not (one and has_step))
        if self.end is None:
            return
        taken = [self.plain, self.step] if self._low else []
        room = self.width() - sum(part.sizeHint().width() for part in (*taken, self._close))
        both = f"{self.end.reason} {self.end.audit}" if self.end.audit else ""
        fits = self.reason.fontMetrics().horizontalAdvance(both) < room - _MARGINS
        self.reason.setText(both if self._low and both and fits else self.end.reason)

    def _show_figures(self, end: RunEnd, can_measure: bool) -> None:
        """Show the figures, and the speed-up over plain decoding or the button that measures it."""
        figures = list(end.figures)
        if end.vs_plain is not None:
            figures.append(end.vs_plain.words)
        self.figures.setText(" · ".join(figures))
        self.reason.setToolTip(plain_tip("\n".join(filter(None, (self.figures.text(), end.audit)))))
        self._offers_plain = can_measure and end.vs_plain is None and not end.is_plain
        self.fit()

    def _take_step(self) -> None:
        step: NextStep | None = self.end.next_step if self.end is not None else None
        if step is not None:
            self.step_asked.emit(step)
