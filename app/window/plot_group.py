"""Plots of a run, made when first shown, stacked on one x-axis; and their export as tables and
pictures, in the light colours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path

import pyqtgraph as pg
from PySide6.QtCore import QBuffer, QByteArray, QEvent, QObject, QPoint, QRect, QSize, Qt, QTimer
from PySide6.QtGui import QFont, QImage, QImageWriter, QPainter, QPalette, QRegion
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QApplication, QDockWidget, QFileDialog, QMenu, QWidget

from app.actions import Actions
from app.looks import FocusFrame, Theme
from app.panels.lab.gate_view import GateView
from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.bar_view import OverlaidView
from app.panels.plots.memory_views import KvCellsView, RingView
from app.panels.plots.rollback_view import RollbackView
from app.panels.plots.round_view import RoundView
from app.panels.plots.timing_view import TimingView
from app.panels.plots.verify_width_view import VerifyWidthView
from app.panels.tune.drafter_view import DrafterView
from app.panels.tune.tune_view import TuneView
from app.panels.tune.what_if_view import WhatIfView
from app.saved.settings import Settings
from app.trace_models.run_facts import effective, run_origin, run_title
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import UNITS, RunOverlay, RunRange
from app.widgets.fitted_labels import Chip
from app.widgets.whole_run_view import WholeRunView
from engine.errors import TraceFileError
from engine.files import written_whole
from engine.trace.run_ref import RunRef

OVER_ROUNDS: dict[str, Callable[[Theme], RoundView]] = {
    "rollback": RollbackView,
    "ring": RingView,
    "acceptance": AcceptanceView,
    "timing": TimingView,
    "verify": VerifyWidthView,
    "kv": KvCellsView,
}
"""Plots with a common x-axis, by the names of their docks."""
_WHOLE: dict[str, Callable[[Theme], WholeRunView]] = {
    "what_if": WhatIfView,
    "drafter": DrafterView,
    "tune": TuneView,
    "gate": GateView,
}

PlotView = RoundView | WholeRunView
PLOTS = (*OVER_ROUNDS, *_WHOLE)
"""Names of the docks that hold plots."""
SUFFIXES = (".png", ".svg", ".csv")
_SCALE = 2.0
_FILTERS = ("PNG picture (*.png)", "SVG drawing (*.svg)", "CSV of the visible part (*.csv)")


class PlotGroup:
    """Makes the plots: plots[name], by the name of its dock, is made on first use. `views` and
    `whole`, about the run as a whole, are those made so far.

    menu: context menu of plots. report: takes severity, message and remedy for the user. made:
    takes each new view with the name of its dock, and shows it the run.
    """

    def __init__(
        self,
        theme: Theme,
        actions: Actions,
        settings: Settings,
        menu: QMenu,
        report: Callable[[str, str, str], object],
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
        """The plot that all others are linked to."""
        plot = self.rollback.plot
        actions.on({f"plot.x_{unit}": partial(plot.set_unit, unit) for unit in UNITS})
        actions.on({"plot.show_all": plot.show_all, "plot.reset": plot.reset_zoom})
        actions.on({"plot.export": self.export})
        actions["plot.pin"].toggled.connect(plot.set_pinned)
        actions["plot.x_round"].setChecked(True)

    def __getitem__(self, name: str) -> PlotView:
        """The view of a dock. Raises KeyError for a name that is not a plot's."""
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
            view.link_x(self.rollback)  # after it has the run, since showing that moves the axis
        view.set_range(self._range)
        self._lay_over(view)
        return view

    def plain_measured(self) -> None:
        timing = self.views.get("timing")
        if isinstance(timing, TimingView):
            timing.plain_measured()

    def set_range(self, chosen: RunRange | None) -> None:
        self._range = chosen
        for view in self.views.values():
            view.set_range(chosen)

    def _lay_over(self, view: RoundView) -> None:
        view.plot.overlay = self._overlay
        if isinstance(view, OverlaidView):
            view.set_overlay(self._overlay)

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Draw a second run over the one on show, or none. Slots and estimates are only those of
        the run on show."""
        self._overlay = overlay
        for view in self.views.values():
            self._lay_over(view)
        plots = [view.plot for view in self.views.values() if view.in_sight and view.has_rounds]
        for plot in plots[:1]:
            plot.show_rounds(plot.n_rounds)  # the second run may be longer

    @staticmethod
    def target(view: QWidget | None) -> QWidget | None:
        """The focusable widget of a plot; the plot menu acts on its view."""
        if isinstance(view, DrafterView):
            return view.quality.reliability
        if isinstance(view, TuneView | GateView):
            return view.grid
        return view.plot if isinstance(view, RoundView | WhatIfView) else None

    def chosen(self) -> PlotView | None:
        """The focused plot, else the first visible one with data."""
        every: list[PlotView] = [*self.views.values(), *self.whole.values()]
        views = [view for view in every if view.has_rounds]
        focus = QApplication.focusWidget()
        for view in views:
            if focus is not None and view.isAncestorOf(focus):
                return view
        return next((v for v in views if not v.visibleRegion().isEmpty()), None)

    def export(self) -> None:
        view = self._chosen_or_told()
        if view is None:
            return
        title = view.accessibleName()
        offered = self._settings.folder("plot") / f"{title.lower().replace(' ', '-')}.png"
        name, chosen = QFileDialog.getSaveFileName(
            view.page, f"Export plot: {title}", str(offered), ";;".join(_FILTERS)
        )
        if not name:
            return
        path = Path(name)
        if path.suffix not in SUFFIXES:
            suffix = SUFFIXES[_FILTERS.index(chosen) if chosen in _FILTERS else 0]
            path = path.with_name(path.name + suffix)
        self._settings.set_folder("plot", path.parent)
        try:
            write_plot(view, path, self._theme)
        except TraceFileError as error:
            self._report("error", error.message, error.remedy)
        else:
            self._report("info", f"Plot written to {path}.", "")

    def image(self) -> QImage | None:
        """A picture of the current plot, None without one."""
        view = self._chosen_or_told()
        return None if view is None else picture(view, self._theme)

    def _chosen_or_told(self) -> PlotView | None:
        view = self.chosen()
        if view is None:
            self._report("info", "No visible plot has data.", "Open one and press Run.")
        return view


_A_STACK = 3
_WAIT_MS = 5
_MOVES = (QEvent.Type.Resize, QEvent.Type.Move, QEvent.Type.Show, QEvent.Type.Hide)


class PlotStack(QObject):
    """Tracks the places of docks with plots over the same axis. waits: whether more are to come,
    which would move the present ones."""

    def __init__(self, parent: QObject, waits: Callable[[], bool] = lambda: False) -> None:
        super().__init__(parent)
        self._waits = waits
        self._views: list[RoundView] = []
        self._asked = False

    def add(self, dock: QDockWidget, view: RoundView) -> None:
        """Track one more dock, which holds this view."""
        self._views.append(view)
        for watched in (dock, view):
            watched.installEventFilter(self)
        dock.visibilityChanged.connect(self._ask)
        view.currentChanged.connect(self._ask)
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
        """Tell every visible plot what is below it, and the legends' common width."""
        if self._waits():
            QTimer.singleShot(_WAIT_MS, self, self.arrange)
            return
        self._asked = False
        for stack in self._stacks():
            for view in stack:
                view.set_stacked(len(stack) >= _A_STACK)
            wide = max(view.legend_width for view in stack)
            drawn = [view for view in stack if view.currentWidget() is not view.empty]
            for view, below in zip_longest(drawn, drawn[1:]):
                bare = below is not None and view.is_plot_alone and below.is_plot_alone
                view.take_place(wide, has_axis=not bare)
            for view in stack:
                view.catch_up()  # otherwise painted twice

    def _stacks(self) -> list[list[RoundView]]:
        """Visible views with the same left and right edges, from top to bottom."""
        stacks: dict[tuple[object, int, int], list[tuple[int, RoundView]]] = {}
        for view in self._views:
            if view.in_sight:
                at = view.mapTo(view.window(), QPoint())
                key = (view.window(), at.x(), view.width())
                stacks.setdefault(key, []).append((at.y(), view))
        return [[v for _, v in sorted(s, key=lambda pair: pair[0])] for s in stacks.values()]


def picture(view: PlotView, theme: Theme) -> QImage:
    """The page of a view below its caption, at twice its size, in light colours."""
    caption = PlotCaption(view.page, view.run)
    with _in_light(view, theme):
        size = view.page.size() + QSize(0, caption.height)
        image = QImage(size * _SCALE, QImage.Format.Format_RGB32)
        image.setDevicePixelRatio(_SCALE)
        _render(view, QPainter(image), caption, theme)
    return image


def write_plot(view: PlotView, path: Path, theme: Theme) -> None:
    """Write a view by the suffix: .png and .svg as it looks, .csv the numbers in sight.

    An existing file is replaced once the new one is complete. Raises TraceFileError.
    """
    with written_whole(path, TraceFileError) as part:
        if path.suffix == ".csv":
            _write_csv(view, part)
            return
        buffer = QBuffer()  # Qt does not report disk errors
        buffer.open(QBuffer.OpenModeFlag.WriteOnly)
        if path.suffix == ".svg":
            _draw_svg(view, buffer, theme)
        else:
            QImageWriter(buffer, QByteArray(b"png")).write(picture(view, theme))
        part.write_bytes(buffer.data().data())


def _write_csv(view: PlotView, path: Path) -> None:
    names, rows = view.table()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_field(value) for value in row] for row in rows)


def _field(value: object) -> object:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else value


def _draw_svg(view: PlotView, buffer: QBuffer, theme: Theme) -> None:
    caption = PlotCaption(view.page, view.run)
    generator = QSvgGenerator()
    generator.setOutputDevice(buffer)
    generator.setResolution(view.page.logicalDpiX())  # otherwise the axes are too small
    generator.setTitle(caption.title)
    generator.setDescription("\n".join(caption.lines))
    with _in_light(view, theme):
        size = view.page.size() + QSize(0, caption.height)
        generator.setSize(size)
        generator.setViewBox(QRect(QPoint(), QSize(size)))
        _render(view, QPainter(generator), caption, theme)


def _render(view: PlotView, painter: QPainter, caption: PlotCaption, theme: Theme) -> None:
    painter.fillRect(painter.window(), theme.color("plot.background"))
    caption.paint(painter, theme)
    top = QPoint(0, caption.height)
    view.page.render(painter, top, QRegion(), QWidget.RenderFlag.DrawChildren)
    painter.end()


@contextmanager
def _in_light(view: PlotView, theme: Theme) -> Iterator[None]:
    """The view in light colours, with its axis and symbols as shapes, not pictures of them, without
    focus frame and button, and at a readable size, within the context."""
    shown, size = theme.name, view.page.size()
    view.page.resize(size.expandedTo(_LEAST))
    theme.become("light")
    palette, role = QPalette(), QPalette.ColorRole
    for target, source in (
        (role.Window, "plot.background"),
        (role.Base, "plot.background"),
        (role.AlternateBase, "ui.raised"),
        (role.Button, "ui.raised"),
        (role.WindowText, "ui.text"),
        (role.Text, "ui.text"),
        (role.ButtonText, "ui.text"),
        (role.PlaceholderText, "ui.muted"),
    ):
        palette.setColor(target, theme.color(source))
    view.page.setPalette(palette)
    plot = view.plot if isinstance(view, RoundView) else None
    had_axis = plot is None or plot.has_axis
    if plot is not None:
        plot.show_axis(True)  # in a stack only the last one has it
    floating = [*view.page.findChildren(FocusFrame), *view.page.findChildren(Chip)]
    floating = [one for one in floating if one.isVisible()]
    for widget in floating:
        widget.hide()
    items = (item for one in view.page.findChildren(pg.GraphicsView) for item in one.items())
    symbols = [item for item in items if isinstance(item, pg.ScatterPlotItem)]
    for one in symbols:
        one.setExportMode(True)
    try:
        yield
    finally:
        for one in symbols:
            one.setExportMode(False)
        for widget in floating:
            widget.show()
        if plot is not None:
            plot.show_axis(had_axis)
        view.page.resize(size)
        view.page.setPalette(QPalette())
        theme.become(shown)


_LEAST = QSize(640, 200)
"""Least size of a page, in pixels; a narrow dock's may be smaller."""
_LEFT, _TOP = 14, 8


class PlotCaption:
    """A title and lines below it, each elided at the width of the page. page: the view, or a widget
    in it."""

    def __init__(self, page: QWidget, run: RunRef | None) -> None:
        parent = page.parentWidget()
        self.title = page.accessibleName() or ("" if parent is None else parent.accessibleName())
        self.lines = [] if run is None else _lines(run)
        self._page = page
        self._step = page.fontMetrics().lineSpacing()

    @property
    def height(self) -> int:
        """Height above the page, in its pixels."""
        return _TOP + (1 + len(self.lines)) * self._step

    def paint(self, painter: QPainter, theme: Theme) -> None:
        """Draw it from (0, 0) on."""
        painter.save()
        font = QFont(self._page.font())
        width = self._page.width() - 2 * _LEFT
        for at, line in enumerate((self.title, *self.lines)):
            font.setBold(at == 0)
            painter.setFont(font)
            painter.setPen(theme.color("ui.muted" if at else "ui.text"))
            box = QRect(_LEFT, _TOP + at * self._step, width, self._step)
            text = painter.fontMetrics().elidedText(line, Qt.TextElideMode.ElideRight, width)
            painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, text)
        painter.restore()


def _lines(run: RunRef) -> list[str]:
    named = filter(None, (run_origin(run.facts), run_name(run), run_title(run.facts)))
    return [" · ".join(named), *effective(run.facts, run).splitlines()]
