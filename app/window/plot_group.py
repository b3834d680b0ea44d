"""The plots of a run: one x-axis for all of them, and what their menu does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QFileDialog, QMenu, QWidget

from app.actions.actions import Actions
from app.looks.theme import Theme, load_theme
from app.panels.drafter.drafter_view import DrafterView
from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.kv_cells_view import KvCellsView
from app.panels.plots.overlaid_view import OverlaidView
from app.panels.plots.ring_view import RingView
from app.panels.plots.rollback_view import RollbackView
from app.panels.plots.round_view import RoundView
from app.panels.plots.timing_view import TimingView
from app.panels.plots.verify_width_view import VerifyWidthView
from app.panels.tune.tune_view import TuneView
from app.panels.what_if.what_if_view import WhatIfView
from app.saved.settings import Settings
from app.trace_models.run_axis import UNITS, RunOverlay
from app.widgets.whole_run_view import WholeRunView
from app.window.plot_export import SUFFIXES, picture, write_plot
from engine.errors import TraceFileError

_FILTERS = ("PNG picture (*.png)", "SVG drawing (*.svg)", "CSV of what is in sight (*.csv)")


class PlotGroup:
    """Makes the plots. `views`, and `whole` about the run as a whole, by the names of their docks.

    menu: what a right click in a plot opens.
    report: takes severity, message and remedy of what a user should know.
    """

    def __init__(
        self,
        theme: Theme,
        actions: Actions,
        settings: Settings,
        menu: QMenu,
        report: Callable[[str, str, str], None],
    ) -> None:
        self._theme, self._actions, self._settings = theme, actions, settings
        self._report = report
        self.menu = menu
        self.rollback, self.ring, self.timing = (
            RollbackView(theme),
            RingView(theme),
            TimingView(theme),
        )
        self.views: dict[str, RoundView] = {
            "rollback": self.rollback,
            "ring": self.ring,
            "acceptance": AcceptanceView(theme),
            "timing": self.timing,
            "verify": VerifyWidthView(theme),
            "kv": KvCellsView(theme),
        }
        self.what_if, self.drafter, self.tune = (
            WhatIfView(theme),
            DrafterView(theme),
            TuneView(theme),
        )
        self.whole: dict[str, WhatIfView | WholeRunView] = {
            "what_if": self.what_if,
            "drafter": self.drafter,
            "tune": self.tune,
        }
        for view in self.views.values():
            view.plot.menu = self.menu
            if view is not self.rollback:
                view.link_x(self.rollback)
        handlers: dict[str, Callable[[], None]] = {
            "plot.show_all": self.rollback.plot.show_all,
            "plot.reset": self.rollback.plot.reset_zoom,
            "plot.export": self.export,
            "plot.copy_image": self.copy_image,
        }
        for action_id, handler in handlers.items():
            actions[action_id].triggered.connect(lambda _=False, run=handler: run())
        actions["plot.pin"].toggled.connect(self.rollback.plot.set_pinned)
        for unit in UNITS:
            actions[f"plot.x_{unit}"].triggered.connect(
                lambda _=False, chosen=unit: self.rollback.plot.set_unit(chosen)
            )
        actions["plot.x_round"].setChecked(True)

    @property
    def widgets(self) -> dict[str, QWidget]:
        """Every view with the name of its dock."""
        return {**self.views, **self.whole}

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Draw a second run over the one on show, or none. Slots and estimates stay those of the
        run on show."""
        for view in self.views.values():
            view.plot.overlay = overlay
            if isinstance(view, OverlaidView):
                view.set_overlay(overlay)
        plots = [view.plot for view in self.views.values() if view.in_sight and view.has_rounds]
        for plot in plots[:1]:
            plot.show_rounds(plot.n_rounds)  # the second run may be longer

    @property
    def targets(self) -> dict[str, QWidget]:
        """The widget of each view that takes the keyboard focus; the plot menu acts on its view."""
        return {
            **{name: view.plot for name, view in self.views.items()},
            "what_if": self.what_if.plot,
            "drafter": self.drafter.quality.reliability,
            "tune": self.tune.grid,
        }

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        for view in (*self.views.values(), *self.whole.values()):
            view.retheme(theme)

    def chosen(self) -> RoundView | WhatIfView | WholeRunView | None:
        """The plot that has the focus, else the first in sight that shows anything."""
        every = [*self.views.values(), *self.whole.values()]
        views = [view for view in every if view.has_rounds]
        focus = QApplication.focusWidget()
        for view in views:
            if focus is not None and view.isAncestorOf(focus):
                return view
        return next((v for v in views if not v.visibleRegion().isEmpty()), None)

    def export(self) -> None:
        """Ask for a file and write the chosen plot to it."""
        view = self._chosen_or_told()
        if view is None:
            return
        title = view.accessibleName()
        folder = self._settings.folder("plot")
        name, chosen = QFileDialog.getSaveFileName(
            view.page,
            f"Export plot: {title}",
            str(folder / f"{title.lower().replace(' ', '-')}.png"),
            ";;".join(_FILTERS),
            options=QFileDialog.Option.DontUseNativeDialog,
        )
        if not name:
            return
        path = Path(name)
        if path.suffix not in SUFFIXES:
            suffix = SUFFIXES[_FILTERS.index(chosen) if chosen in _FILTERS else 0]
            path = path.with_name(path.name + suffix)
        self._settings.set_folder("plot", path.parent)
        try:
            write_plot(view, path, load_theme("light"), self._theme)
        except TraceFileError as error:
            self._report("error", error.message, error.remedy)
        else:
            self._report("info", f"Plot written to {path}.", "")

    def copy_image(self) -> None:
        """Put a picture of the chosen plot on the clipboard."""
        view = self._chosen_or_told()
        if view is not None:
            QGuiApplication.clipboard().setImage(picture(view, load_theme("light"), self._theme))

    def _chosen_or_told(self) -> RoundView | WhatIfView | WholeRunView | None:
        view = self.chosen()
        if view is None:
            self._report("info", "There is no plot with data in sight.", "Open one and press Run.")
        return view
