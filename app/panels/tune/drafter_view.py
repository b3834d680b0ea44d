"""The Drafter panel: the quality of the drafters of the run on show: calibration of their
confidence, survival by index, rank of the right token at rejections, gain of draft trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import QPoint, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QPainter, QPalette, QResizeEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QWidget

from app.looks import Theme, figures_font
from app.trace_models.run_rows import RunRows
from app.trace_models.shown_text import NOT_OBSERVED, significant
from app.widgets.build import UNLIMITED, TipWidget, hbox, made, vbox, words
from app.widgets.fields import shown_choice
from app.widgets.fitted_labels import ElidedLabel, ScrollPage
from app.widgets.line_styles import plot_pen
from app.widgets.reliability_chart import RateChart, ReliabilityChart
from app.widgets.whole_run_view import WholeRunView
from engine.analysis.acceptance.counts import Survival
from engine.analysis.draft_quality import (
    ASSUMPTIONS,
    LEAVES,
    DraftQuality,
    DraftReader,
    TreeGain,
    by_drafter,
    width_cost,
)
from engine.plain_text import counted
from engine.trace.run_ref import RunRef
from engine.trace.timings import StepSums

_TREE_HEADS = {
    "tree": "Leaves of the tree: the drafted chain and single alternatives to its tokens",
    "tok/round": "Tokens per round, 1 + accepted",
    "pass": "Time of its verify pass relative to the chain's, from passes of this run; –: none "
    "was that wide",
    "speed": "Tokens per second relative to the chain, if a pass of that width was timed",
}
_CHART_STRETCH = 1000
_TWO_FROM, _THREE_FROM = 72, 110
"""Page widths in characters from which it has two and three columns."""


class DrafterQuality(QWidget):
    """Four parts in one, two or three columns. One drafter, or several together."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.setAccessibleName("Quality of the drafter")
        self.reliability = ReliabilityChart(theme)
        self.survival = SurvivalChart(theme)
        self.ranks = RankBars(theme)
        self.trees = _TreeTable()
        self.reliability_part = _Topic("Is its confidence calibrated?", self.reliability)
        self.survival_part = _Topic("How long are its accepted drafts?", self.survival)
        self.rank_part = _Topic("At rejections, where was the right token?", self.ranks, self.trees)
        self._grid = QGridLayout()
        self._grid.setContentsMargins(8, 4, 8, 4)
        self._grid.setSpacing(10)
        self._n_columns = 0
        self._page = ScrollPage(self._grid)
        self._page.setAccessibleName("Quality of the drafter: charts")
        self._page.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # it takes no keys
        vbox(self._page, of=self, margins=(0, 0, 0, 0))
        self._arrange(2)

    def show_facts(self, facts: DrafterFacts, name: str = "") -> None:
        """Show a drafter by its name, or all together."""
        quality = facts.quality(name)
        found, survival = quality.calibration, quality.survival
        self.reliability.set_calibration(found if found.n_tokens else None)
        self.reliability_part.figure.setText(_trust(quality))
        self.survival.set_survival(survival)
        drafts = counted(quality.n_steps, "draft")
        self.survival_part.figure.setText(
            f"{significant(quality.tokens_per_step)} tokens/round · {drafts}"
        )
        self.ranks.set_counts(quality.by_rank)
        n = quality.n_rejections
        self.rank_part.figure.setText(counted(n, "rejection") if n else "none recorded")
        self.trees.set_estimates(facts.trees(quality))

    def minimumSizeHint(self) -> QSize:
        """The size of one column, whatever the current layout."""
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
        # a row's height is limited only if all of it is
        limited = n_columns == len(parts)
        self.rank_part.setMaximumHeight(parts[0].maximumHeight() if limited else UNLIMITED)
        for at, part in enumerate(parts):
            row, column = divmod(at, n_columns)
            wide = n_columns == 2 and part is self.rank_part
            grid.addWidget(part, row, column, 1, 2 if wide else 1)
            grid.setRowStretch(row, 0 if part is self.rank_part and row else _CHART_STRETCH)
        grid.setRowStretch(len(parts), 1)  # the room left when the charts have their full height
        self.updateGeometry()


class _Topic(QWidget):
    """A question, a figure below it, and the drawings that answer it."""

    def __init__(self, title: str, *drawings: QWidget) -> None:
        super().__init__()
        name = made(ElidedLabel, title, bold=True)
        self.figure = words(muted=True, shrinks=True)
        column = vbox(name, self.figure, of=self, margins=(0, 0, 0, 0), spacing=2)
        for drawing in drawings:
            is_chart = isinstance(drawing, RateChart)
            column.addWidget(drawing, 1 if is_chart else 0)
            if is_chart:
                heads = name.sizeHint().height() + self.figure.sizeHint().height()
                self.setMaximumHeight(drawing.maximumHeight() + heads + 3 * column.spacing())
        column.addStretch(0)


class _TreeTable(QWidget):
    """A row per tree; the tooltip has the assumptions."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Estimated gain of trees")
        self._title = made(QLabel, "Trees instead, estimated", muted=True)
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
        """Show these estimates, as many as LEAVES, or nothing."""
        self.setVisible(bool(trees))
        for cells, (tree, cost, speed) in zip(self._cells[1:], trees, strict=False):
            texts = (
                f"{tree.n_leaves} leaves",
                f"{tree.tokens_per_step:.2f}",
                *_cost_texts(cost, speed),
            )
            for cell, text in zip(cells, texts, strict=True):
                cell.setText(text)
        self.setAccessibleDescription("; ".join(", ".join(row) for row in self.rows()))

    def rows(self) -> list[list[str]]:
        """The table as text, without its header."""
        return [[cell.text() for cell in cells] for cells in self._cells[1:]]


def _cost_texts(cost: tuple[float, bool] | None, speed: float | None) -> tuple[str, str]:
    """The cost of a tree's pass and its speed, if a pass of that width was timed."""
    if cost is None or speed is None or not cost[1]:
        return NOT_OBSERVED, NOT_OBSERVED
    return f"{cost[0]:.2f}×", f"{100 * (speed - 1):+.1f} %"


def _trust(quality: DraftQuality) -> str:
    found = quality.calibration
    if found.ece is None or found.excess is None:
        return "no confidence is recorded"
    sure = "overconfident" if found.excess > 0 else "underconfident"
    tokens = counted(found.n_tokens, "token")
    return f"ECE {found.ece:.3f} · {tokens} · {sure} by {abs(found.excess):.3f}"


_DOT = 3.0
_MOST_LABELLED = 12
_MOST_TICKS = 8


class SurvivalChart(RateChart):
    """A dot for each judged index, its rate next to it if there is room."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "Survival by index in the draft", "index in draft")
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
            f"index {at}: {accepted:,} of the {judged:,} drafts verified here accepted, "
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
        wide = self.area.width() / max(1, len(rates))
        if len(rates) > _MOST_LABELLED or metrics.horizontalAdvance("0.00  ") > wide:
            return
        painter.setPen(theme.color("plot.text"))
        for point, (_, rate) in zip(points, rates, strict=True):
            painter.drawText(self._label_box(point), Qt.AlignmentFlag.AlignCenter, f"{rate:.2f}")

    def _label_box(self, point: QPointF) -> QRectF:
        """The box of a rate's label. The line never rises: to the right of a point there is room
        above it, to the left below it."""
        metrics = self.fontMetrics()
        box = QRectF(0, 0, metrics.horizontalAdvance("0.00"), metrics.height())
        if point.y() - box.height() - _DOT < self.area.top():
            box.moveTopRight(point + QPointF(-1, _DOT))
        else:
            box.moveBottomLeft(point + QPointF(1, -_DOT))
        return box

    def _rates(self) -> list[tuple[int, float]]:
        """The judged indices, each with its rate."""
        rates = self._shown.rate
        return list(enumerate(rates[np.isfinite(rates)].tolist()))

    def _x(self, index: int) -> float:
        """The x of an index, as a fraction of the width."""
        return (index + 0.5) / max(1, len(self._rates()))


_GAP = 4
_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


class RankBars(TipWidget):
    """A bar for each rank, with its share of the rejections; the last bar: beyond all ranks."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._rows: list[tuple[str, int]] = []
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Rank of the target's token at rejections")
        self.set_counts(np.zeros(6, np.int64))

    def set_counts(self, by_rank: np.ndarray) -> None:
        """Rejections by rank from 1, the last one: not among the candidates, int64 [n + 1]. The
        first rank is left out if it has none: the first candidate is what is drafted."""
        counts: Sequence[int] = by_rank.tolist()
        n = len(counts) - 1
        rows = [(_ORDINALS.get(r, f"{r}th"), counts[r - 1]) for r in range(1, n + 1)]
        self._rows = [*(rows if counts[0] else rows[1:]), (f"beyond {n}", counts[n])]
        self.setAccessibleDescription(", ".join(f"{name}: {k:,}" for name, k in self._rows))
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        width = 30 * self.fontMetrics().averageCharWidth()
        return QSize(width, self._row() * len(self._rows))

    def minimumSizeHint(self) -> QSize:
        return QSize(self.sizeHint().width() // 2, self.sizeHint().height())

    def draw(self, painter: QPainter) -> None:
        theme, metrics = self._theme, self.fontMetrics()
        left = max(metrics.horizontalAdvance(f"{name}  ") for name, _ in self._rows)
        room = max(0, self.width() - left - metrics.horizontalAdvance("100 %  "))
        total = sum(n for _, n in self._rows)
        most = max(n for _, n in self._rows)
        centre = Qt.AlignmentFlag.AlignVCenter
        for at, (name, n) in enumerate(self._rows):
            top, height = at * self._row(), self._row()
            painter.setPen(theme.color("ui.muted"))
            beside = QRectF(0, top, left - _GAP, height)
            painter.drawText(beside, centre | Qt.AlignmentFlag.AlignRight, name)
            width = room * n / most if most else 0.0
            bar = QRectF(left, top + _GAP / 2, width, height - _GAP)
            is_last = at == len(self._rows) - 1
            painter.fillRect(bar, theme.color("rejected.tint" if is_last else "accepted.tint"))
            if total:
                painter.setPen(theme.color("ui.text"))
                after = QRectF(left + width + _GAP, top, self.width() - left - width, height)
                painter.drawText(after, centre, f"{100 * n / total:.0f} %")

    def tip_at(self, at: QPoint) -> str:
        total = sum(n for _, n in self._rows)
        for name, n in self._rows[at.y() // self._row() :][:1]:
            return f"{name}: {n:,} of {total:,} rejections"
        return ""

    def _row(self) -> int:
        return self.fontMetrics().height() + _GAP


UNNAMED = "unnamed"
"""A drafter that another engine did not name."""


TreeEstimate = tuple[TreeGain, tuple[float, bool] | None, float | None]
"""A tree compared with the recorded chain: the cost of its verify pass (width_cost) and its tokens
per second over the chain's; both None if the run's passes do not show them."""


class DrafterFacts:
    """Grows with a run. `by_name`: drafters by name, in the order of their first drafts."""

    def __init__(self, run: RunRef) -> None:
        self._pool = run.store.text_pool
        self._drafts = DraftReader(run)
        self._rounds = RunRows(run, "rounds")
        self._sums = StepSums()
        self.by_name: dict[str, DraftQuality] = {}

    def read(self) -> bool:
        """Read new rows of the trace; returns whether there is any draft."""
        start, stop = self._rounds.read()
        if start < stop:
            self._rounds.add_to(self._sums, start, stop)
        new = self._drafts.read()
        for code, quality in by_drafter(new).items() if new is not None else ():
            name = self._pool.text(code) or UNNAMED
            self.by_name[name] = self.by_name.get(name, DraftQuality()) + quality
        return bool(self.by_name)

    def quality(self, name: str = "") -> DraftQuality:
        """The quality of one drafter, or without a name of all together."""
        if name:
            return self.by_name.get(name, DraftQuality())
        return sum(self.by_name.values(), DraftQuality())

    def trees(self, quality: DraftQuality) -> list[TreeEstimate]:
        """The gain of trees; empty without recorded candidates."""
        now = quality.n_ranked and 1 + quality.n_ranked_accepted / quality.n_ranked
        sums, estimates = self._sums, list[TreeEstimate]()
        step_ms = sum(sums.step_ms.values())
        verify_ms = sums.step_ms.get("verify", 0.0)
        mean_width = sums.step_tokens / sums.n_steps if sums.n_steps else 0.0
        for tree in quality.tree_gains:
            cost = speed = None
            if step_ms and not sums.n_untimed:
                ms = sums.width_ms / sums.width_n
                cost = width_cost(sums.widths, ms, sums.width_n, mean_width, tree.n_more)
            if cost is not None:
                longer = 1 + (cost[0] - 1) * verify_ms / step_ms
                speed = tree.tokens_per_step / now / longer
            estimates.append((tree, cost, speed))
        return estimates


_ALL = "all drafters"


class DrafterView(WholeRunView):
    """One drafter, or of a chain the chosen one or all together."""

    name = "Drafter"
    empty_title = "No draft yet"
    about = (
        "Shows a drafter's calibration, how many of its tokens are accepted, and its other "
        "candidates when it was wrong. Press Run (F5) with a drafter."
    )
    untold = "the tokens of its drafts"

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._facts: DrafterFacts | None = None
        self.choice = shown_choice("Drafter whose drafts are counted")
        self.choice.activated.connect(lambda _: self._show())
        self.headline, self.quality = ElidedLabel(), DrafterQuality(theme)
        head = hbox((self.headline, 1), self.choice, margins=(8, 4, 8, 0))
        vbox(head, (self.quality, 1), of=self.page, margins=(0, 0, 0, 0), spacing=2)

    def table(self) -> tuple[list[str], list[list[object]]]:
        """The bins of confidence."""
        names = ["confidence_from", "confidence_to", "judged", "accepted", "mean_confidence"]
        if self._facts is None:
            return names, []
        found = self._facts.quality(self._chosen).calibration
        n = len(found.n)
        return names, [
            [
                at / n,
                (at + 1) / n,
                int(found.n[at]),
                int(found.accepted[at]),
                mean if found.n[at] else None,
            ]
            for at, mean in enumerate(found.mean_confidence.tolist())
        ]

    @property
    def _chosen(self) -> str:
        """Name of the drafter on show, empty for all of them."""
        return self.choice.currentText() if self.choice.currentIndex() > 0 else ""

    def _begin(self, run: RunRef | None) -> None:
        self._facts = None if run is None else DrafterFacts(run)
        self.choice.clear()
        self.choice.addItem(_ALL)
        self.choice.hide()

    def _read(self) -> bool:
        return self._facts is not None and self._facts.read()

    def _show(self) -> None:
        facts = self._facts
        if facts is None:
            return
        for name in list(facts.by_name)[self.choice.count() - 1 :]:
            self.choice.addItem(name)
        self.choice.setVisible(len(facts.by_name) > 1)
        name = self._chosen
        self.quality.show_facts(facts, name)
        quality = facts.quality(name)
        words = name or ", ".join(facts.by_name)
        if quality.n_untold:
            words += f" · tokens of {quality.n_untold:,} drafts are not known and left out"
        self.headline.setText(words)
