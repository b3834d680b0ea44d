"""A lane's states compared with the reference's: a heat map of layers by position on a log scale,
and its colour bar."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QSizePolicy

from app.looks import Theme, mixed
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.shown_text import EXACT, NOT_FINITE, error_text
from app.widgets.build import Drawing
from app.widgets.round_plot import RoundPlot

PARTS = {"state_error": "state", "conv_error": "window"}
_NONE, _EXACT, _NOT_FINITE, _FIRST = range(4)
"""Image values outside the gradient, and the first of the gradient."""
_N_STEPS = 256 - _FIRST
_WEIGHTS = np.arange(256)
_WEIGHTS[_NOT_FINITE] = 256
"""Image values by weight: not finite outweighs everything."""


def shades(errors: np.ndarray) -> np.ndarray:
    """Relative errors as image values, uint8 of the same shape: log scale, clipped. NaN: the layer
    has no such part."""
    finite = np.isfinite(errors)
    shade = np.full(errors.shape, _NOT_FINITE, np.uint8)
    shade[np.isnan(errors)] = _NONE
    shade[finite & (errors == 0)] = _EXACT
    at = finite & (errors > 0)
    share = (np.log10(errors[at]) - LOW) / (HIGH - LOW)
    shade[at] = _FIRST + np.rint(np.clip(share, 0, 1) * (_N_STEPS - 1)).astype(np.uint8)
    return shade


class StateMap(RoundPlot):
    """Rows are recurrent layers, the first on top. States are measured after the last token of a
    round, so only these positions have a colour.

    x is the position of the token that the states predict, as in the tables.
    """

    def __init__(self, theme: Theme) -> None:
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._part = "state_error"
        self._clear()
        super().__init__(theme, "layer", unit="position")
        self._image = pg.ImageItem(axisOrder="row-major")
        self._image.setLevels((0, 255))
        self.getPlotItem().addItem(self._image, ignoreBounds=True)
        self.box.invertY(True)
        self.box.sigResized.connect(self._label_rows)
        self.box.sigResized.connect(self._paint)
        self.box.sigXRangeChanged.connect(self._paint)
        self.setAccessibleName("State error by layer and position")
        self.tip = self._tip
        theme.apply(self._recolour)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show: no states, or none with this part."""
        return bool(np.isnan(self._errors).all())

    @property
    def lacks_part(self) -> bool:
        """Whether the layers do not have this part."""
        return bool(self._layers) and self.is_empty

    def set_part(self, part: str) -> None:
        """Show state_error or conv_error."""
        self._part = part
        self.draw()

    def set_lane(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Show a lane."""
        self._lanes, self._run_id = lanes, run_id
        self.draw()

    def draw(self) -> None:
        """Draw the current data of the lane."""
        self._read()
        if self.is_empty:
            self._image.clear()
            self.setAccessibleDescription("Not recorded for this lane")
            return
        n_layers = len(self._layers)
        self._paint()
        self.box.setYRange(-0.5, n_layers - 0.5, padding=0)
        self._label_rows()
        worst = max((error for error in self._errors.tolist() if error == error), default=None)
        self.setAccessibleDescription(
            f"{PARTS[self._part]}: {n_layers} layers, worst relative error {error_text(worst)}"
        )

    def _recolour(self) -> None:
        theme = self._theme
        lut = np.zeros((256, 4), np.uint8)
        for value, role in ((_NONE, "none"), (_EXACT, "exact"), (_NOT_FINITE, "not_finite")):
            lut[value] = np.array(theme.color(f"heat.{role}").getRgb())
        lut[_FIRST:] = np.array([colour.getRgb() for colour in gradient(theme, _N_STEPS)])
        self._image.setLookupTable(lut)

    def error_at(self, layer: int, pos: int) -> float | None:
        """The error of a layer, by its index in the model, None if none was recorded."""
        at = int(np.searchsorted(self._ends, pos))
        if layer not in self._layers or at == len(self._ends) or pos != self._ends[at]:
            return None
        mine = (self._at_end == at) & (self._at_layer == self._layers.index(layer))
        found = np.flatnonzero(mine)
        error = float(self._errors[found[-1]]) if len(found) else math.nan
        return None if math.isnan(error) else error

    def _clear(self) -> None:
        """Errors, float64 [n], each with its layer and its round's end as indices into those
        lists."""
        self._layers: list[int] = []
        self._ends = np.zeros(0, np.int64)
        """Last positions of rounds, ascending."""
        self._at_layer = self._at_end = np.zeros(0, np.int64)
        self._errors = np.zeros(0)

    def _read(self) -> None:
        lanes, run_id = self._lanes, self._run_id
        self._clear()
        if lanes is None or run_id not in lanes.followers:
            return
        layers, self._at_layer = np.unique(lanes.states(run_id, "layer"), return_inverse=True)
        self._layers = layers.tolist()
        # the trace has the last position in the state
        chosen = lanes.states(run_id, "pos") + 1
        self._ends, self._at_end = np.unique(chosen, return_inverse=True)
        self._errors = lanes.states(run_id, self._part)

    def _paint(self) -> None:
        """An image with one column per position in sight or, if pixels are fewer, per pixel, with
        the worst error in it. Nothing is drawn between measurements."""
        if self.is_empty:
            return
        left, right = self.x_range
        first = max(math.floor(left + 0.5), int(self._ends[0]))
        stop = min(math.ceil(right + 0.5), int(self._ends[-1]) + 1)
        if stop <= first:
            self._image.clear()
            return
        n_columns = min(stop - first, self.n_pixels)
        ends = self._ends[self._at_end]
        inside = (ends >= first) & (ends < stop)
        at = self._at_layer[inside], (ends[inside] - first) * n_columns // (stop - first)
        weights = np.full((len(self._layers), n_columns), _WEIGHTS[_NONE])
        np.maximum.at(weights, at, _WEIGHTS[shades(self._errors[inside])])
        image = np.where(weights > 255, _NOT_FINITE, weights).astype(np.uint8)
        self._image.setImage(image, autoLevels=False)
        self._image.setRect(QRectF(first - 0.5, -0.5, stop - first, len(self._layers)))

    def _label_rows(self) -> None:
        if self.is_empty:
            return
        self.set_rows([(row, str(layer)) for row, layer in enumerate(self._layers)])

    def _tip(self, x: float, y: float) -> str:
        row, pos = round(y), round(x)
        if not 0 <= row < len(self._layers):
            return ""
        layer = self._layers[row]
        error = self.error_at(layer, pos)
        if error is None:
            return ""
        return f"position {pos} · layer {layer}\n{PARTS[self._part]}: {error_text(error)}"


LOW, HIGH = -8, 0
"""Decades at the ends: float32 rounding, and an error as large as the state itself."""
_LABELLED = (0, -2, -4, -6, -8)
_BAR = 10


def gradient(theme: Theme, n: int) -> list[QColor]:
    """n colours from the least to the largest error."""
    low, middle, high = (theme.color(f"heat.{name}") for name in ("low", "middle", "high"))
    colours = []
    for step in range(n):
        at = 2 * step / max(1, n - 1)
        colours.append(mixed(low, middle, at) if at < 1 else mixed(middle, high, at - 1))
    return colours


class LogScale(Drawing):
    """A colour bar with its decades, and a box for exact equality below it."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Colours of the state error")
        self.setAccessibleDescription(
            f"Relative error from {decade(LOW)} to {decade(HIGH)}, log scale; "
            "equal states have a colour of their own"
        )
        self.setToolTip("Relative error |a - b| / |a| against the reference lane's state")

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        widest = max(metrics.horizontalAdvance(t) for t in (EXACT, decade(LOW)))
        return QSize(_BAR + 5 + widest, 4 * metrics.height())

    def minimumSizeHint(self) -> QSize:
        return QSize(self.sizeHint().width(), 3 * self.fontMetrics().height())

    def draw(self, painter: QPainter) -> None:
        line = self.fontMetrics().height()
        half = line // 2
        box = QRect(0, half, _BAR, self.height() - half - line - 6)
        colours = gradient(self._theme, max(2, box.height()))
        for y in range(box.height()):
            painter.fillRect(0, box.bottom() - y, _BAR, 1, colours[y])
        painter.setPen(self._theme.color("ui.muted"))
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        fits = box.height() >= (len(_LABELLED) - 1) * line
        for exponent in _LABELLED if fits else (HIGH, LOW):
            y = box.bottom() - round((exponent - LOW) / (HIGH - LOW) * (box.height() - 1))
            place = QRect(_BAR + 5, y - half, self.width(), line)
            painter.drawText(place, left, decade(exponent))
        square = QRect(0, self.height() - half - _BAR // 2, _BAR, _BAR)
        painter.fillRect(square, self._theme.color("heat.exact"))
        place = QRect(_BAR + 5, self.height() - line, self.width(), line)
        painter.drawText(place, left, EXACT)


_LEAST, _MOST = -30, 30
_MOST_LABELS = 6


_SIGN_ROW = 0.9
"""Height of a row of marks in units of the distance from the lowest decade to the line "exact"."""


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A y-axis of decades low..high, with separate lines for values without a logarithm.

    exact: y of a value of 0, below the lowest decade. marks: y of a row of marks below it, the
    first of n_rows. not_finite: y of NaN and infinity, above the highest decade.
    """

    low: int
    high: int
    exact: float
    marks: float
    not_finite: float
    n_rows: int = 1

    @classmethod
    def over(cls, values: np.ndarray, n_rows: int = 1) -> LogAxis:
        """An axis of at least two decades that shows all values [n], above rows of marks."""
        shown = values[np.isfinite(values) & (values > 0)]
        low, high = -9, -7
        if len(shown):
            low = max(_LEAST, math.floor(math.log10(shown.min())))
            high = min(_MOST, math.ceil(math.log10(shown.max())))
        high = max(high, low + 2)
        unit = (high - low) / 6
        return cls(low, high, low - unit, low - 2 * unit, high + unit, n_rows)

    def marks_of(self, row: int) -> float:
        """y of a row of marks, from the top."""
        return self.marks - row * _SIGN_ROW * (self.low - self.exact)

    @property
    def y_range(self) -> tuple[float, float]:
        """Lowest and highest y of the plot: the whole axis with margins."""
        unit = self.low - self.exact
        return self.marks_of(max(self.n_rows, 1) - 1) - 0.7 * unit, self.not_finite + 0.3 * unit

    def y(self, values: np.ndarray) -> np.ndarray:
        """The y of errors >= 0, float64 of the same shape."""
        finite = np.isfinite(values)
        y = np.full(values.shape, self.not_finite)
        y[finite & (values == 0)] = self.exact
        at = finite & (values > 0)
        y[at] = np.clip(np.log10(values[at]), self.low, self.high)
        return y

    def ticks(self, values: np.ndarray, gap: float = 0.0) -> list[tuple[float, str]]:
        """Labels of some decades, of 0, and of not finite values if there are any.

        gap: decades that a label needs; decades give way to the other two.
        """
        step = max(1, math.ceil((self.high - self.low) / (_MOST_LABELS - 1)), math.ceil(gap))
        ends = [(self.exact, EXACT)]
        if not np.isfinite(values).all():
            ends.append((self.not_finite, NOT_FINITE))
        decades = range(self.high, self.low - 1, -step)
        ticks = [(float(e), decade(e)) for e in decades if all(abs(e - y) >= gap for y, _ in ends)]
        ticks += ends
        return ticks


def decade(exponent: int) -> str:
    """A power of ten as an axis label."""
    return {-1: "0.1", 0: "1", 1: "10", 2: "100"}.get(exponent, f"1e{exponent}")
