"""Acceptance plots: over the run, by index in the draft, and by draft length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.looks import Theme
from app.panels.plots.bar_view import OverlaidView, envelope, overlay_line
from app.panels.plots.draft_histogram import SWATCHES, DraftHistogram, PositionRatesPlot
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import GrowingArray, RunAxis, RunOverlay, RunRows
from app.trace_models.shown_text import significant
from app.widgets.build import Fitting
from app.widgets.legend import Swatch
from app.widgets.line_styles import DOTS, OVERLAYS, draw_bar, draw_dashes, overlay_sample
from app.widgets.plot_surface import draw_nothing
from engine.analysis.acceptance.breakdown import breakdown, by_words
from engine.trace.run_ref import RunRef
from engine.trace.timings import StepSums, per_position

_RATES_FROM, _BOTH_FROM = 103, 137
"""Widths in characters from which the rates by index are next to the lines, and the table, too."""
_SIDE_LINES, _SIDE_CHARACTERS = 6, 34
_PLOT_CHARACTERS = 24
"""Least width of the lines: a long legend hides their neighbours."""
_WINDOWED, _LIFETIME = range(2)
_MOST_GROUPED = 50_000
"""Most steps grouped while the pointer rests: about a tenth of a second."""


class AcceptanceView(Fitting, OverlaidView):
    """Two lines over the rounds; next to them three rates by index and a table by draft length."""

    name, y_label = "Acceptance", "rate"
    about = "Shows how many drafted tokens are accepted. Press Run (F5) with a drafter."
    widest_label = "lifetime: 0.999"

    def __init__(self, theme: Theme) -> None:
        windowed = (
            f"Accepted / drafted over the last {WINDOW} steps; each sequence has one step per round"
        )
        swatches = (
            Swatch(f"last {WINDOW}", "accepted.line", windowed, draw_bar),
            Swatch("lifetime", "plot.text", "Accepted / drafted so far", draw_dashes),
        )
        super().__init__(theme, swatches)
        self._stacked = False
        self.rates = PositionRatesPlot(theme)
        self.rates.tip = self._by_words
        self.histogram = DraftHistogram(theme)
        sides: tuple[QWidget, ...] = (self.rates, self.histogram)
        for place, widget in enumerate(sides, start=1):
            widget.setFixedWidth(_SIDE_CHARACTERS * self.fontMetrics().averageCharWidth())
            widget.setMinimumHeight(1)  # hidden if there is little room
            self._row.insertWidget(place, widget)
        put, dashes = self.plot.put, Qt.PenStyle.DashLine
        self._lifetime = put(pg.PlotCurveItem(), "plot.text", style=dashes)
        self._windowed = put(pg.PlotCurveItem(), "accepted.line")
        dotted = OVERLAYS[0][0], DOTS
        first, second, *self._lines_further = (
            overlay_line(self.plot, *style, cased=False)
            for style in (OVERLAYS[0], dotted, *OVERLAYS[1:])
        )
        self._lines_over = first, second
        self._curves_over: dict[RunRef, tuple[StepCurves, int]] = {}
        self.plot.getPlotItem().getAxis("left").setTicks([[(0, "0"), (0.5, "0.5"), (1, "1")]])
        self.plot.set_y_range(-0.04, 1.08)
        self._reset()

    def _reset(self) -> None:
        self.curves = StepCurves()
        draw_nothing(self._windowed, self._lifetime)

    def _read(self, run: RunRef) -> int | None:
        start, stop = self._rows.read()
        if start == stop:
            # with sums alone, they are shown at the side
            return 0 if not stop and self._told(run) else None
        self.curves.add(self._rows, start, stop)
        return int(self._rows.rounds.values[-1]) + 1

    def _told(self, run: RunRef | None) -> dict[str, Any]:
        """Figures reported for a run without rounds, if rates by index are among them."""
        reported = {} if run is None or len(self.curves) else run.facts.told or {}
        return reported if reported.get("acceptance_per_position") else {}

    def _draw(self) -> None:
        curves = self.curves
        self._draw_curves(curves, self.plot.run_axis, (self._windowed, self._lifetime))
        if self.overlay is not None:
            over = self._read_over(self.overlay)
            self._draw_curves(over, self.overlay.axis(self.plot.run_axis.unit), self._lines_over)
            self.rates.set_overlay(per_position(over.sums.counts)["acceptance_per_position"])
            for line, one in zip(self._lines_further, self.overlay.every[1:], strict=False):
                axis = one.axis(self.plot.run_axis.unit)
                self._draw_curves(self._read_over(one), axis, (line,))
        for label, name, values in (
            (_WINDOWED, f"last {WINDOW}", curves.windowed),
            (_LIFETIME, "lifetime", curves.lifetime),
        ):
            n = len(curves)
            newest = f": {significant(float(values(n - 1, n)[0]))}" if n else ""
            self.legend.set_label(label, name + newest)
        counts = curves.sums.counts
        reported = self._told(self.run)
        if reported:
            rate = significant(reported.get("draft_acceptance_rate"))
            self.legend.set_label(_LIFETIME, f"lifetime: {rate}")
        by_index = reported or per_position(counts)
        self.rates.set_rates(by_index["acceptance_per_position"])
        self.histogram.set_counts(counts)

    def _draw_curves(
        self, curves: StepCurves, axis: RunAxis, lines: Sequence[pg.PlotCurveItem]
    ) -> None:
        """Draw the windowed rate and, with two lines, the rate so far."""
        start, stop = curves.between(*axis.between(*self.plot.x_range))
        start, stop = max(0, start - 1), min(len(curves), stop + 1)
        rounds = curves.rounds[start:stop]
        x = (axis.starts(rounds) + axis.ends(rounds)) / 2
        rates = curves.windowed(start, stop), curves.lifetime(start, stop)
        for line, y in zip(lines, rates, strict=False):
            line.setData(*envelope(x, y, *self.plot.x_range, self.plot.n_pixels))

    def _by_words(self, _x: float, _y: float) -> str:
        """Acceptance grouped by more than the index, and the clear differences of two runs."""
        if self.run is None or not 0 < len(self.curves) <= _MOST_GROUPED:
            return ""
        return by_words(breakdown(self.run, self.overlay.run if self.overlay else None))

    def _read_over(self, overlay: RunOverlay) -> StepCurves:
        """The current rates of an overlaid run."""
        rows = overlay.rows()
        curves, n = self._curves_over.get(overlay.run) or (StepCurves(), 0)
        if len(rows) > n:
            curves.add(rows, n, len(rows))
        self._curves_over[overlay.run] = curves, len(rows)
        return curves

    def _clear_overlay(self) -> None:
        self._curves_over = {}
        for line in (*self._lines_over, *self._lines_further):
            line.setData([], [])
        self.rates.set_overlay(None)

    def _overlay_swatches(self, overlay: RunOverlay) -> list[Swatch]:
        found = [
            Swatch(
                f"{one.name}, last {WINDOW}",
                role,
                f"Accepted / drafted over the last {WINDOW} steps of {one.name}",
                overlay_sample(dashes),
            )
            for one, (role, dashes) in zip(overlay.every, OVERLAYS, strict=False)
        ]
        over = f"of {overlay.name}, over those of {run_name(overlay.over)}"
        tip = f"Accepted / drafted so far {over}; by index in the draft, its marks are hollow"
        lifetime = f"{overlay.name}, lifetime"
        found.insert(1, Swatch(lifetime, OVERLAYS[0][0], tip, overlay_sample(DOTS)))
        return found

    def _overlay_words(self, overlay: RunOverlay, round_: int) -> str:
        return _rates_words(self._read_over(overlay), round_)

    def _lines_of(self, round_: int) -> list[str]:
        rates = _rates_words(self.curves, round_)
        lines = [
            f"sequence {row['seq_id']}: {row['num_accepted_draft_tokens']} "
            f"of {row['num_draft_tokens']} accepted"
            for row in self._rows.of_round(round_)
            if row["num_draft_tokens"]
        ]
        return [*lines, rates] if rates else []

    def table(self) -> tuple[list[str], list[list[object]]]:
        start, stop = self.curves.between(*self.plot.rounds_in_sight)
        columns = (
            self.curves.rounds[start:stop],
            self.curves.windowed(start, stop),
            self.curves.lifetime(start, stop),
        )
        names = ["round", f"acceptance_last_{WINDOW}", "acceptance_lifetime"]
        return names, [list(row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def _summary(self) -> str:
        n = len(self.curves)
        reported = self._told(self.run).get("draft_acceptance_rate")
        rate = significant(float(self.curves.lifetime(n - 1, n)[0]) if n else reported)
        return f"rounds: {self.plot.n_rounds}, steps: {n}, lifetime acceptance: {rate}"

    @property
    def is_plot_alone(self) -> bool:
        return self.rates.isHidden()

    def set_stacked(self, stacked: bool) -> None:
        """In a stack only the plot is shown, as wide as the others."""
        self._stacked = stacked
        self.fit()

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        super().set_overlay(overlay)
        self.fit()  # the legend's width has changed

    def fit(self) -> None:
        metrics = self.fontMetrics()
        high = self.height() >= _SIDE_LINES * metrics.height()
        characters = self.width() / metrics.averageCharWidth()
        can_show = high and not self._stacked
        self._show_rates(can_show and characters >= _RATES_FROM)
        if not self.is_plot_alone and not self._has_room_beside(1):
            self._show_rates(False)
        both = not self.is_plot_alone and characters >= _BOTH_FROM
        self.histogram.setVisible(both and self._has_room_beside(2))

    def _show_rates(self, shown: bool) -> None:
        self.rates.setVisible(shown)
        self._show_behind(SWATCHES if shown else [])

    def _has_room_beside(self, n_sides: int) -> bool:
        legend = self.legend.minimumWidth() if self.legend_width else 0
        left = self.width() - legend - n_sides * self.rates.minimumWidth()
        return left >= _PLOT_CHARACTERS * self.fontMetrics().averageCharWidth()


def _rates_words(curves: StepCurves, round_: int) -> str:
    """Both rates after a round, empty if it has no step."""
    start, stop = curves.between(round_, round_ + 1)
    if start == stop:
        return ""
    windowed, lifetime = (
        float(rate(stop - 1, stop)[0]) for rate in (curves.windowed, curves.lifetime)
    )
    return f"last {WINDOW} steps {significant(windowed)}, lifetime {significant(lifetime)}"


WINDOW = 16
"""Window of the rate, in steps."""


class StepCurves:
    """Grows with the rows of a run; `sums` has the counts for the other figures.

    rounds: of each step, int64 [n]. windowed, lifetime: accepted / drafted, float64 [n].
    """

    def __init__(self) -> None:
        self.sums = StepSums()
        self._rounds = GrowingArray(np.int64)
        self._drafted, self._accepted = GrowingArray(np.int64), GrowingArray(np.int64)

    def add(self, rows: RunRows, start: int, stop: int) -> None:
        """Read rows start .. stop of the run's `rounds` table."""
        steps = rows.add_to(self.sums, start, stop)
        drafted = rows.column("num_draft_tokens", start, stop)
        accepted = rows.column("num_accepted_draft_tokens", start, stop)
        self._rounds.add(rows.rounds.values[start:stop][steps])
        for sums, values in ((self._drafted, drafted), (self._accepted, accepted)):
            before = int(sums.values[-1]) if len(sums) else 0
            sums.add(before + np.cumsum(np.maximum(values[steps], 0)))

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def rounds(self) -> np.ndarray:
        return self._rounds.values

    def between(self, first_round: int, stop_round: int) -> tuple[int, int]:
        """Start and stop, as indices of steps, of rounds first_round .. stop_round - 1."""
        start, stop = np.searchsorted(self.rounds, (first_round, stop_round))
        return int(start), int(stop)

    def windowed(self, start: int, stop: int) -> np.ndarray:
        """The rate over the last WINDOW steps, of steps start..stop."""
        return self._over(self._accepted, start, stop) / self._over(self._drafted, start, stop)

    def lifetime(self, start: int, stop: int) -> np.ndarray:
        """The rate over all steps so far, of steps start..stop."""
        rates: np.ndarray = self._accepted.values[start:stop] / self._drafted.values[start:stop]
        return rates

    def _over(self, sums: GrowingArray, start: int, stop: int) -> np.ndarray:
        before = np.arange(start, stop) - WINDOW
        base = np.where(before < 0, 0, sums.values[np.maximum(before, 0)])
        counts: np.ndarray = sums.values[start:stop] - base
        return counts
