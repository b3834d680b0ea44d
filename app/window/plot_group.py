"""Plots of a run, made when they are first looked at, one under the other on one x-axis, and what
their menu does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QPoint, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QDockWidget, QFileDialog, QMenu, QWidget

from app.actions.actions import Actions
from app.looks.theme import Theme, load_theme
from app.panels.checks.gate_view import GateView
from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.bar_view import OverlaidView
from app.panels.plots.kv_cells_view import KvCellsView
from app.panels.plots.ring_view import RingView
from app.panels.plots.rollback_view import RollbackView
from app.panels.plots.round_view import RoundView
from app.panels.plots.timing_view import TimingView
from app.panels.plots.verify_width_view import VerifyWidthView
from app.panels.tune.drafter_view import DrafterView
from app.panels.tune.tune_view import TuneView
from app.panels.tune.what_if_view import WhatIfView
from app.saved.settings import Settings
from app.trace_models.run_range import RunRange
from app.trace_models.run_rows import UNITS, RunOverlay
from app.widgets.whole_run_view import WholeRunView
from app.window.plot_export import SUFFIXES, picture, write_plot
from engine.errors import TraceFileError

OVER_ROUNDS: dict[str, Callable[[Theme], RoundView]] = {
    "rollback": RollbackView,
    "ring": RingView,
    "acceptance": AcceptanceView,
    "timing": TimingView,
    "verify": VerifyWidthView,
    "kv": KvCellsView,
}
"""Plots with one x-axis, by the names of their docks."""
_WHOLE: dict[str, Callable[[Theme], WholeRunView]] = {
    "what_if": WhatIfView,
    "drafter": DrafterView,
    "tune": TuneView,
    "gate": GateView,
}

PlotView = RoundView | WholeRunView
PLOTS = (*OVER_ROUNDS, *_WHOLE)
"""Names of the docks that hold plots."""
_FILTERS = ("PNG picture (*.png)", "SVG drawing (*.svg)", "CSV of what is in sight (*.csv)")


class PlotGroup:
    """Makes the plots: plots[name], by the name of its dock, is made when first asked for.
    `views` and `whole`, about the run as a whole, are those made so far.

    menu: what a right click in a plot opens.
    report: takes severity, message and remedy of what a user should know.
    made: takes each new view with the name of its dock, and shows it the run.
    """

    def __init__(
        self,
        theme: Theme,
        actions: Actions,
        settings: Settings,
        menu: QMenu,
        report: Callable[[str, str, str], None],
        made: Callable[[str, PlotView], None],
    ) -> None:
        self._theme, self._actions, self._settings = theme, actions, settings
        self._report, self._tell_made = report, made
        self.menu = menu
        self.views: dict[str, RoundView] = {}
        self.whole: dict[str, WholeRunView] = {}
        self._overlay: RunOverlay | None = None
        self._range: RunRange | None = None
        self.rollback = self._make_over_rounds("rollback")
        """The one that all are linked to."""
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

    def __getitem__(self, name: str) -> PlotView:
        """The view of a dock. Raises KeyError if no plot is called so."""
        if name in OVER_ROUNDS:
            return self.views[name] if name in self.views else self._make_over_rounds(name)
        if name not in self.whole:
            view = self.whole[name] = _WHOLE[name](self._theme)
            self._tell_made(name, view)
        return self.whole[name]

    def _make_over_rounds(self, name: str) -> RoundView:
        view = self.views[name] = OVER_ROUNDS[name](self._theme)
        view.plot.menu = self.menu
        self._tell_made(name, view)
        if name != "rollback":
            view.link_x(self.rollback)  # it has the run by now: to show one moves the axis
        view.set_range(self._range)
        self._lay_over(view)
        return view

    def plain_measured(self) -> None:
        """The run on show has been measured against plain decoding."""
        timing = self.views.get("timing")
        if isinstance(timing, TimingView):
            timing.plain_measured()

    def set_range(self, chosen: RunRange | None) -> None:
        """Shade a range of rounds in all plots over rounds, or none."""
        self._range = chosen
        for view in self.views.values():
            view.set_range(chosen)

    def _lay_over(self, view: RoundView) -> None:
        view.plot.overlay = self._overlay
        if isinstance(view, OverlaidView):
            view.set_overlay(self._overlay)

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Draw a second run over the one on show, or none. Slots and estimates stay those of the
        run on show."""
        self._overlay = overlay
        for view in self.views.values():
            self._lay_over(view)
        plots = [view.plot for view in self.views.values() if view.in_sight and view.has_rounds]
        for plot in plots[:1]:
            plot.show_rounds(plot.n_rounds)  # the second run may be longer

    @staticmethod
    def target(view: QWidget | None) -> QWidget | None:
        """The widget of a plot that takes the keyboard focus; the plot menu acts on its view."""
        if isinstance(view, DrafterView):
            return view.quality.reliability
        if isinstance(view, TuneView | GateView):
            return view.grid
        return view.plot if isinstance(view, RoundView | WhatIfView) else None

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        every: list[PlotView] = [*self.views.values(), *self.whole.values()]
        for view in every:
            view.retheme(theme)

    def chosen(self) -> PlotView | None:
        """The plot that has the focus, else the first in sight that shows anything."""
        every: list[PlotView] = [*self.views.values(), *self.whole.values()]
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

    def _chosen_or_told(self) -> PlotView | None:
        view = self.chosen()
        if view is None:
            self._report("info", "There is no plot with data in sight.", "Open one and press Run.")
        return view


_A_STACK = 3
_MOVES = (QEvent.Type.Resize, QEvent.Type.Move, QEvent.Type.Show, QEvent.Type.Hide)


class PlotStack(QObject):
    """Watches where docks with plots over the same axis are."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._views: list[RoundView] = []
        self._asked = False

    def add(self, dock: QDockWidget, view: RoundView) -> None:
        """Watch one more dock, which holds this view."""
        self._views.append(view)
        for watched in (dock, view):
            watched.installEventFilter(self)
        dock.visibilityChanged.connect(self._ask)
        self._ask()

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if event.type() in _MOVES:
            self._ask()
        return False

    def _ask(self, *_: object) -> None:
        if not self._asked:
            self._asked = True
            QTimer.singleShot(0, self, self.arrange)  # after the other docks' moves

    def arrange(self) -> None:
        """Tell every plot in sight what is below it, and how wide the others' legends are."""
        self._asked = False
        for stack in self._stacks():
            for view in stack:
                view.set_stacked(len(stack) >= _A_STACK)
            wide = max(view.legend_width for view in stack)
            for view, below in zip_longest(stack, stack[1:]):
                bare = below is not None and view.is_plot_alone and below.is_plot_alone
                view.take_place(wide, has_axis=not bare)
            for view in stack:
                view.catch_up()  # drawn while it is painted, it would be painted twice

    def _stacks(self) -> list[list[RoundView]]:
        """Views in sight that have the same edges at the left and right, from top to bottom."""
        stacks: dict[tuple[object, int, int], list[tuple[int, RoundView]]] = {}
        for view in self._views:
            if view.in_sight:
                at = view.mapTo(view.window(), QPoint())
                key = (view.window(), at.x(), view.width())
                stacks.setdefault(key, []).append((at.y(), view))
        return [[v for _, v in sorted(s, key=lambda pair: pair[0])] for s in stacks.values()]
