"""How good a drafter is: whether its confidence can be trusted, how far its drafts come, what it
had ranked next when it was wrong, and what trees of drafts would have gained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QPainter, QPalette, QResizeEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.looks.theme import Theme, figures_font
from app.trace_models.drafter_facts import DrafterFacts, TreeEstimate
from app.trace_models.number_text import NOT_OBSERVED, significant
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.line_styles import plot_pen
from app.widgets.rank_bars import RankBars
from app.widgets.rate_chart import RateChart
from app.widgets.reliability_chart import ReliabilityChart
from app.widgets.scroll_page import ScrollPage
from engine.analysis.draft_quality import DraftQuality
from engine.analysis.survival import Survival
from engine.analysis.tree_gain import ASSUMPTIONS, LEAVES

_TREE_HEADS = {
    "tree": "Leaves of the tree: the drafted chain and single candidates next to it",
    "tok/step": "Tokens per step, 1 + accepted",
    "pass": "Time of its verify pass over that of the chain, by what passes of this run took; "
    "≈: none was as wide",
    "speed": "Tokens per second against the chain",
}
_CHART_STRETCH = 1000
_UNLIMITED = 16_777_215
_TWO_FROM, _THREE_FROM = 56, 110
"""Columns of the page by its width in characters."""


class DrafterQuality(QWidget):
    """Four parts in one, two or three columns. One drafter, or several together."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName("Quality of the drafter")
        self.reliability = ReliabilityChart(theme)
        self.survival = SurvivalChart(theme)
        self.ranks = RankBars(theme)
        self.trees = _TreeTable()
        self.reliability_part = _Part("Can its confidence be trusted?", self.reliability)
        self.survival_part = _Part("How far do its drafts come?", self.survival)
        self.rank_part = _Part("Where was the right token at a rejection?", self.ranks, self.trees)
        self._grid = QGridLayout()
        self._grid.setContentsMargins(8, 4, 8, 4)
        self._grid.setSpacing(10)
        self._n_columns = 0
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        self._page = ScrollPage(self._grid)
        column.addWidget(self._page)
        self._arrange(2)

    def show_facts(self, facts: DrafterFacts, name: str = "") -> None:
        """Show a drafter by its name, or all together."""
        quality = facts.quality(name)
        found, survival = quality.calibration, quality.survival
        self.reliability.set_calibration(found if found.n_tokens else None)
        self.reliability_part.say(_trust(quality))
        self.survival.set_survival(survival)
        drafts = f"{quality.n_steps:,} draft{'' if quality.n_steps == 1 else 's'}"
        self.survival_part.say(f"{significant(quality.tokens_per_step)} tokens/step · {drafts}")
        self.ranks.set_counts(quality.by_rank)
        n = quality.n_rejections
        self.rank_part.say(f"{n:,} rejection{'' if n == 1 else 's'}" if n else "none recorded")
        self.trees.set_estimates(facts.trees(quality))

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for part in (self.reliability, self.survival, self.ranks):
            part.retheme(theme)

    def minimumSizeHint(self) -> QSize:
        """That of one column, whatever is shown now."""
        parts = (self.reliability_part, self.survival_part, self.rank_part)
        margins = self._grid.contentsMargins()
        wide = max(part.minimumSizeHint().width() for part in parts)
        wide += margins.left() + margins.right()
        wide += self._page.verticalScrollBar().sizeHint().width()
        return QSize(wide, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        characters = event.size().width() / self.fontMetrics().averageCharWidth()
        self._arrange(3 if characters >= _THREE_FROM else 2 if characters >= _TWO_FROM else 1)

    def _arrange(self, n_columns: int) -> None:
        if n_columns == self._n_columns:
            return
        self._n_columns = n_columns
        grid, parts = self._grid, (self.reliability_part, self.survival_part, self.rank_part)
        for part in parts:
            grid.removeWidget(part)
        for row in range(3):
            grid.setRowStretch(row, 0)
            grid.setColumnStretch(row, 1 if row < n_columns else 0)
        # a row is as high as may be only if all of it is
        limited = n_columns == len(parts)
        self.rank_part.setMaximumHeight(parts[0].maximumHeight() if limited else _UNLIMITED)
        for at, part in enumerate(parts):
            row, column = divmod(at, n_columns)
            wide = n_columns == 2 and part is self.rank_part
            grid.addWidget(part, row, column, 1, 2 if wide else 1)
            grid.setRowStretch(row, 0 if part is self.rank_part and row else _CHART_STRETCH)
        grid.setRowStretch(len(parts), 1)  # what is left when the charts are as high as may be
        self.updateGeometry()


class _Part(QWidget):
    """A question, a figure below it, and the drawings that answer it."""

    def __init__(self, title: str, *drawings: QWidget) -> None:
        super().__init__()
        name, self._figure = ElidedLabel(title), ElidedLabel()
        font = name.font()
        font.setBold(True)
        name.setFont(font)
        self._figure.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addWidget(name)
        column.addWidget(self._figure)
        for drawing in drawings:
            is_chart = isinstance(drawing, RateChart)
            column.addWidget(drawing, 1 if is_chart else 0)
            if is_chart:
                heads = name.sizeHint().height() + self._figure.sizeHint().height()
                self.setMaximumHeight(drawing.maximumHeight() + heads + 3 * column.spacing())
        column.addStretch(0)

    def say(self, figure: str) -> None:
        """Set the figure."""
        self._figure.setText(figure)

    @property
    def figure(self) -> str:
        """The figure on show."""
        return self._figure.text()


class _TreeTable(QWidget):
    """A line for each tree; the tooltip has what is assumed."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Estimated gain of trees")
        self._title = QLabel("Trees in its place, estimated")
        self._title.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 4, 0, 0)
        grid.setHorizontalSpacing(14)
        grid.setVerticalSpacing(1)
        grid.addWidget(self._title, 0, 0, 1, len(_TREE_HEADS) + 1)
        grid.setColumnStretch(len(_TREE_HEADS), 1)
        self._cells: list[list[QLabel]] = []
        for row in range(len(LEAVES) + 1):
            cells = [QLabel() for _ in _TREE_HEADS]
            for column, cell in enumerate(cells):
                cell.setFont(figures_font())
                cell.setAlignment(Qt.AlignmentFlag.AlignRight)
                grid.addWidget(cell, row + 1, column)
            self._cells.append(cells)
        for cell, (head, tip) in zip(self._cells[0], _TREE_HEADS.items(), strict=True):
            cell.setText(head)
            cell.setToolTip(tip)
            cell.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        self.setToolTip(f"Assumed: {'; '.join(ASSUMPTIONS)}.")

    def set_estimates(self, trees: Sequence[TreeEstimate]) -> None:
        """Show these, as many as LEAVES, or nothing."""
        self.setVisible(bool(trees))
        for cells, tree in zip(self._cells[1:], trees, strict=False):
            texts = (f"{tree.n_leaves} leaves", f"{tree.tokens_per_step:.2f}", *_cost_texts(tree))
            for cell, text in zip(cells, texts, strict=True):
                cell.setText(text)
        self.setAccessibleDescription("; ".join(", ".join(row) for row in self.rows()))

    def rows(self) -> list[list[str]]:
        """The table as text, without its head."""
        return [[cell.text() for cell in cells] for cells in self._cells[1:]]


def _cost_texts(tree: TreeEstimate) -> tuple[str, str]:
    """The cost of its pass and its speed; "≈" where the cost is a guess."""
    cost, speed = tree.pass_cost, tree.speed
    if cost is None or speed is None:
        return NOT_OBSERVED, NOT_OBSERVED
    sign = "" if cost.is_measured else "≈ "
    return f"{sign}{cost.ratio:.2f}×", f"{sign}{100 * (speed - 1):+.1f} %"


def _trust(quality: DraftQuality) -> str:
    found = quality.calibration
    if found.ece is None or found.excess is None:
        return "no confidence is recorded"
    sure = "too sure" if found.excess > 0 else "too unsure"
    tokens = f"{found.n_tokens:,} token{'' if found.n_tokens == 1 else 's'}"
    return f"ECE {found.ece:.3f} · {tokens} · {sure} by {abs(found.excess):.3f}"


_DOT = 3.0
_MOST_LABELLED = 12
_MOST_TICKS = 8


class SurvivalChart(RateChart):
    """A dot for each index that drafts were judged at, its rate above it where there is room."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, "Survival by index in the draft", "index in draft", parent)
        self._shown = Survival(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def set_survival(self, found: Survival) -> None:
        """Show these rates."""
        self._shown = found
        rates = ", ".join(f"{i}: {significant(rate)}" for i, rate in self._rates())
        self.setAccessibleDescription(f"accepted up to index {rates}" if rates else "")
        self.update()

    def ticks(self) -> list[tuple[float, str]]:
        n = len(self._rates())
        step = max(1, -(-n // _MOST_TICKS))
        return [(self._x(i), str(i)) for i in range(0, n, step)]

    def tip(self, x: float) -> str:
        rates = self._rates()
        if not rates:
            return ""
        at = min(int(x * len(rates)), len(rates) - 1)
        judged, accepted = int(self._shown.judged[at]), int(self._shown.accepted[at])
        return (
            f"index {at}: {accepted:,} of the {judged:,} drafts judged here accepted, "
            f"{accepted / judged:.3f}; accepted from the first token to here: {rates[at][1]:.3f}"
        )

    def paint_rates(self, painter: QPainter) -> None:
        theme, metrics, rates = self.theme, self.fontMetrics(), self._rates()
        points = [self.place(self._x(i), rate) for i, rate in rates]
        colour = theme.color("accepted.line")
        painter.setPen(plot_pen(colour, 1.5))
        painter.drawPolyline(points)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QBrush(colour))
        for point in points:
            painter.drawEllipse(point, _DOT, _DOT)
        wide = metrics.horizontalAdvance("0.00 ")
        if len(rates) > _MOST_LABELLED or wide > self.area.width() / max(1, len(rates)):
            return
        painter.setPen(theme.color("plot.text"))
        for point, (_, rate) in zip(points, rates, strict=True):
            below = point.y() - metrics.height() - _DOT < self.area.top()
            top = point.y() + _DOT if below else point.y() - metrics.height() - _DOT
            box = QRectF(point.x() - wide / 2, top, wide, metrics.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, f"{rate:.2f}")

    def _rates(self) -> list[tuple[int, float]]:
        """The indices at which drafts were judged, and how many drafts came there."""
        rates = self._shown.rate
        return list(enumerate(rates[np.isfinite(rates)].tolist()))

    def _x(self, index: int) -> float:
        """Where an index lies, as a fraction of the width."""
        return (index + 0.5) / max(1, len(self._rates()))
