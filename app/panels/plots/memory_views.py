"""Memory plots: the contents of every snapshot slot of every sequence after each round; attention
cells in use, and duplicate positions."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen

from app.looks import Theme
from app.panels.plots.bar_view import BarView, StackedBars, per_round, sample
from app.panels.plots.round_view import RoundView
from app.trace_models.run_rows import GrowingArray, RunRows
from app.trace_models.shown_text import whole_text
from app.widgets.legend import Swatch
from app.widgets.line_styles import draw_triangle, plot_pen
from app.widgets.plot_surface import draw_nothing
from engine.report.session_data import reads_stale
from engine.trace.records import MISSING, SLOT_STATES
from engine.trace.run_ref import RunRef

_CODE = {state: code for code, state in enumerate(SLOT_STATES, start=1)}
"""Image values; 0: the slot was not observed."""
_SPENT = "spent"
"""Recorded as stale by a policy that refuses to read it: not an error."""
_CODE[_SPENT] = len(_CODE) + 1
_NAMES = tuple(_CODE)
_BY_WEIGHT = np.array(
    [0, *(_CODE[s] for s in ("free", _SPENT, "carried", "fresh", "live", "pending", "stale"))],
    np.uint8,
)
"""Codes by weight: of rounds in one pixel column the weightiest is shown, so no stale slot is
lost."""
_WEIGHT_OF = np.argsort(_BY_WEIGHT).astype(np.uint8)
_MARKED = {"pending": "o", "stale": "x"}
"""States with a mark in the cell, in addition to colour; the live state has none."""
_MARK_PIXELS = 6
_LEAST_MARK_PIXELS = 3
"""Marks shrink to this in small cells; in smaller ones only colour is left."""
_MOST_MARKS = 2000
_MOST_ROWS = 1024
"""Most slots of all sequences that are drawn; more would be narrower than a pixel."""
_SLOT_BITS = 16
"""A slot's key: its sequence's number, followed by this many bits for the slot."""
_TIPS = {
    "free": "Never written, or freed",
    "live": "State from which the next batch continues",
    "fresh": "Written by this round's batch",
    "carried": "Kept from an earlier batch",
    "stale": "Stale (older than its index implies), but a rollback to it would be accepted",
    _SPENT: "Rolled back, or stale (older than its index implies); a rollback to it is refused",
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

    name, y_label = "Ring occupancy", "slot"
    about = "Shows what each snapshot slot holds after every round. Press Run (F5)."
    untold = "what its snapshot slots hold"

    def __init__(self, theme: Theme) -> None:
        states = ("live", "fresh", "carried", "pending", "stale", "free")
        super().__init__(theme, [_swatch(state) for state in states])
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
        theme.apply(self._recolour)

    def _reset(self) -> None:
        self._slots: RunRows | None = None
        """The recorded slots; `_entries` has the key and state of each row."""
        self._entries = {"key": GrowingArray(np.int64), "state": GrowingArray(np.uint8)}
        self._keys = np.zeros(0, np.int64)
        """Keys of the drawn slots, ascending; `_row_of` has the row of each."""
        self._row_of = np.zeros(0, np.int64)
        self._n_stale = 0
        self._has_spent = False
        self._n_rounds = 0
        self._draw_nothing()

    def _read(self, run: RunRef) -> int | None:
        self._slots = self._slots or RunRows(run, "memory")
        start, stop = self._slots.read()
        if start == stop:
            return None
        seq_ids, slots, codes = (
            self._slots.column(name, start, stop) for name in ("seq_id", "slot", "state")
        )
        states = np.zeros(len(codes), np.uint8)
        for state, value in _CODE.items():
            states[codes == run.store.text_pool.find(state)] = value
        if not reads_stale(run.facts):
            is_spent = states == _CODE["stale"]
            states[is_spent] = _CODE[_SPENT]
            self._has_spent = self._has_spent or bool(is_spent.any())
        keys = (seq_ids << _SLOT_BITS) + slots
        self._entries["key"].add(keys)
        self._entries["state"].add(states)
        new = np.setdiff1d(keys, self._keys)
        if len(new):
            self._keys = np.union1d(self._keys, new)[:_MOST_ROWS]
            # an empty row between the bands
            bands = np.cumsum(
                np.diff(self._keys >> _SLOT_BITS, prepend=self._keys[0] >> _SLOT_BITS) != 0
            )
            self._row_of = np.arange(len(self._keys)) + bands
        self._n_stale += int((states == _CODE["stale"]).sum())
        self._n_rounds = int(self._slots.rounds.values[-1]) + 1
        return self._n_rounds

    @property
    def _n_rows(self) -> int:
        return int(self._row_of[-1]) + 1 if len(self._row_of) else 0

    def _between(self, first: int, stop: int) -> dict[str, np.ndarray]:
        """The drawn entries of these rounds, with their rows."""
        assert self._slots is not None
        start, end = self._slots.between(first, stop)
        found = {name: values.values[start:end] for name, values in self._entries.items()}
        found |= {name: self._slots.column(name, start, end) for name in ("round", "age")}
        at = np.minimum(np.searchsorted(self._keys, found["key"]), len(self._keys) - 1)
        drawn = self._keys[at] == found["key"]
        return {name: values[drawn] for name, values in (*found.items(), ("row", self._row_of[at]))}

    def _draw(self) -> None:
        first, stop = self.plot.rounds_in_sight
        first, stop = min(first, self._n_rounds), min(stop, self._n_rounds)
        n_rows = self._n_rows
        if stop <= first or not n_rows:
            self._draw_nothing()
            return
        if self._has_spent or (self.run is not None and self.run.ended):
            # until then the previous run's legend stays: a changed legend moves the plot
            self._show_behind([_swatch(_SPENT)] if self._has_spent else [])
        axis, n_pixels = self.plot.run_axis, self.plot.n_pixels
        left, right = axis.start(first), axis.start(stop)
        entries = self._between(first, stop)
        by_pixel = axis.unit != "round" or stop - first > n_pixels
        if by_pixel:
            sight = self._by_pixel(entries, np.linspace(left, right, n_pixels + 1))
        else:
            sight = np.zeros((n_rows, stop - first), np.uint8)
            sight[entries["row"], entries["round"] - first] = entries["state"]
        self._image.setImage(sight, autoLevels=False)
        self._image.setRect(QRectF(left, -0.5, max(right - left, 1e-9), n_rows))
        self.plot.set_y_range(-0.6, n_rows - 0.4)
        self._draw_marks(entries)
        self._label_rows()

    def _draw_nothing(self) -> None:
        self._image.clear()
        draw_nothing(*self._marks.values())

    def _by_pixel(self, entries: dict[str, np.ndarray], edges: np.ndarray) -> np.ndarray:
        """The weightiest state of every pixel column, uint8 [rows, len(edges) - 1]."""
        axis, n_pixels = self.plot.run_axis, len(edges) - 1
        firsts = np.searchsorted(edges, axis.starts(entries["round"]), side="right") - 1
        lasts = np.searchsorted(edges, axis.ends(entries["round"]), side="left") - 1
        firsts = np.clip(firsts, 0, n_pixels - 1)
        widths = np.clip(lasts, firsts, n_pixels - 1) - firsts + 1
        entry = np.repeat(np.arange(len(widths)), widths)
        column = np.arange(len(entry)) - np.repeat(np.cumsum(widths) - widths - firsts, widths)
        weights = np.zeros((self._n_rows, n_pixels), np.uint8)
        at = entries["row"][entry], column
        np.maximum.at(weights, at, _WEIGHT_OF[entries["state"][entry]])
        return _BY_WEIGHT[weights]

    def _draw_marks(self, entries: dict[str, np.ndarray]) -> None:
        """Draw marks in the cells in sight."""
        axis = self.plot.run_axis
        left, right = self.plot.x_range
        width, height = self.plot.box.width(), self.plot.box.height()
        room = min(width * axis.round_width / (right - left), height / self._n_rows)
        size = min(_MARK_PIXELS, max(_LEAST_MARK_PIXELS, int(room)))
        for state, marks in self._marks.items():
            here = entries["state"] == _CODE[state]
            y, rounds = entries["row"][here], entries["round"][here]
            x = (axis.starts(rounds) + axis.ends(rounds)) / 2
            if state == "stale" and room < _MARK_PIXELS:  # neighbouring marks look like a gap
                place = (x - left) * width / (right - left) // (2 * _MARK_PIXELS)
                _, apart = np.unique(np.stack((y, place)), axis=1, return_index=True)
                x, y = x[apart], y[apart]
            # rare and alarming ones are marked even in small cells
            fits = room >= _LEAST_MARK_PIXELS or state == "stale"
            if not len(y) or len(y) > _MOST_MARKS or not fits:
                draw_nothing(marks)
                continue
            if state != "stale" and marks.opts["size"] != size:
                marks.setSize(size)
            marks.setData(x, y)

    def table(self) -> tuple[list[str], list[list[object]]]:
        found = self._between(*self.plot.rounds_in_sight)
        order = np.lexsort((found["key"], found["round"]))
        rows: list[list[object]] = []
        for at in order.tolist():
            key, state, age = (int(found[name][at]) for name in ("key", "state", "age"))
            if state:
                seq_id, slot = divmod(key, 1 << _SLOT_BITS)
                known = None if age == MISSING else age
                rows.append([int(found["round"][at]), seq_id, slot, _NAMES[state - 1], known])
        return ["round", "seq_id", "slot", "state", "age"], rows

    def _label_rows(self) -> None:
        """Slot numbers if they fit; the first slot of a band also names its sequence. Otherwise
        each of several bands is named at its middle."""
        seq_ids, starts = np.unique(self._keys >> _SLOT_BITS, return_index=True)
        several, rows = len(seq_ids) > 1, self._row_of.tolist()
        if several and self.plot.box.height() < self.plot.line_height * self._n_rows:
            bands = np.split(self._row_of, starts[1:])
            names = [f"seq {seq_id}" for seq_id in seq_ids.tolist()]
            ticks = [(band.mean(), name) for band, name in zip(bands, names, strict=True)]
        else:
            slots = (self._keys % (1 << _SLOT_BITS)).tolist()
            ticks = [(row, str(slot)) for row, slot in zip(rows, slots, strict=True)]
            for at, seq_id in zip(starts.tolist(), seq_ids.tolist(), strict=True):
                ticks[at] = rows[at], f"seq {seq_id}" if several else ticks[at][1]
        self.plot.set_rows(ticks)

    def _recolour(self) -> None:
        theme = self._theme
        lut = np.zeros((256, 4), np.uint8)
        for state, value in _CODE.items():
            lut[value] = np.array(theme.color(f"slot.{state}").getRgb())
        self._image.setLookupTable(lut)
        for state, marks in self._marks.items():
            marks.setPen(plot_pen(_ink_on(theme.color(f"slot.{state}")), 1.3))
            marks.setBrush(QBrush(Qt.BrushStyle.NoBrush))

    def _place(self, y: float) -> tuple[int, int] | None:
        """Sequence and slot at a height of the plot."""
        found = np.flatnonzero(self._row_of == round(y))
        return divmod(int(self._keys[found[0]]), 1 << _SLOT_BITS) if len(found) else None

    def _tip(self, x: float, y: float) -> str:
        place, round_ = self._place(y), self.plot.run_axis.round_at(x)
        if place is None:
            return ""
        seq_id, slot = place
        found = self._between(round_, round_ + 1)
        mine = np.flatnonzero(found["key"] == (seq_id << _SLOT_BITS) + slot)
        if not len(mine) or not found["state"][mine[-1]]:
            return ""
        state, age = int(found["state"][mine[-1]]), int(found["age"][mine[-1]])
        lines = [f"round {round_} · sequence {seq_id} · slot {slot}", _NAMES[state - 1]]
        if age != MISSING:
            lines[1] += f", {age} {'token' if age == 1 else 'tokens'} older than the newest"
        return "\n".join(lines)

    def _seq_at(self, _x: float, y: float) -> int | None:
        place = self._place(y)
        return None if place is None else place[0]

    def _first_seq(self) -> int | None:
        return int(self._keys[0]) >> _SLOT_BITS if len(self._keys) else None

    def _summary(self) -> str:
        seq_ids, n_slots = np.unique(self._keys >> _SLOT_BITS, return_counts=True)
        slots = "".join(
            f", slots of sequence {seq}: {n}"
            for seq, n in zip(seq_ids.tolist(), n_slots.tolist(), strict=True)
        )
        return f"rounds: {self._n_rounds}{slots}, stale: {self._n_stale}"


def _ink_on(colour: QColor) -> QColor:
    return QColor("#101418" if colour.lightnessF() > 0.45 else "#ffffff")


_CELLS = ("kv_cells_used", "kv_cells_duplicate")
_ROLES = ("phase.save", "status.warning")
_PATTERNS = (Qt.BrushStyle.SolidPattern, Qt.BrushStyle.BDiagPattern)
_SIGN_PIXELS = 8


class KvCellsView(BarView):
    """Bars of cells in use after each round, all sequences together, duplicates on top; a triangle
    wherever there are any, however few."""

    name, y_label = "KV cells", "cells"
    about = "Shows how many KV cells the sequences use. Press Run (F5)."
    widest_label = "duplicates"
    untold = "how many KV cells are in use"
    overlay_tip = "KV cells in use after each round, including duplicates,"

    def __init__(self, theme: Theme) -> None:
        used, twice = "Cells without duplicates", ("Duplicates: more than one cell per position")
        swatches = (
            Swatch("duplicates", _ROLES[1], twice, draw_triangle),
            Swatch("used", _ROLES[0], used, sample(_PATTERNS[0])),
        )
        super().__init__(theme, swatches)
        self._bars = StackedBars(self.plot, _ROLES, _PATTERNS)
        signs = pg.ScatterPlotItem(symbol="t", size=_SIGN_PIXELS)
        self._signs = self.plot.put(signs, "", _ROLES[1])
        self._reset()

    def _reset(self) -> None:
        self._most = self._most_duplicates = -1
        self._bars.clear()
        draw_nothing(self._signs)

    def _read(self, run: RunRef) -> int | None:
        start, stop = self._rows.read()
        if start == stop:
            return None
        used, duplicates = (self._rows.column(name, start, stop) for name in _CELLS)
        if self._most < 0 and (used == MISSING).all():
            return None
        self._most = max(self._most, int(used.max()))
        self._most_duplicates = max(self._most_duplicates, int(duplicates.max()))
        return int(self._rows.rounds.values[-1]) + 1

    def _draw(self) -> None:
        start, stop = self._rows.between(*self.plot.rounds_in_sight)
        counts = np.stack([np.maximum(self._rows.column(n, start, stop), 0) for n in _CELLS])
        rounds, counts = per_round(self._rows.rounds.values[start:stop], counts, np.add)
        columns, x0, x1 = self._columns(self.plot.run_axis, rounds)
        used, twice = columns.most(counts)
        parts = np.stack([np.maximum(used - twice, 0), twice])
        self._bars.set(x0, x1, parts, self.plot.pixel)
        top = max(float(used.max(initial=1)), self._draw_overlay())
        some = twice > 0
        self._signs.setData(((x0 + x1) / 2)[some], used[some] + 0.08 * top)
        self.plot.set_y_range(0, top * 1.2)

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        return np.maximum(rows.column(_CELLS[0], start, stop), 0)

    def _height_words(self, height: float) -> str:
        return f"{height:,.0f} cells in total"

    def _lines_of(self, round_: int) -> list[str]:
        lines = list[str]()
        for row in self._rows.of_round(round_):
            used, duplicates = (whole_text(row[name]) for name in _CELLS)
            lines.append(f"sequence {row['seq_id']}: {used} cells, {duplicates} duplicates")
        return lines

    def table(self) -> tuple[list[str], list[list[object]]]:
        names = ["round", "seq_id", *_CELLS, "attention_pos_max"]
        return names, self._rows.listed(names, *self.plot.rounds_in_sight)

    def _summary(self) -> str:
        return (
            f"rounds: {self.plot.n_rounds}, most cells of a sequence: {max(self._most, 0)}, "
            f"most duplicates: {max(self._most_duplicates, 0)}"
        )
