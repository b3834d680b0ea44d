"""Plots over rounds that can show a second run: lines over what is drawn, legend and readout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from app.panels.plots.round_view import RoundView
from app.trace_models.run_axis import RunOverlay
from app.widgets.legend import Swatch


class OverlaidView(RoundView):
    """A RoundView with an overlay, or without one. The second run is read when it is drawn: out of
    sight nothing of it is computed."""

    _overlay: RunOverlay | None = None
    _n_drawn = 0
    """Rows that the overlaid run had when it was drawn last."""

    @property
    def overlay(self) -> RunOverlay | None:
        """The second run, drawn over the one on show; None without one."""
        return self._overlay

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Draw a second run over the one on show, or none."""
        self._overlay, self._n_drawn = overlay, 0
        self._clear_overlay()
        self.legend.set_leading([] if overlay is None else self._overlay_swatches(overlay))
        self._fit_legend()
        self._redraw()
        if self.has_rounds:
            self.plot.setAccessibleDescription(self._words())

    def refresh(self) -> None:
        super().refresh()
        if self._overlay is None or self._stale or not self.has_rounds:
            return
        if self.visibleRegion().isEmpty() or len(self._overlay.rows()) != self._n_drawn:
            self._redraw()

    def readout(self, x: float, y: float) -> str:
        own = super().readout(x, y)
        if self._overlay is None:
            return own
        axis = self._overlay.axis(self.plot.run_axis.unit)
        round_ = axis.round_at(x)
        words = self._overlay_words(self._overlay, round_)
        parts = [f"{self._overlay.over}, {own}"] if own else []
        if words:
            parts.append(f"{self._overlay.name}, {axis.text(round_)}\n{words}")
        return "\n".join(parts)

    @abstractmethod
    def _overlay_swatches(self, overlay: RunOverlay) -> Sequence[Swatch]:
        """Legend entries of the second run's lines."""

    @abstractmethod
    def _clear_overlay(self) -> None:
        """Forget everything read of a second run."""

    @abstractmethod
    def _overlay_words(self, overlay: RunOverlay, round_: int) -> str:
        """The second run's values in a round, empty for a round that it does not have."""

    def _words(self) -> str:
        own = super()._words()
        return own if self._overlay is None else f"{own}, overlaid: {self._overlay.name}"

    def _redraw(self) -> None:
        super()._redraw()
        if self._overlay is not None and not self._stale:
            self._n_drawn = len(self._overlay.rows())
