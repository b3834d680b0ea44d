"""Plots as pictures and as tables. Pictures are made in the light colours, whatever is shown."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from PySide6.QtCore import QBuffer, QByteArray, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QFont, QImage, QImageWriter, QPainter, QPalette, QRegion
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.plots.round_view import RoundView
from app.trace_models.run_facts import effective, run_origin, run_title
from app.trace_models.run_notes import run_name
from engine.errors import TraceFileError
from engine.files import written_whole
from engine.trace.run_ref import RunRef

SUFFIXES = (".png", ".svg", ".csv")
_SCALE = 2.0


class Picturable(Protocol):
    """A view that can be written to a file."""

    page: QWidget

    @property
    def run(self) -> RunRef | None: ...

    def retheme(self, theme: Theme) -> None: ...

    def table(self) -> tuple[list[str], list[list[object]]]: ...


def picture(view: Picturable, light: Theme, shown: Theme) -> QImage:
    """The page of a view under its caption, at twice its size in pixels; `shown` are the colours
    to go back to."""
    caption = PlotCaption(view.page, view.run)
    size = view.page.size() + QSize(0, caption.height)
    image = QImage(size * _SCALE, QImage.Format.Format_RGB32)
    image.setDevicePixelRatio(_SCALE)
    image.fill(light.color("plot.background"))
    with _in_colours(view, light, shown):
        painter = QPainter(image)
        caption.paint(painter, light)
        _render(view, painter, caption.height)
    return image


def write_plot(view: Picturable, path: Path, light: Theme, shown: Theme) -> None:
    """Write a view as the suffix says: .png and .svg as it looks, .csv the numbers in sight.

    An existing file is replaced once the new one is complete. Raises TraceFileError.
    """
    with written_whole(path, TraceFileError) as part:
        if path.suffix == ".csv":
            _write_csv(view, part)
            return
        buffer = QBuffer()  # Qt does not report what a disk refuses
        buffer.open(QBuffer.OpenModeFlag.WriteOnly)
        if path.suffix == ".svg":
            _draw_svg(view, buffer, light, shown)
        else:
            QImageWriter(buffer, QByteArray(b"png")).write(picture(view, light, shown))
        part.write_bytes(buffer.data().data())


def _write_csv(view: Picturable, path: Path) -> None:
    names, rows = view.table()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_field(value) for value in row] for row in rows)


def _field(value: object) -> object:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else value


def _draw_svg(view: Picturable, buffer: QBuffer, light: Theme, shown: Theme) -> None:
    caption = PlotCaption(view.page, view.run)
    size = view.page.size() + QSize(0, caption.height)
    generator = QSvgGenerator()
    generator.setOutputDevice(buffer)
    generator.setSize(size)
    generator.setViewBox(QRect(QPoint(), QSize(size)))
    generator.setResolution(view.page.logicalDpiX())  # else the axes come out too small
    generator.setTitle(caption.title)
    generator.setDescription("\n".join(caption.lines))
    with _in_colours(view, light, shown):
        painter = QPainter(generator)
        painter.fillRect(QRect(QPoint(), size), light.color("plot.background"))
        caption.paint(painter, light)
        _render(view, painter, caption.height)


def _render(view: Picturable, painter: QPainter, top: int) -> None:
    view.page.render(painter, QPoint(0, top), QRegion(), QWidget.RenderFlag.DrawChildren)
    painter.end()


@contextmanager
def _in_colours(view: Picturable, light: Theme, shown: Theme) -> Iterator[None]:
    """The view in the light colours, with its axis, for as long as it takes to draw it."""
    palette, role = QPalette(), QPalette.ColorRole
    for target, source in (
        (role.Window, "plot.background"),
        (role.Base, "plot.background"),
        (role.Button, "ui.raised"),
        (role.WindowText, "ui.text"),
        (role.Text, "ui.text"),
        (role.ButtonText, "ui.text"),
        (role.PlaceholderText, "ui.muted"),
    ):
        palette.setColor(target, light.color(source))
    view.retheme(light)
    view.page.setPalette(palette)
    plot = view.plot if isinstance(view, RoundView) else None
    had_axis = plot is None or plot.has_axis
    if plot is not None:
        plot.show_axis(True)  # in a stack that is the last one's
    try:
        yield
    finally:
        if plot is not None:
            plot.show_axis(had_axis)
        view.page.setPalette(QPalette())
        view.retheme(shown)


_LEFT, _TOP = 14, 8


class PlotCaption:
    """A title and lines below it, each cut at the width of the page. page: named after what it
    shows, or inside a widget that is."""

    def __init__(self, page: QWidget, run: RunRef | None) -> None:
        parent = page.parentWidget()
        self.title = page.accessibleName() or ("" if parent is None else parent.accessibleName())
        self.lines = [] if run is None else _lines(run)
        self._page = page
        self._step = page.fontMetrics().lineSpacing()

    @property
    def height(self) -> int:
        """Room above the page, in its pixels."""
        return _TOP + (1 + len(self.lines)) * self._step

    def paint(self, painter: QPainter, theme: Theme) -> None:
        """Write it from (0, 0) on."""
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
    return [" · ".join(named), *effective(run.facts).splitlines()]
