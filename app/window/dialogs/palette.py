"""The command palette: every action by a few letters of its name, without the mouse."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QObject, QSize, Qt
from PySide6.QtGui import (
    QAction,
    QBrush,
    QHideEvent,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHeaderView,
    QLabel,
    QLineEdit,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from app.widgets.build import Fitting, made, vbox

_CHARACTERS = 132
_NAME_SHARE = 0.45
"""Largest share of the width for names; what a command does follows."""
_ROWS = 14
_ROW_PADDING = 8
_OPENS = {"Panels": ("open",), "Layout": ("open",)}
"""Search words for the actions of a submenu that none of them contains."""
_LIST_KEYS = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


@dataclass(frozen=True, slots=True)
class Command:
    """A line of the palette. needs: what is missing while the action is disabled. reason: why it
    is, if nothing is missing. group: the action's submenu, which is searched, too."""

    action: QAction
    tip: str
    needs: str = ""
    reason: str = ""
    group: str = ""

    @property
    def text(self) -> str:
        return self.action.text().replace("&", "")

    @property
    def line(self) -> str:
        """The name with its group as prefix."""
        return f"{self.group}: {self.text}" if self.group else self.text

    def fits(self, query: str) -> tuple[int, int] | None:
        """How well it matches the typed text, larger is better; None: not at all.

        Whole words of the name come first, then prefixes of its words, then words of the name and
        the description, then letters anywhere in the name, alone or after its group.
        """
        found = [score(query, text) for text in {self.text, self.line}]
        letters = max((points for points in found if points is not None), default=None)
        typed, name = _words(query), [*_words(self.line), *_OPENS.get(self.group, ())]
        if all(word in name for word in typed):
            return 3, letters or 0
        if _begin(typed, name):
            return 2, letters or 0
        if _begin(typed, [*name, *_words(self.tip)]):
            return 1, letters or 0
        return None if letters is None else (0, letters)


class CommandPalette(Fitting, QFrame):
    """A box over the window. `commands()` is called when it opens and when an action changes.

    Return triggers the chosen line, Escape closes; disabled lines are grey, say what they need, and
    cannot be triggered.
    """

    def __init__(self, commands: Callable[[], Sequence[Command]], window: QWidget) -> None:
        super().__init__(window)
        self._commands = commands
        self._shown: list[Command] = []
        self._watched: list[QAction] = []
        self._back: QWidget = window
        self.setAutoFillBackground(True)
        self.setAccessibleName("Command palette")
        self.field = made(QLineEdit, placeholderText="Type a part of a command")
        self.field.setAccessibleName("Filter of the commands")
        self.field.setClearButtonEnabled(True)
        self.field.textChanged.connect(self._filter)
        self.field.installEventFilter(self)
        self.list = made(QTreeWidget, columnCount=3, headerHidden=True, rootIsDecorated=False)
        self.list.setUniformRowHeights(True)
        self.list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.list.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.list.setAccessibleName("Commands")
        self.list.header().setStretchLastSection(False)
        self.list.header().setSectionResizeMode(1, QHeaderView.ResizeMode.Stretch)
        self.list.itemClicked.connect(lambda _: self.trigger())
        self.none = made(QLabel, "No command has these words or letters.", margin=_ROW_PADDING)
        vbox(self.field, self.none, self.list, of=self, margins=(6, 6, 6, 6))
        self.hide()

    @property
    def lines(self) -> list[str]:
        return [command.line for command in self._shown]

    def open(self) -> None:
        """Show every command, with the field empty and focused."""
        focus = self.window().focusWidget()
        if focus is not None and not self.isAncestorOf(focus):
            self._back = focus
        self.field.clear()
        self._filter("")
        self._watch()
        self._place()
        self.show()
        self.raise_()
        self.field.setFocus()

    def close_palette(self) -> None:
        """Close and return the focus."""
        self.hide()
        self._back.setFocus()
        self._back = self.window()

    def trigger(self) -> None:
        """Trigger the chosen line, if it is enabled."""
        action = self._chosen()
        if action is not None and action.isEnabled():
            self.close_palette()
            action.trigger()

    def hideEvent(self, event: QHideEvent) -> None:
        for action in self._watched:
            action.enabledChanged.disconnect(self._refresh)
        self._watched = []
        super().hideEvent(event)

    def _watch(self) -> None:
        self._watched = [command.action for command in self._shown]
        for action in self._watched:
            action.enabledChanged.connect(self._refresh)

    def _refresh(self) -> None:
        """An action has changed: update the lines."""
        chosen = self._chosen()
        self._filter(self.field.text())
        if chosen is not None:
            rows = [row for row, command in enumerate(self._shown) if command.action is chosen]
            self.list.setCurrentIndex(self.list.model().index(rows[0] if rows else 0, 0))

    def _chosen(self) -> QAction | None:
        row = self.list.indexOfTopLevelItem(self.list.currentItem())
        return self._shown[row].action if row >= 0 else None

    def _filter(self, query: str) -> None:
        found = [(command.fits(query), command) for command in self._commands()]
        fitting = [(points, command) for points, command in found if points is not None]
        if query.strip():
            fitting.sort(
                key=lambda pair: (-pair[0][0], not pair[1].action.isEnabled(), -pair[0][1])
            )
        self._shown = [command for _, command in fitting]
        self.list.clear()
        muted = self.list.palette().placeholderText()
        height = self.fontMetrics().height() + _ROW_PADDING
        items = [_item(command, muted) for command in self._shown]
        for item in items:
            item.setSizeHint(1, QSize(0, height))  # the column that stretches
        self.list.addTopLevelItems(items)
        self.fit()
        self.none.setVisible(not items)
        if items:
            self.list.setCurrentItem(items[0])

    def _place(self) -> None:
        window = self.window()
        width = min(_CHARACTERS * self.fontMetrics().averageCharWidth(), window.width() - 40)
        height = (_ROWS + 3) * (self.fontMetrics().height() + _ROW_PADDING)
        self.setGeometry(
            (window.width() - width) // 2, 40, width, min(height, window.height() - 80)
        )

    def fit(self) -> None:
        for column in (0, 2):
            self.list.resizeColumnToContents(column)
        names = min(self.list.columnWidth(0), round(_NAME_SHARE * self.width()))
        self.list.setColumnWidth(0, names)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(self.palette().accent().color())
        painter.drawRect(self.rect().adjusted(0, 0, -1, -1))
        painter.end()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.FocusOut and self.isVisible():
            self.hide()  # the focus has moved elsewhere and stays there
            return False
        if event.type() is QEvent.Type.KeyPress and isinstance(event, QKeyEvent):
            key = event.key()
            if key == Qt.Key.Key_Escape:
                self.close_palette()
                return True
            if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self.trigger()
                return True
            if key in _LIST_KEYS:
                self.list.keyPressEvent(event)
                return True
        return super().eventFilter(watched, event)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _begin(typed: Sequence[str], words: Sequence[str]) -> bool:
    """Whether each typed word is a prefix of one of the words."""
    return all(any(word.startswith(part) for word in words) for part in typed)


def _item(command: Command, muted: QBrush) -> QTreeWidgetItem:
    action = command.action
    keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
    tip, enabled = command.tip, action.isEnabled()
    if not enabled and (command.reason or command.needs):
        tip = command.reason or f"needs {command.needs}"
    mark = "✓ " if action.isCheckable() and action.isChecked() else ""
    item = QTreeWidgetItem([mark + command.line, tip, keys])
    item.setToolTip(0, command.tip)
    item.setToolTip(1, tip)
    item.setTextAlignment(2, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    if not enabled:
        for column in range(3):
            item.setForeground(column, muted)
    return item


_FIRST_OF_WORD = 8
_NEXT_TO_LAST = 10
_GAP = 1


def score(query: str, text: str) -> int | None:
    """How well the letters of the query, in order, match the text; None if they do not.

    Spaces and case are ignored. Letters at the start of a word and adjacent letters score more, and
    so does a text with little else in it. The best of all placements counts.
    """
    letters = query.replace(" ", "").lower()
    body = text.lower()
    # best[j]: the best score so far with the last letter at j
    best: dict[int, int] = {}
    for i, letter in enumerate(letters):
        following: dict[int, int] = {}
        top: int | None = None
        for j, char in enumerate(body):
            before = best.get(j - 1)
            if char == letter:
                own = _FIRST_OF_WORD if j == 0 or not body[j - 1].isalnum() else 0
                ways = [] if i else [own]
                if top is not None:
                    ways.append(top + own - _GAP)
                if before is not None:
                    ways.append(before + own + _NEXT_TO_LAST)
                if ways:
                    following[j] = max(ways)
            if before is not None and (top is None or before > top):
                top = before
        if not following:
            return None
        best = following
    return max(best.values(), default=0) * 4 - len(body) // 8
