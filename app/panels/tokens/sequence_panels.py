"""Where the panels of several sequences go: as tiles, or one over the other as tabs."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QSplitter, QStackedWidget, QTabWidget, QWidget

_PER_ROW = 3


class SequencePanels(QStackedWidget):
    """Panels by sequence, at most three side by side. One sequence never has a tab."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._panels: dict[int, QWidget] = {}
        self._as_tabs = False
        self._rows = QSplitter(Qt.Orientation.Vertical)
        self._rows.setChildrenCollapsible(False)
        self._tabs = QTabWidget()
        self._tabs.setDocumentMode(True)
        self._tabs.setAccessibleName("Sequences")
        self.addWidget(self._rows)
        self.addWidget(self._tabs)

    @property
    def as_tabs(self) -> bool:
        """Whether only one sequence is in sight."""
        return self.currentWidget() is self._tabs

    def add(self, panels: Mapping[int, QWidget]) -> None:
        """Give sequences their panels."""
        self._panels.update(panels)
        self._place()

    def clear(self) -> None:
        """Let go of all panels."""
        for panel in self._panels.values():
            panel.hide()
            panel.setParent(None)
            panel.deleteLater()
        self._panels = {}
        self._place()

    def set_tabs(self, as_tabs: bool) -> None:
        """Tabs, or tiles."""
        if as_tabs != self._as_tabs:
            self._as_tabs = as_tabs
            self._place()

    def reveal(self, seq_id: int) -> None:
        """Bring the tab of a sequence to the front."""
        panel = self._panels.get(seq_id)
        if panel is not None and self.as_tabs:
            self._tabs.setCurrentWidget(panel)

    def _place(self) -> None:
        focus = QApplication.focusWidget()
        old_rows = [one for i in range(self._rows.count()) if (one := self._rows.widget(i))]
        ordered = sorted(self._panels.items())
        tabs = self._as_tabs and len(ordered) > 1
        if tabs:
            for at, (seq_id, panel) in enumerate(ordered):
                if self._tabs.indexOf(panel) < 0:
                    self._tabs.insertTab(at, panel, f"Sequence {seq_id}")
        else:
            per_row = -(-len(ordered) // -(-len(ordered) // _PER_ROW)) if ordered else 1
            for start in range(0, len(ordered), per_row):
                row = QSplitter(Qt.Orientation.Horizontal)
                row.setChildrenCollapsible(False)
                for _, panel in ordered[start : start + per_row]:
                    row.addWidget(panel)
                    panel.show()
                self._rows.addWidget(row)
                row.setSizes([1_000] * row.count())
        for old in old_rows:
            old.hide()
            old.setParent(None)
            old.deleteLater()
        self.setCurrentWidget(self._tabs if tabs else self._rows)
        if focus is not None and self.isAncestorOf(focus):
            focus.setFocus()
