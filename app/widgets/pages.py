"""Views that share a panel: a tab for each, or all of them one below the other."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QLabel, QTabBar, QVBoxLayout, QWidget

from app.looks.tabs import mark_front_tab
from app.widgets.build import made, vbox

_INDENT = 6


class Pages(QWidget):
    """Pages by name, empty until `fill` puts a view on them. titles: of the pages. `turned` when
    another page has come into sight."""

    turned = Signal()

    def __init__(self, titles: Mapping[str, str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names = tuple(titles)
        self._views: dict[str, QWidget] = {}
        self._pages: dict[str, QWidget] = {}
        self._heads: list[QLabel] = []
        self._is_stack = False
        self.bar = made(QTabBar, accessibleName="Pages: " + ", ".join(titles.values()))
        mark_front_tab(self.bar)
        self.bar.setExpanding(False)
        self.bar.setDrawBase(False)
        self.bar.setUsesScrollButtons(True)
        self.bar.setElideMode(Qt.TextElideMode.ElideNone)
        whole = vbox(self.bar, of=self, margins=(0, 0, 0, 0), spacing=0)
        for name, title in titles.items():
            self.bar.addTab(title)
            self._heads.append(head := QLabel(title))
            head.setIndent(_INDENT)
            page = self._pages[name] = QWidget()
            vbox(head, of=page, margins=(0, 0, 0, 0), spacing=0)
            whole.addWidget(page, 1)
        self.bar.currentChanged.connect(self._arrange)
        self._arrange()

    @property
    def current(self) -> str:
        """Name of the page that is chosen."""
        return self._names[self.bar.currentIndex()]

    def view(self, name: str) -> QWidget | None:
        """What is on a page; None before it is filled."""
        return self._views.get(name)

    def fill(self, name: str, view: QWidget) -> None:
        """Put a view on its page."""
        self._views[name] = view
        column = self._pages[name].layout()
        assert isinstance(column, QVBoxLayout)
        column.addWidget(view, 1)

    def shows(self, name: str) -> bool:
        """Whether a page is in sight where the panel is."""
        return self._is_stack or name == self.current

    def turn_to(self, name: str) -> None:
        """Bring a page into sight."""
        self.bar.setCurrentIndex(self._names.index(name))

    def set_stack(self, wanted: bool) -> None:
        """All pages one below the other, each under its title, or one at a time."""
        if wanted is not self._is_stack:
            self._is_stack = wanted
            self._arrange()

    def _arrange(self, *_: object) -> None:
        self.bar.setVisible(not self._is_stack)
        for head in self._heads:
            head.setVisible(self._is_stack)
        for name in sorted(self._names, key=self.shows):  # one that goes makes room first
            self._pages[name].setVisible(self.shows(name))
        self.turned.emit()
