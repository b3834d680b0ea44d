"""The lanes of a comparison as cards: line, settings, verdict and cost; one of them is chosen."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFontMetrics, QIcon, QKeyEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QGridLayout, QSizePolicy, QWidget

from app.looks import Theme, icon
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.shown_text import NOT_OBSERVED, error_text, plain_tip, significant
from app.widgets.build import Fitting
from app.widgets.line_styles import lane_pen
from engine.analysis.run_cost import RunCost, is_timed
from engine.analysis.verdict import SUSPECT, LaneVerdict
from engine.plain_text import size_text
from engine.trace.facts import RunFacts
from engine.trace.records import NOISE, PHASES, REFERENCE

_ABOUT = {
    REFERENCE: "token by token, no drafts",
    NOISE: "same widths, exact state",
    "checkpoint": "restore, decode again",
    "planes": "partial seq_rm, planes",
    "carry": "partial seq_rm, carried",
    "ring": "partial seq_rm, ring",
    "replay": "partial seq_rm, log replay",
    "forks": "copies of each sequence, in turns",
}
_CHARACTERS = 28
"""Least width of a card."""
_LINE_SAMPLE = 14
_PAD = 7
_ICON = 14
_BAR_HIGH = 5
_BOUND = " bound"
"""The bound in a verdict; left out where the lane's name needs the room."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNTIMED = "not timed"
_FIGURE_SIZE = 1.3
"""Font size of the milliseconds of a round, relative to other text."""


def verdict_text(verdict: LaneVerdict) -> tuple[str, str, str]:
    """The chip of a lane: text, icon and colour role."""
    if verdict.verdict == REFERENCE:
        return "leads", "", "ui.muted"
    if verdict.verdict == "failed":
        return "stopped", "error", "status.error"
    if not verdict.n_positions:
        return "nothing yet", "", "ui.muted"
    if verdict.verdict == SUSPECT:
        return f"suspect @{verdict.first_pos}", "error", "status.error"
    if verdict.lane.partition(",")[0] == NOISE:
        return f"≤ {error_text(verdict.worst_nmse)}", "", "ui.muted"
    if verdict.fork is not None:
        return f"forked @{verdict.fork.pos}", "", "ui.text"
    if verdict.verdict == "mode":
        return f"mode: {error_text(verdict.worst_nmse)}", "", "ui.muted"
    if verdict.idle_faults:
        return "exact: fault without effect", "warning", "status.warning"
    bound = _BOUND if verdict.verdict == "within" else ""
    return f"{verdict.verdict}{bound}", "check", "status.ok"


def _why_untimed(facts: RunFacts) -> str:
    if is_timed(facts):
        return "the trace has no times for it"
    several = "its copies of sequences do the work several times"
    return several if facts.lane_copies is not None else "it does not work like a run"


class LaneCard(QAbstractButton):
    """One lane: its settings, verdict, time of a round by phase, bytes moved and work done; in a
    low view without settings and work. The reference cannot be chosen."""

    def __init__(self, theme: Theme, lanes: ComparedLanes, run_id: int) -> None:
        super().__init__()
        self._theme, self._lanes, self.run_id = theme, lanes, run_id
        theme.changed.connect(self._describe)
        self.verdict: LaneVerdict | None = None
        self.cost: RunCost | None = None
        self._longest_ms = 0.0
        self._low = False
        self._n_lines = 1
        """Lines for the work done."""
        self._drawing: QIcon | None = None
        policy, _, settings = lanes.names[run_id].partition(",")
        of_lane = lanes.store.runs[run_id].lane_about
        self._title = policy
        self._about = _ABOUT.get(settings, settings) or of_lane or _ABOUT.get(policy, "")
        is_reference = run_id == lanes.reference
        self.setCheckable(not is_reference)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus if is_reference else Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    @property
    def time_text(self) -> str:
        """Milliseconds of a round, a dash if they are not meaningful."""
        return significant(None if self.cost is None else self.cost.per_round())

    @property
    def moved_text(self) -> str:
        """State copied, restored and saved."""
        moved = None if self.cost is None or not self.cost.round_ms else self.cost.bytes_moved
        return NOT_OBSERVED if moved is None else size_text(moved)

    @property
    def work_text(self) -> str:
        """ "11 restores · 33 replayed · 48 passes"."""
        cost = self.cost
        if cost is None:
            return ""
        counts = [
            (cost.n_restores, "restores"),
            (cost.n_removed, "seq_rm"),
            (cost.n_refused, "refused"),
            (cost.n_replayed, "replayed"),
        ]
        words = [f"{n:,} {word}" for n, word in counts if n and cost.round_ms]
        if cost.n_passes is not None:
            words.append(f"{cost.n_passes:,} passes")
        return " · ".join(words)

    def set_cost(self, cost: RunCost, longest_ms: float) -> None:
        """Show a cost. longest_ms: a round of the slowest lane, whose bar fills the card."""
        self.cost, self._longest_ms = cost, longest_ms
        self._describe()

    def set_verdict(self, verdict: LaneVerdict) -> None:
        """Show a verdict; the tooltip has its figures."""
        if verdict == self.verdict:
            return
        self.verdict = verdict
        self._describe()

    def _describe(self) -> None:
        verdict = self.verdict
        if verdict is None:
            return
        text, drawing, role = verdict_text(verdict)
        self._drawing = icon(drawing, self._theme, role) if drawing else None
        self.setAccessibleName(f"Lane {verdict.lane}: {text}")
        lines = [verdict.lane]
        if self.cost is not None and self.cost.round_ms:
            self.setAccessibleDescription(f"{self.time_text} ms per round, {self.work_text}")
            phases = ((phase, self.cost.per_round(phase)) for phase in PHASES)
            times = (f"{phase} {significant(ms)}" for phase, ms in phases if ms)
            lines += [
                f"{self.time_text} ms per round: {', '.join(times)}",
                f"{self.moved_text} moved, {self.work_text}",
            ]
        elif self.cost is not None:
            lines.append(f"{_UNTIMED}: {_why_untimed(self._lanes.store.runs[self.run_id])}")
        if verdict.n_positions:
            lines += [
                f"worst NMSE {error_text(verdict.worst_nmse)} at position {verdict.worst_pos}",
                f"max |Δ| {error_text(verdict.max_abs)}, KL {error_text(verdict.max_kl)} nats",
                f"{verdict.n_forks} of {verdict.n_positions} positions with another top-1",
                f"state {error_text(verdict.state_error)}, window {error_text(verdict.conv_error)}",
                f"duplicate KV cells: {verdict.duplicates}",
            ]
        if verdict.error:
            lines.append(verdict.error)
        self.setToolTip(plain_tip("\n".join(lines)))
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        n_lines, more = (2.0, 10) if self._low else (3.5 + self._n_lines, _BAR_HIGH + 18)
        high = round(n_lines * (metrics.height() + 2)) + more
        return QSize(_CHARACTERS * metrics.averageCharWidth(), high)

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def set_height(self, *, low: bool, n_lines: int) -> None:
        """Switch to the low layout, or back. n_lines: lines for the work done, where that is
        shown."""
        if (low, n_lines) != (self._low, self._n_lines):
            self._low, self._n_lines = low, n_lines
            self.updateGeometry()
            self.update()

    def fits(self, width: int) -> bool:
        """Whether the work done fits one line of a card of this width."""
        return self.fontMetrics().horizontalAdvance(self.work_text) <= width - 2 * _PAD

    def verdict_in(self, width: int) -> str:
        """The verdict for a card of this width, without "bound" if the name needs the room."""
        text = "" if self.verdict is None else verdict_text(self.verdict)[0]
        font = self.font()
        font.setBold(True)
        title = QFontMetrics(font).horizontalAdvance(self._title)
        taken = title + 2 * _PAD + _LINE_SAMPLE + 5 + _ICON + 4 + 5
        fits = taken + self.fontMetrics().horizontalAdvance(text) <= width
        return text if fits else text.removesuffix(_BOUND)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            event.ignore()  # for LaneCards
        else:
            super().keyPressEvent(event)

    def paintEvent(self, _event: QPaintEvent) -> None:
        theme, metrics = self._theme, self.fontMetrics()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        drawing, role = ("", "ui.muted")
        if self.verdict is not None:
            _, drawing, role = verdict_text(self.verdict)
        self._paint_frame(painter, drawing == "error")
        line = metrics.height()
        inner = self.rect().adjusted(_PAD, 5, -_PAD, -5)
        text = self.verdict_in(self.width())
        first = QRect(inner.left(), inner.top(), inner.width(), line + 2)
        second = QRect(inner.left(), first.bottom() + 1, inner.width(), line + 2)
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter

        painter.setPen(theme.color(role))
        painter.drawText(first, right, text)
        chip = metrics.horizontalAdvance(text)
        if self._drawing is not None:
            chip += _ICON + 4
            place = QRect(first.right() - chip, first.center().y() - _ICON // 2, _ICON, _ICON)
            self._drawing.paint(painter, place)

        start = first.left()
        if self.run_id != self._lanes.reference:
            painter.setPen(lane_pen(theme, self._lanes, self.run_id, 2.0))
            y = first.center().y() + 0.5
            painter.drawLine(QPointF(start, y), QPointF(start + _LINE_SAMPLE, y))
            start += _LINE_SAMPLE + 5
        font = painter.font()
        font.setBold(True)
        painter.setFont(font)
        painter.setPen(theme.color("ui.text"))
        room = first.right() - chip - 5 - start
        title = self._lanes.names[self.run_id] if self._low else self._title
        title = painter.fontMetrics().elidedText(title, Qt.TextElideMode.ElideRight, room)
        painter.drawText(first.adjusted(start - first.left(), 0, 0, 0), left, title)
        font.setBold(False)
        painter.setFont(font)
        painter.setPen(theme.color("ui.muted"))
        if not self._low:
            about = metrics.elidedText(self._about, Qt.TextElideMode.ElideRight, second.width())
            painter.drawText(second, left, about)
        self._paint_cost(painter, first if self._low else second)
        painter.end()

    def _paint_cost(self, painter: QPainter, above: QRect) -> None:
        """The time of a round, the bytes moved, the bar of phases, and the work done."""
        theme, metrics = self._theme, self.fontMetrics()
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignBottom
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom
        line = metrics.height()
        third = above.translated(0, above.height())
        if not self._low:
            third = third.translated(0, 2).adjusted(0, 0, 0, line // 2)
        font = painter.font()
        plain_size = font.pointSizeF()
        font.setBold(True)
        font.setPointSizeF(plain_size * (1.0 if self._low else _FIGURE_SIZE))
        painter.setFont(font)
        painter.setPen(theme.color("ui.text"))
        time = self.time_text
        if time != NOT_OBSERVED:
            painter.drawText(third, left, time)
        shift = painter.fontMetrics().horizontalAdvance(time) + 4
        font.setPointSizeF(plain_size)
        painter.setFont(font)
        moved = self.moved_text
        painter.setPen(theme.color("ui.muted"))
        said = painter.fontMetrics().horizontalAdvance(" moved")
        taken = said + painter.fontMetrics().horizontalAdvance(moved)
        if moved != NOT_OBSERVED:
            painter.drawText(third, right, " moved")
            painter.setPen(theme.color("ui.text"))
            painter.drawText(third.adjusted(0, 0, -said, 0), right, moved)
        font.setBold(False)
        painter.setFont(font)
        painter.setPen(theme.color("ui.muted"))
        room = third.width() - shift - taken
        fitting = (
            words for words in ("ms per round", "ms") if metrics.horizontalAdvance(words) < room
        )
        if time == NOT_OBSERVED:
            painter.drawText(third, left, _UNTIMED if self.cost is not None else "")
        else:
            painter.drawText(third.adjusted(shift, 0, 0, 0), left, next(fitting, ""))
        gap, high = (1, 3) if self._low else (4, _BAR_HIGH)
        bar = QRectF(third.left(), third.bottom() + gap, third.width(), high)
        x = bar.left()
        for phase in PHASES if self.cost is not None and self._longest_ms else ():
            ms = self.cost.per_round(phase) if self.cost is not None else None
            wide = bar.width() * (ms or 0.0) / self._longest_ms
            painter.fillRect(QRectF(x, bar.top(), wide, high), theme.color(f"phase.{phase}"))
            x += wide
        if self._low:
            return
        high = self._n_lines * line + 2
        fifth = QRect(third.left(), round(bar.bottom()) + 2, third.width(), high)
        wrap = Qt.TextFlag.TextWordWrap | Qt.AlignmentFlag.AlignTop
        done = (part.replace(" ", _NO_BREAK) for part in self.work_text.split(" · "))
        painter.drawText(fifth, wrap, " · ".join(done))

    def _paint_frame(self, painter: QPainter, is_bad: bool) -> None:
        theme = self._theme
        edge, width = ("status.error" if is_bad else "ui.border"), 1.0
        if self.isChecked():
            width = 2.0
            edge = "status.error" if is_bad else ""
        fill = "ui.raised" if self.isChecked() else "ui.panel"
        if self.underMouse() and self.isCheckable():
            fill = "ui.hover"
        lane = None if edge else lane_pen(theme, self._lanes, self.run_id).color()
        painter.setPen(QPen(lane or theme.color(edge), width))
        painter.setBrush(theme.color(fill))
        box = QRectF(self.rect()).adjusted(1, 1, -1, -1)
        painter.drawRoundedRect(box, 4, 4)
        if self.hasFocus():
            painter.setPen(QPen(theme.color("ui.focus"), 1.0, Qt.PenStyle.DashLine))
            painter.drawRoundedRect(box.adjusted(2.5, 2.5, -2.5, -2.5), 3, 3)


class LaneCards(Fitting, QWidget):
    """Cards in as many columns as fit. Left and Right go from one to the next."""

    lane_chosen = Signal(int)  # run_id

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.cards: dict[int, LaneCard] = {}
        self._n_columns = 0
        self._low = False
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(4)
        self.setAccessibleName("Lanes")

    def set_lanes(self, lanes: ComparedLanes | None) -> None:
        """A card for each lane."""
        for card in self.cards.values():
            self._grid.removeWidget(card)
            card.hide()
            card.deleteLater()
        run_ids = lanes.run_ids if lanes is not None else ()
        self.cards = {
            run_id: LaneCard(self._theme, lanes, run_id) for run_id in run_ids if lanes is not None
        }
        for run_id, card in self.cards.items():
            card.clicked.connect(lambda _=False, chosen=run_id: self.lane_chosen.emit(chosen))
        self._n_columns = 0
        self.fit()

    def set_verdicts(self, verdicts: dict[int, LaneVerdict]) -> None:
        """Bring the chips up to date."""
        for run_id, card in self.cards.items():
            card.set_verdict(verdicts[run_id])

    def set_costs(self, costs: dict[int, RunCost]) -> None:
        """Bring the costs up to date."""
        longest = max((cost.per_round() or 0.0 for cost in costs.values()), default=0.0)
        for run_id, card in self.cards.items():
            card.set_cost(costs[run_id], longest)
        self.fit()

    def set_low(self, low: bool) -> None:
        """Switch to the low layout, or back."""
        self._low = low
        self.fit()

    def choose(self, run_id: int) -> None:
        """Mark one lane as chosen."""
        for other, card in self.cards.items():
            card.setChecked(other == run_id)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        steps = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}
        choices = [card for card in self.cards.values() if card.isCheckable()]
        focused = self.focusWidget()
        if event.key() not in steps or focused not in choices:
            event.ignore()
            return
        at = choices.index(focused) + steps[Qt.Key(event.key())]
        if 0 <= at < len(choices):
            choices[at].setFocus()
            choices[at].click()

    def fit(self) -> None:
        least = _CHARACTERS * self.fontMetrics().averageCharWidth()
        fit = max(1, (self.width() + 4) // (least + 4))
        rows = -(-len(self.cards) // fit)
        n_columns = -(-len(self.cards) // rows) if rows else 0  # rows of equal length
        if n_columns:
            width = (self.width() + 4) // n_columns - 4
            n_lines = 1 if all(card.fits(width) for card in self.cards.values()) else 2
            for card in self.cards.values():
                card.set_height(low=self._low, n_lines=n_lines)
        if n_columns == self._n_columns:
            return
        self._n_columns = n_columns
        for i, card in enumerate(self.cards.values()):
            self._grid.addWidget(card, i // n_columns, i % n_columns)
        for column in range(self._grid.columnCount()):
            self._grid.setColumnStretch(column, 1 if column < n_columns else 0)
