"""What every snapshot slot of every sequence held after each round."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.widgets.legend import Swatch
from app.widgets.round_view import RoundView
from engine.trace.records import MISSING, SLOT_STATES
from engine.trace.run_ref import RunRef

_CODE = {state: code for code, state in enumerate(SLOT_STATES, start=1)}
"""Values of the image; 0 is a slot that was not observed."""
_BY_WEIGHT = np.array(
    [0, *(_CODE[s] for s in ("free", "carried", "fresh", "live", "pending", "stale"))], np.uint8
)
"""Codes; where rounds share a column of pixels the last is shown, so no stale slot is lost."""
_MARKED = {"pending": "o", "stale": "x"}
"""States with a sign in the cell besides its colour. The live state has slot 0 for a sign."""
_MARK_PIXELS = 6
_LEAST_MARK_PIXELS = 3
"""In cells that are narrower than a mark it shrinks to this, then only the colour is left."""
_MOST_MARKS = 2000
_ROW_LABEL_PIXELS = 13
_TIPS = {
    "free": "Never written, or given up",
    "live": "The state that the next batch continues from",
    "fresh": "Written by this round's batch",
    "carried": "Kept from an earlier batch",
    "stale": "Older than its place claims: reading it would be wrong",
    "pending": "Chosen by a rollback, read by the next batch",
}


def _swatch(state: str) -> Swatch:
    def draw(painter: QPainter, box: QRect, colour: QColor) -> None:
        painter.fillRect(box, colour)
        if state not in _MARKED:
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(_ink_on(colour), 1.3))
        inner = QRectF(box).adjusted(2.5, 2.5, -2.5, -2.5)
        if state == "stale":
            painter.drawLine(inner.topLeft(), inner.bottomRight())
            painter.drawLine(inner.topRight(), inner.bottomLeft())
        else:
            painter.drawEllipse(inner)

    return Swatch(state, f"slot.{state}", _TIPS[state], draw)


class RingView(RoundView):
    """Heat map of rounds and slots, one band of slots for each sequence, slot 0 on top."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(
            theme,
            "Ring occupancy",
            "slot",
            [_swatch(state) for state in ("live", "fresh", "carried", "pending", "stale", "free")],
            "Shows what each snapshot slot holds after every round. Press Run (F5).",
            parent,
        )
        self._image = pg.ImageItem(axisOrder="row-major")
        self._image.setLevels((0, 255))
        self._marks = {
            state: pg.ScatterPlotItem(symbol=symbol, size=_MARK_PIXELS)
            for state, symbol in _MARKED.items()
        }
        for item in (self._image, *self._marks.values()):
            self.plot.addItem(item, ignoreBounds=True)
        self.plot.box.invertY(True)
        self._reset()
        self.retheme(theme)

    def _reset(self) -> None:
        self._next_row = 0
        self._n_slots: dict[int, int] = {}
        self._first_row: dict[int, int] = {}
        self._states = np.zeros((0, 0), np.uint8)
        self._ages = np.zeros((0, 0), np.int64)
        self._n_rounds = 0

    def _read(self, run: RunRef) -> int | None:
        store, table = run.store, run.store.memory
        start, stop = self._next_row, len(table)
        self._next_row = stop
        mine = table.column("run_id", start, stop) == run.run_id
        if not mine.any():
            return None
        rounds, seq_ids, slots, codes, ages = (
            table.column(name, start, stop)[mine]
            for name in ("round", "seq_id", "slot", "state", "age")
        )
        self._make_room(int(rounds.max()) + 1, seq_ids, slots)
        lut = np.zeros(int(codes.max()) + 1, np.uint8)
        for state, value in _CODE.items():
            code = store.text_pool.find(state)
            if 0 <= code < len(lut):
                lut[code] = value
        known = np.array(sorted(self._first_row))
        first = np.array([self._first_row[seq_id] for seq_id in known.tolist()])
        rows = first[np.searchsorted(known, seq_ids)] + slots
        self._states[rows, rounds] = lut[codes]
        self._ages[rows, rounds] = ages
        return self._n_rounds

    def _make_room(self, n_rounds: int, seq_ids: np.ndarray, slots: np.ndarray) -> None:
        """Grow the image; where slots or sequences are new, move the bands to their new rows."""
        self._n_rounds = max(self._n_rounds, n_rounds)
        wanted = dict(self._n_slots)
        for seq_id in np.unique(seq_ids).tolist():
            n_slots = int(slots[seq_ids == seq_id].max()) + 1
            wanted[seq_id] = max(wanted.get(seq_id, 0), n_slots)
        columns = self._states.shape[1]
        if wanted == self._n_slots and n_rounds <= columns:
            return
        if n_rounds > columns:
            columns = max(1024, 2 * n_rounds)
        first, n_rows = {}, 0
        for seq_id in sorted(wanted):
            first[seq_id] = n_rows
            n_rows += wanted[seq_id] + 1  # an empty row between the bands
        states = np.zeros((n_rows - 1, columns), np.uint8)
        ages = np.full((n_rows - 1, columns), MISSING, np.int64)
        for seq_id, row in self._first_row.items():
            n, old = self._n_slots[seq_id], self._states.shape[1]
            states[first[seq_id] : first[seq_id] + n, :old] = self._states[row : row + n]
            ages[first[seq_id] : first[seq_id] + n, :old] = self._ages[row : row + n]
        self._states, self._ages = states, ages
        self._n_slots, self._first_row = wanted, first

    def _draw(self) -> None:
        first, stop = self.plot.rounds_in_sight
        first, stop = min(first, self._n_rounds), min(stop, self._n_rounds)
        n_rows = len(self._states)
        if stop <= first or not n_rows:
            self._image.clear()
            for marks in self._marks.values():
                marks.clear()
            return
        axis, n_pixels = self.plot.run_axis, self.plot.n_pixels
        left, right = axis.start(first), axis.start(stop)
        sight = self._states[:, first:stop]
        if axis.unit != "round" or stop - first > n_pixels:
            sight = self._by_pixel(first, stop, np.linspace(left, right, n_pixels + 1))
        self._image.setImage(np.ascontiguousarray(sight), autoLevels=False)
        self._image.setRect(QRectF(left, -0.5, max(right - left, 1e-9), n_rows))
        self.plot.box.setYRange(-0.6, n_rows - 0.4, padding=0)
        self._draw_marks(first, stop, sight if sight.shape[1] != stop - first else None)
        self._label_rows()

    def _by_pixel(self, first: int, stop: int, edges: np.ndarray) -> np.ndarray:
        """The weightiest state of every column of pixels, uint8 [rows, len(edges) - 1]."""
        rounds = np.clip(self.plot.run_axis.rounds_at(edges), first, stop - 1)
        starts = rounds[:-1]
        stops = np.maximum(rounds[1:], starts + 1)
        weights = np.argsort(_BY_WEIGHT).astype(np.uint8)[self._states[:, first:stop]]
        padded = np.pad(weights, ((0, 0), (0, 1)))
        bounds = np.stack([starts, stops], axis=1).ravel() - first
        columns: np.ndarray = _BY_WEIGHT[np.maximum.reduceat(padded, bounds, axis=1)[:, ::2]]
        return columns

    def _draw_marks(self, first: int, stop: int, columns: np.ndarray | None) -> None:
        """Signs in the cells; `columns`: the states by column of pixels where cells share them."""
        axis = self.plot.run_axis
        left, right = self.plot.x_range
        room = self.plot.box.width() * axis.round_width / (right - left)
        sight = self._states[:, first:stop] if columns is None else columns
        size = min(_MARK_PIXELS, max(_LEAST_MARK_PIXELS, int(room)))
        for state, marks in self._marks.items():
            y, x = np.nonzero(sight == _CODE[state])
            # the rare and alarming ones are marked even where the cells are narrow
            if len(x) > _MOST_MARKS or not (room >= _LEAST_MARK_PIXELS or state == "stale"):
                marks.clear()
                continue
            if state != "stale" and marks.opts["size"] != size:
                marks.setSize(size)
            if columns is None:
                marks.setData((axis.starts(x + first) + axis.ends(x + first)) / 2, y)
            else:
                start, end = axis.start(first), axis.start(stop)
                marks.setData(start + (x + 0.5) * ((end - start) / columns.shape[1]), y)

    def table(self) -> tuple[list[str], list[list[object]]]:
        first, stop = self.plot.rounds_in_sight
        rows: list[list[object]] = []
        for round_ in range(first, min(stop, self._n_rounds)):
            for seq_id, row in self._first_row.items():
                for slot in range(self._n_slots[seq_id]):
                    state = int(self._states[row + slot, round_])
                    age = int(self._ages[row + slot, round_])
                    if state:
                        known = None if age == MISSING else age
                        rows.append([round_, seq_id, slot, SLOT_STATES[state - 1], known])
        return ["round", "seq_id", "slot", "state", "age"], rows

    def _label_rows(self) -> None:
        """Slot numbers where they fit; the first slot of a band also names its sequence."""
        several = len(self._first_row) > 1
        fits = self.plot.box.height() >= _ROW_LABEL_PIXELS * len(self._states)
        ticks = []
        for seq_id, row in self._first_row.items():
            ticks.append((row, f"seq {seq_id}" if several else "0"))
            if fits:
                ticks += [(row + slot, str(slot)) for slot in range(1, self._n_slots[seq_id])]
        self.plot.set_ticks("left", ticks)

    def _recolour(self, theme: Theme) -> None:
        lut = np.zeros((256, 4), np.uint8)
        for state, value in _CODE.items():
            lut[value] = np.array(theme.color(f"slot.{state}").getRgb())
        self._image.setLookupTable(lut)
        for state, marks in self._marks.items():
            ink = _ink_on(theme.color(f"slot.{state}"))
            pen = QPen(ink, 1.3)
            pen.setCosmetic(True)
            marks.setPen(pen)
            marks.setBrush(QBrush(Qt.BrushStyle.NoBrush))

    def _place(self, y: float) -> tuple[int, int] | None:
        """Sequence and slot at a height of the plot."""
        row = round(y)
        for seq_id, first in self._first_row.items():
            if first <= row < first + self._n_slots[seq_id]:
                return seq_id, row - first
        return None

    def _tip(self, x: float, y: float) -> str:
        place, round_ = self._place(y), self.plot.run_axis.round_at(x)
        if place is None or not 0 <= round_ < self._n_rounds:
            return ""
        seq_id, slot = place
        at = self._first_row[seq_id] + slot, round_
        state, age = int(self._states[at]), int(self._ages[at])
        if not state:
            return ""
        lines = [f"round {round_} · sequence {seq_id} · slot {slot}", SLOT_STATES[state - 1]]
        if age != MISSING:
            lines[1] += f", {age} {'token' if age == 1 else 'tokens'} behind the newest"
        return "\n".join(lines)

    def _seq_at(self, _x: float, y: float) -> int | None:
        place = self._place(y)
        return None if place is None else place[0]

    def _first_seq(self) -> int | None:
        return min(self._first_row, default=None)

    def _summary(self) -> str:
        n_stale = int((self._states == _CODE["stale"]).sum())
        slots = "".join(f", slots of sequence {seq}: {n}" for seq, n in self._n_slots.items())
        return f"rounds: {self._n_rounds}{slots}, stale: {n_stale}"


def _ink_on(colour: QColor) -> QColor:
    return QColor("#101418" if colour.lightnessF() > 0.45 else "#ffffff")
