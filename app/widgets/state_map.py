"""A lane's states against the reference's: layers over positions, the error as colour."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.models.compared_lanes import ComparedLanes
from app.models.error_text import error_text
from app.widgets.log_scale import HIGH, LOW, gradient
from app.widgets.round_plot import RoundPlot

PARTS = {"state_error": "state S", "conv_error": "conv window"}
_NONE, _EXACT, _NOT_FINITE, _FIRST = range(4)
"""Values of the image that are no step of the gradient, and the first that is one."""
_N_STEPS = 256 - _FIRST
_ROW_LABEL_PIXELS = 11


def shades(errors: np.ndarray) -> np.ndarray:
    """Relative errors as values of the image, uint8 of the same shape: log scale, clipped."""
    finite = np.isfinite(errors)
    shade = np.full(errors.shape, _NOT_FINITE, np.uint8)
    shade[finite & (errors == 0)] = _EXACT
    at = finite & (errors > 0)
    share = (np.log10(errors[at]) - LOW) / (HIGH - LOW)
    shade[at] = _FIRST + np.rint(np.clip(share, 0, 1) * (_N_STEPS - 1)).astype(np.uint8)
    return shade


class StateMap(RoundPlot):
    """Rows are recurrent layers, the first on top. A round's states fill its positions.

    x is the last position that the states hold: the token before the one that they choose.
    """

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._part = "state_error"
        self._layers: list[int] = []
        self._errors = np.zeros((0, 0))
        self._x0 = 0
        super().__init__(theme, "layer", parent, unit="position")
        self._image = pg.ImageItem(axisOrder="row-major")
        self._image.setLevels((0, 255))
        self.getPlotItem().addItem(self._image, ignoreBounds=True)
        self.box.invertY(True)
        self.box.sigResized.connect(self._label_rows)
        self.setAccessibleName("State error by layer and position")
        self.tip = self._tip
        self.retheme(theme)

    @property
    def is_empty(self) -> bool:
        """Whether the lane has no states to show."""
        return not self._layers

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
        n_layers, n_positions = self._errors.shape
        known = ~np.isneginf(self._errors)
        image = np.where(known, shades(np.where(known, self._errors, 0.0)), _NONE)
        self._image.setImage(np.ascontiguousarray(image.astype(np.uint8)), autoLevels=False)
        self._image.setRect(QRectF(self._x0 - 0.5, -0.5, n_positions, n_layers))
        self.box.setYRange(-0.5, n_layers - 0.5, padding=0)
        self._label_rows()
        worst = float(np.max(self._errors[known], initial=0.0))
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
        x = pos - self._x0
        if layer not in self._layers or not 0 <= x < self._errors.shape[1]:
            return None
        error = float(self._errors[self._layers.index(layer), x])
        return None if np.isneginf(error) else error

    def _read(self) -> None:
        """Spread each round's errors over its positions; -inf stands for none recorded."""
        lanes, run_id = self._lanes, self._run_id
        empty = lanes is None or run_id not in lanes.followers
        layers = np.zeros(0, np.int64) if empty or lanes is None else lanes.states(run_id, "layer")
        if lanes is None or not len(layers):
            self._layers, self._errors = [], np.zeros((0, 0))
            return
        positions, errors = lanes.states(run_id, "pos"), lanes.states(run_id, self._part)
        kept = np.unique(layers)
        self._layers = kept.tolist()
        ends = np.unique(positions)
        self._x0 = int(ends[0])  # the prompt is one column wide: its last position
        table = np.full((len(kept), len(ends)), -np.inf)
        table[np.searchsorted(kept, layers), np.searchsorted(ends, positions)] = errors
        widths = np.diff(ends, prepend=ends[0] - 1)
        self._errors = np.repeat(table, widths, axis=1)

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
