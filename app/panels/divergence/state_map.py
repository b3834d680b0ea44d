"""A lane's states against the reference's: layers over positions, the error as colour."""

from __future__ import annotations

import math

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.divergence.log_scale import HIGH, LOW, gradient
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.number_text import error_text
from app.widgets.round_plot import RoundPlot

PARTS = {"state_error": "state", "conv_error": "window"}
_NONE, _EXACT, _NOT_FINITE, _FIRST = range(4)
"""Values of the image that are no step of the gradient, and the first that is one."""
_N_STEPS = 256 - _FIRST
_WEIGHTS = np.arange(256)
_WEIGHTS[_NOT_FINITE] = 256
"""Values of the image in the order of what they say: nothing finite is worse than what is not."""
_ROW_LABEL_PIXELS = 11


def shades(errors: np.ndarray) -> np.ndarray:
    """Relative errors as values of the image, uint8 of the same shape: log scale, clipped. NaN is
    none at all, of a layer without such a part."""
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
    round: only positions that end one have a colour.

    x is the position of the token that the states choose, as in the tables.
    """

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._part = "state_error"
        self._clear()
        super().__init__(theme, "layer", parent, unit="position")
        self._image = pg.ImageItem(axisOrder="row-major")
        self._image.setLevels((0, 255))
        self.getPlotItem().addItem(self._image, ignoreBounds=True)
        self.box.invertY(True)
        self.box.sigResized.connect(self._label_rows)
        self.box.sigResized.connect(self._paint)
        self.box.sigXRangeChanged.connect(self._paint)
        self.setAccessibleName("State error by layer and position")
        self.tip = self._tip
        self.retheme(theme)

    @property
    def is_empty(self) -> bool:
        """Whether the lane has nothing to show: no states, or none with the part."""
        return bool(np.isnan(self._errors).all())

    @property
    def lacks_part(self) -> bool:
        """Whether its layers have no such part."""
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
        """Draw what the lane holds now."""
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

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        super().retheme(theme)
        if not hasattr(self, "_image"):
            return
        lut = np.zeros((256, 4), np.uint8)
        for value, role in ((_NONE, "none"), (_EXACT, "exact"), (_NOT_FINITE, "not_finite")):
            lut[value] = _channels(theme.color(f"heat.{role}"))
        lut[_FIRST:] = [_channels(colour) for colour in gradient(theme, _N_STEPS)]
        self._image.setLookupTable(lut)

    def error_at(self, layer: int, pos: int) -> float | None:
        """The error of a layer, by its index in the model, None where none was recorded."""
        at = int(np.searchsorted(self._ends, pos))
        if layer not in self._layers or at == len(self._ends) or pos != self._ends[at]:
            return None
        mine = (self._at_end == at) & (self._at_layer == self._layers.index(layer))
        found = np.flatnonzero(mine)
        error = float(self._errors[found[-1]]) if len(found) else math.nan
        return None if math.isnan(error) else error

    def _clear(self) -> None:
        """Errors, float64 [n], each with its layer and its end as indices into those."""
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
        # the trace has the last position that they hold
        chosen = lanes.states(run_id, "pos") + 1
        self._ends, self._at_end = np.unique(chosen, return_inverse=True)
        self._errors = lanes.states(run_id, self._part)

    def _paint(self) -> None:
        """An image with a column for each position in sight or, where those are fewer, for each
        column of pixels, with the worst of what falls into it. Nothing is between measurements."""
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
        room = max(1.0, self.box.height() / len(self._layers))
        step = max(1, int(np.ceil(_ROW_LABEL_PIXELS / room)))
        ticks = [(row, str(layer)) for row, layer in enumerate(self._layers) if row % step == 0]
        self.getPlotItem().getAxis("left").setTicks([ticks])

    def _tip(self, x: float, y: float) -> str:
        row, pos = round(y), round(x)
        if not 0 <= row < len(self._layers):
            return ""
        layer = self._layers[row]
        error = self.error_at(layer, pos)
        if error is None:
            return ""
        return f"position {pos} · layer {layer}\n{PARTS[self._part]}: {error_text(error)}"


def _channels(colour: QColor) -> tuple[int, int, int, int]:
    return colour.red(), colour.green(), colour.blue(), colour.alpha()
