"""Tables of figures as all panels have them."""

from __future__ import annotations

from PySide6.QtCore import QAbstractItemModel
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView

from app.looks.theme import figures_font

_ROW_PAD = 5


def plain_table(model: QAbstractItemModel, name: str) -> QTableView:
    """A read-only table with low rows, no grid and figures of equal width."""
    table = QTableView()
    table.setModel(model)
    table.setAccessibleName(name)
    table.setFont(figures_font())
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
    table.setTabKeyNavigation(False)
    table.setShowGrid(False)
    table.setWordWrap(False)
    table.setAlternatingRowColors(True)
    table.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.horizontalHeader().setHighlightSections(False)
    rows = table.verticalHeader()
    rows.hide()
    rows.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    rows.setMinimumSectionSize(1)
    rows.setDefaultSectionSize(table.fontMetrics().height() + _ROW_PAD)
    return table


def fit_height(table: QTableView, most_rows: int | None = None) -> None:
    """As high as its rows, or the first of them, so that the panel scrolls and not the table."""
    n = table.model().rowCount()
    shown = n if most_rows is None else min(n, most_rows)
    header = table.horizontalHeader()
    height = header.sizeHint().height() if not header.isHidden() else 0
    table.setFixedHeight(height + shown * table.verticalHeader().defaultSectionSize() + 2)
