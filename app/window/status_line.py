"""The status bar: the loaded model, current work, and the run's figures."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPalette
from PySide6.QtWidgets import QLabel, QProgressBar, QPushButton, QSizePolicy, QStatusBar

from app.trace_models.run_facts import LiveNumbers
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import RunOverlay
from app.trace_models.shown_text import NOT_OBSERVED, plain_tip, significant
from app.widgets.build import Drawing, made
from engine.analysis.run_cost import PlainRatio
from engine.plain_text import size_text

_CHIPS = {
    "acceptance": ("acceptance", "0.888", "Accepted / drafted tokens"),
    "tokens_per_step": (
        "tokens/round",
        "8.88",
        "Mean acceptance length: tokens per verification, including the target's own",
    ),
    "tokens_per_second": (
        "tok/s",
        "8888",
        "Generated tokens per second, without the prompt; none for lanes, which share drafts",
    ),
    "vs_plain": (
        "vs plain",
        "8.88 to 8.88×",
        "Speed relative to plain decoding: lowest and highest of several pairs of runs",
    ),
    "path": ("rollback", "checkpoint", "How the last rejected tokens were rolled back"),
}
_STEPS = 1000
_LEAST_BYTES = 1 << 16
"""Progress over less is not in bytes, but in units that its phase names."""
_EDGE = 6
"""Pixels between the last chip and the window's edge."""


class StatusLine(QStatusBar):
    """`cancel_asked` is emitted by the button next to the progress bar."""

    cancel_asked = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.texts = {"waiting": "", "going": "", "model": ""}
        """What is awaited; the run's progress, or how a fork was rebuilt; the model with the
        engine's state."""
        self._model = _ElidedLine()
        self.phase = made(QLabel, textFormat=Qt.TextFormat.PlainText)
        self._bar = QProgressBar()
        self._bar.setRange(0, _STEPS)
        self._bar.setTextVisible(False)
        self._bar.setAccessibleName("Progress")
        self._bar.setFixedWidth(16 * self.fontMetrics().averageCharWidth())
        self._bar.setMaximumHeight(self.fontMetrics().height())
        self._cancel = made(QPushButton, "Cancel", clicked=self.cancel_asked)
        self.chips = {key: FigureChip(*texts) for key, texts in _CHIPS.items()}
        self.overlay = FigureChip("overlay", "run 00", "")
        self.overlay.hide()
        self.gone = FigureChip("server", "gone", "")
        self.gone.set_alarming()
        self.gone.hide()
        self.addWidget(self._model, 1)
        for widget in (
            self.phase,
            self._bar,
            self._cancel,
            self.gone,
            self.overlay,
            *self.chips.values(),
        ):
            self.addPermanentWidget(widget)
        self.setSizeGripEnabled(False)
        self.setContentsMargins(0, 0, _EDGE, 0)
        self.hide_progress()

    def say(self, **texts: str) -> None:
        """Set some of `texts`; an empty one takes no room."""
        self.texts |= texts
        self._model.say(" · ".join(filter(None, self.texts.values())))

    def set_vs_plain(self, ratio: PlainRatio | None) -> None:
        """Set the speed-up over plain decoding; None: not measured, hidden."""
        chip = self.chips["vs_plain"]
        chip.set_text(NOT_OBSERVED if ratio is None else ratio.range_text)
        chip.setVisible(ratio is not None and not self.progress_shown)

    def set_numbers(self, numbers: LiveNumbers) -> None:
        """Set the run's figures."""
        self.chips["acceptance"].set_figure(numbers.acceptance)
        self.chips["tokens_per_step"].set_figure(numbers.tokens_per_step)
        self.chips["tokens_per_second"].set_figure(numbers.tokens_per_second)
        self.chips["path"].set_text(numbers.path or NOT_OBSERVED)

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Name the overlaid run; the figures are still those of the run on show. None removes the
        name."""
        self.overlay.setVisible(overlay is not None)
        if overlay is not None:
            names = [one.name for one in overlay.every]
            verb = "is" if len(names) == 1 else "are"
            tip = f"In the plots {', '.join(names)} {verb} drawn dashed over "
            more = f" +{len(names) - 1}" if len(names) > 1 else ""
            self.overlay.set_text(overlay.name + more, tip + run_name(overlay.over))

    def set_server_gone(self, why: str) -> None:
        """The server in use does not answer; empty: it does, or none is in use."""
        self.gone.setVisible(bool(why))
        if why:
            self.gone.set_text("gone", why)

    def show_progress(self, done: int, total: int, phase: str) -> None:
        """Show progress of work, which can be cancelled until `hide_progress`."""
        share = done / total if total else 0.0
        self._bar.setValue(round(share * _STEPS))
        self._bar.setRange(0, _STEPS if total else 0)  # without a total it only moves
        of = f"{size_text(done)} of {size_text(total)}"
        is_bytes = total >= _LEAST_BYTES and not phase.endswith(".csv")
        self.phase.setText(f"{phase}, {of}" if is_bytes else phase)
        self._bar.setToolTip(of if is_bytes else plain_tip(phase))
        self._show_progress(True)

    def hide_progress(self) -> None:
        self._show_progress(False)

    @property
    def progress_shown(self) -> bool:
        return not self._cancel.isHidden()

    def _show_progress(self, shown: bool) -> None:
        for widget in (self.phase, self._bar, self._cancel):
            widget.setVisible(shown)
        for key, chip in self.chips.items():
            is_told = key != "vs_plain" or chip.text != NOT_OBSERVED
            chip.setVisible(not shown and is_told)


class _ElidedLine(Drawing):
    """One line of text in the remaining room. A QLabel would lay out and repaint the whole bar for
    every text."""

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("status.words")
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.setContentsMargins(8, 0, 8, 0)

    def say(self, text: str) -> None:
        if text != self.accessibleName():
            self.setAccessibleName(text)
            self.setToolTip(plain_tip(text))
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(0, self.fontMetrics().height())

    def draw(self, painter: QPainter) -> None:
        painter.setPen(self.palette().color(QPalette.ColorRole.WindowText))
        room, text = self.contentsRect(), self.accessibleName()
        text = self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, room.width())
        painter.drawText(room, Qt.AlignmentFlag.AlignVCenter, text)


class FigureChip(Drawing):
    """A name and its figure in a rounded box, wide enough that changing figures do not move it."""

    def __init__(self, name: str, widest: str, tip: str) -> None:
        super().__init__()
        self._name, self._widest, self._tip = name, widest, tip
        self.text = ""
        self._alarming = False
        self.setSizePolicy(QSizePolicy.Policy.Minimum, QSizePolicy.Policy.Fixed)
        self.set_text(NOT_OBSERVED)

    def set_alarming(self) -> None:
        """Paint it in the error colour."""
        self._alarming = True
        self.update()

    def set_figure(self, value: float | None) -> None:
        """A number, short on the chip and complete in the tooltip."""
        self.set_text(significant(value), "" if value is None else f": {value:.9g}")

    def set_text(self, text: str, more: str = "") -> None:
        tip = plain_tip(f"{self._tip}{more}")
        if (text, tip) == (self.text, self.toolTip()):
            return
        size = self.sizeHint()
        self.text = text
        self.setToolTip(tip)
        self.setAccessibleName(f"{self._name} {text}")
        if self.sizeHint() != size:  # otherwise all docks would be laid out again
            self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        """The width never shrinks: the next figure may be as wide again."""
        metrics = self.fontMetrics()
        self._widest = max(self._widest, self.text, key=metrics.horizontalAdvance)
        figure = metrics.horizontalAdvance(self._widest)
        return QSize(metrics.horizontalAdvance(self._name) + figure + 26, metrics.height() + 6)

    def draw(self, painter: QPainter) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        palette = self.palette()
        alarm = palette.color(QPalette.ColorRole.BrightText)
        painter.setPen(alarm if self._alarming else palette.color(QPalette.ColorRole.Mid))
        painter.setBrush(palette.color(QPalette.ColorRole.Button))
        box = self.rect().toRectF().adjusted(1.5, 1.5, -1.5, -1.5)
        painter.drawRoundedRect(box, box.height() / 2, box.height() / 2)
        inner = box.adjusted(9, 0, -9, 0)
        painter.setPen(palette.color(QPalette.ColorRole.PlaceholderText))
        painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter, self._name)
        ink = palette.color(QPalette.ColorRole.ButtonText)
        painter.setPen(alarm if self._alarming else ink)
        painter.drawText(
            inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignRight, self.text
        )
