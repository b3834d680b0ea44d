"""Table models with fixed columns: what views ask them for."""

from __future__ import annotations

from typing import Any

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtTest import QAbstractItemModelTester
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.looks import Theme, apply_theme
from app.widgets.plain_table import ColumnTable, TableColumn, fit_width, plain_table, table_text

_COLUMNS = (
    TableColumn("kind", "what", "What it is", True),
    TableColumn("n", "number", "How many there are"),
)
_ROLE = Qt.ItemDataRole


class Table(ColumnTable):
    """Three rows that answer with what they were asked."""

    columns = _COLUMNS

    def n_rows(self) -> int:
        return 3

    def cell(self, row: int, name: str, role: int) -> Any:
        return (row, name) if role == _ROLE.UserRole else None


@pytest.fixture
def table(qtbot: QtBot) -> Table:
    return Table()


def test_it_is_a_sound_model(table: Table) -> None:
    QAbstractItemModelTester(table, QAbstractItemModelTester.FailureReportingMode.Fatal)
    assert (table.rowCount(), table.columnCount()) == (3, 2)
    inside = table.index(0, 0)
    assert (table.rowCount(inside), table.columnCount(inside)) == (0, 0), "a table, no tree"
    assert table.data(QModelIndex(), _ROLE.UserRole) is None


def test_cells_are_asked_by_name(table: Table) -> None:
    assert table.index(2, 1).data(_ROLE.UserRole) == (2, "n")
    assert table.column_of("n") == 1
    with pytest.raises(ValueError, match="missing"):
        table.column_of("missing")


def test_titles_stand_above_their_cells_on_the_same_side(table: Table) -> None:
    across = Qt.Orientation.Horizontal
    assert [table.headerData(i, across) for i in range(3)] == ["what", "number", None]
    assert table.headerData(1, across, _ROLE.ToolTipRole) == "How many there are"
    assert table.headerData(0, Qt.Orientation.Vertical) is None
    for column, side in enumerate((Qt.AlignmentFlag.AlignLeft, Qt.AlignmentFlag.AlignRight)):
        wanted = side | Qt.AlignmentFlag.AlignVCenter
        assert table.headerData(column, across, _ROLE.TextAlignmentRole) == wanted
        assert table.index(0, column).data(_ROLE.TextAlignmentRole) == wanted


class Figures(Table):
    """Rows with a figure, a text of two lines, and nothing."""

    def cell(self, row: int, name: str, role: int) -> Any:
        texts = {"kind": "two\nlines", "n": 0 if row else None}
        return texts[name] if role == _ROLE.DisplayRole else None

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = _ROLE.DisplayRole
    ) -> Any:
        if orientation is Qt.Orientation.Vertical:
            return f"row {section}"
        return super().headerData(section, orientation, role)


def test_a_table_is_copied_with_its_titles_or_the_rows_selected(qtbot: QtBot) -> None:
    view = plain_table(Figures(), "Figures")
    qtbot.addWidget(view)
    view.selectRow(2)
    whole = "what\tnumber\ntwo lines\t\ntwo lines\t0\ntwo lines\t0\n"
    assert table_text(view) == whole, "one row is merely the one in use"
    view.verticalHeader().show()
    assert table_text(view).splitlines()[0::3] == ["\twhat\tnumber", "row 2\ttwo lines\t0"]
    view.verticalHeader().hide()
    view.setSelectionMode(view.SelectionMode.ExtendedSelection)
    view.selectAll()
    view.selectionModel().select(
        view.model().index(1, 0),
        view.selectionModel().SelectionFlag.Deselect | view.selectionModel().SelectionFlag.Rows,
    )
    assert table_text(view) == "what\tnumber\ntwo lines\t\ntwo lines\t0\n"
    (copies,) = view.actions()
    copies.trigger()
    assert QGuiApplication.clipboard().text() == table_text(view)


class Mixed(Table):
    """Figures, and then text."""

    columns = _COLUMNS[::-1]

    def cell(self, row: int, name: str, role: int) -> Any:
        return {"n": "88", "kind": "HH"}[name] if role == _ROLE.DisplayRole else None


def ink_of(picture: QImage) -> tuple[int, int]:
    """The first and the last column of pixels in which anything is written."""
    dark = [
        x
        for x in range(picture.width())
        if any(picture.pixelColor(x, y).lightness() < 128 for y in range(picture.height()))
    ]
    return dark[0], dark[-1]


def test_text_keeps_away_from_the_figures_before_it(qtbot: QtBot, qapp: QApplication) -> None:
    apply_theme(qapp, Theme("light"))
    view = plain_table(Mixed(), "Mixed")
    qtbot.addWidget(view)
    for column, text in enumerate(("88", "HH")):
        fit_width(view, column, text)
    view.resize(400, 120)
    figures, text = (view.visualRect(view.model().index(0, column)) for column in (0, 1))
    cells = view.viewport().grab().toImage()
    (_, left), (right, end) = (ink_of(cells.copy(place)) for place in (figures, text))
    assert figures.width() - left + right >= 12
    metrics = view.fontMetrics()
    assert end - right > 0.8 * metrics.horizontalAdvance("HH"), "all of it has room"
    title = view.horizontalHeader().viewport().grab().toImage()
    (start, _) = ink_of(title.copy(text.x() + 3, 0, text.width() - 6, title.height() - 4))
    assert abs(start + 3 - right) <= 2
