"""Dialogs of the help menu: its pages, rendered, linked and searchable; versions and the bug
report; all shortcuts."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import PySide6
from PySide6.QtCore import QEvent, QSignalBlocker, Qt, QUrl, qVersion
from PySide6.QtGui import (
    QColor,
    QGuiApplication,
    QKeySequence,
    QPalette,
    QShortcut,
    QTextBlock,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextTable,
    QTextTableFormat,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialogButtonBox,
    QHeaderView,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QSplitter,
    QTableWidget,
    QTableWidgetItem,
    QTextBrowser,
    QTextEdit,
    QVBoxLayout,
    QWidget,
)

from app.actions import SPECS, Actions
from app.engine_thread.events import OpenedFiles
from app.widgets.build import CLOSE, ModelessDialog, hbox, made, vbox
from engine.environment import processor_name, version
from engine.plain_text import counted
from resources import help_page, help_topics

_CONTEXT = 30
"""Characters of context on either side of a hit."""
_FEWEST = 2
"""Fewest letters of a search."""
_PLACE = Qt.ItemDataRole.UserRole


def open_help(parent: QWidget) -> None:
    """Show the pages, in the open dialog if there is one."""
    dialog = parent.findChild(HelpPages) or HelpPages(parent)
    dialog.show()
    dialog.raise_()
    dialog.activateWindow()


class HelpBrowser(QTextBrowser):
    """One page, `TOPIC.md`, with links to others, to their headings and to the web."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Page of help")
        self.setOpenExternalLinks(True)
        self.document().setDocumentMargin(14)
        self.sourceChanged.connect(self._dress)

    @property
    def topic(self) -> str:
        return topic_of(self.source())

    def open(self, topic: str) -> None:
        """Show a page from its start, unless it is on show."""
        if topic != self.topic:
            self.setSource(QUrl(f"{topic}.md"))

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """The Markdown of a page; nothing else is loaded."""
        topic = topic_of(QUrl(name))
        return help_page(topic) if topic in help_topics() else None

    def changeEvent(self, event: QEvent) -> None:
        """Colours are part of the document: rebuild it."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.PaletteChange and self.topic:
            place = self.verticalScrollBar().value()
            self.reload()
            self.verticalScrollBar().setValue(place)

    def _dress(self, source: QUrl) -> None:
        """Style tables and code, and go to the heading of a link."""
        palette = self.palette()
        raised, edge = (palette.color(role) for role in _RAISED_AND_EDGE)
        for frame in self.document().rootFrame().childFrames():
            if isinstance(frame, QTextTable):
                _dress_table(frame, raised, edge)
        for block in blocks(self.document()):
            if block.blockFormat().hasProperty(QTextFormat.Property.BlockCodeFence):
                cursor = QTextCursor(block)
                form = block.blockFormat()
                form.setBackground(raised)
                cursor.setBlockFormat(form)
        if source.hasFragment():
            self.go_to(heading_position(self.document(), source.fragment()))

    def go_to(self, position: int, length: int = 0) -> None:
        """Scroll a place to the top, if possible, and select it."""
        cursor = QTextCursor(self.document())
        cursor.setPosition(position)
        self.setTextCursor(cursor)
        self.verticalScrollBar().setValue(
            self.verticalScrollBar().value() + self.cursorRect(cursor).top() - self.height() // 6
        )
        cursor.setPosition(position + length, QTextCursor.MoveMode.KeepAnchor)
        self.setTextCursor(cursor)


_RAISED_AND_EDGE = (QPalette.ColorRole.AlternateBase, QPalette.ColorRole.Mid)


def _dress_table(table: QTextTable, raised: QColor, edge: QColor) -> None:
    form = QTextTableFormat()
    form.setCellPadding(5)
    form.setCellSpacing(0)
    form.setBorder(1)
    form.setBorderCollapse(True)
    form.setBorderBrush(edge)
    form.setTopMargin(6)
    form.setBottomMargin(10)
    form.setHeaderRowCount(1)
    table.setFormat(form)
    for column in range(table.columns()):
        cell = QTextCharFormat()
        cell.setBackground(raised)
        table.cellAt(0, column).setFormat(cell)


def topic_of(source: QUrl) -> str:
    """The page of an address, with or without a heading."""
    return source.fileName().removesuffix(".md")


def blocks(document: QTextDocument) -> Iterator[QTextBlock]:
    """All blocks of a document, including those in tables."""
    block = document.begin()
    while block.isValid():
        yield block
        block = block.next()


def slug(heading: str) -> str:
    """The fragment of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def heading_position(document: QTextDocument, fragment: str) -> int:
    """The position of a heading, 0 if there is none of that name."""
    found = (
        block.position()
        for block in blocks(document)
        if block.blockFormat().headingLevel() and slug(block.text()) == fragment
    )
    return next(found, 0)


class HelpPages(ModelessDialog):
    """The list of pages, or the hits of a search, and the chosen page."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__("Draftscope help", parent)
        self._topics = help_topics()
        self._documents: dict[str, QTextDocument] = {}
        self.field = made(QLineEdit, placeholderText="Search all pages")
        self.field.setAccessibleName("Search all pages")
        self.field.setClearButtonEnabled(True)
        self.field.textChanged.connect(self._search)
        self.field.returnPressed.connect(lambda: self._step(+1))
        self.list = made(
            QListWidget, wordWrap=True, spacing=2, resizeMode=QListWidget.ResizeMode.Adjust
        )
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setAccessibleName("Pages, or hits of the search")
        self.list.currentItemChanged.connect(self._show)
        self.count = made(QLabel, wordWrap=True)
        self.browser = HelpBrowser()
        self.browser.sourceChanged.connect(self._follow)
        self.back = _button("Ba&ck", "Previous page (Alt+Left)", self.browser.backward)
        self.forward = _button("&Forward", "Next page (Alt+Right)", self.browser.forward)
        self.browser.backwardAvailable.connect(self.back.setEnabled)
        self.browser.forwardAvailable.connect(self.forward.setEnabled)
        self.previous = _button("&Previous", "Previous hit (Shift+F3)", lambda: self._step(-1))
        self.next = _button("&Next", "Next hit (F3)", lambda: self._step(+1))
        for keys, button in (("F3", self.next), ("Shift+F3", self.previous)):
            QShortcut(QKeySequence(keys), self, button.click)
        QShortcut(QKeySequence(QKeySequence.StandardKey.Find), self, self.field.setFocus)
        self._lay_out()
        self._search("")
        self.list.setCurrentRow(0)

    def _lay_out(self) -> None:
        side = QWidget()
        row = hbox(self.previous, self.next)
        vbox(self.field, self.list, self.count, row, of=side, margins=(0, 0, 0, 0))
        page, row = QWidget(), hbox(self.back, self.forward, 0)
        vbox(row, self.browser, of=page, margins=(0, 0, 0, 0))
        splitter = QSplitter()
        splitter.addWidget(side)
        splitter.addWidget(page)
        splitter.setStretchFactor(1, 1)
        width = self.fontMetrics().averageCharWidth()
        splitter.setSizes([38 * width, 110 * width])
        QVBoxLayout(self).addWidget(splitter)
        self.resize(150 * width, 680)

    def hits(self, words: str) -> Iterator[tuple[str, int, str]]:
        """Topic, position and line of each occurrence of the words, ignoring case."""
        for topic in self._topics:
            document = self._document(topic)
            found = document.find(words)
            while not found.isNull():
                block, start = found.block(), found.selectionStart()
                at, text = start - block.position(), f"{block.text()} "
                begin = text.rfind(" ", 0, max(0, at - _CONTEXT)) + 1
                end = text.find(" ", min(at + len(words) + _CONTEXT, len(text) - 1))
                yield topic, start, " ".join(text[begin:end].split())
                found = document.find(words, found)

    def _document(self, topic: str) -> QTextDocument:
        """A page as the browser has it, with the same positions."""
        if topic not in self._documents:
            self._documents[topic] = QTextDocument(self)
            self._documents[topic].setMarkdown(help_page(topic))
        return self._documents[topic]

    def _search(self, words: str) -> None:
        words = words.strip()
        is_searching = len(words) >= _FEWEST
        hits = list(self.hits(words)) if is_searching else []
        self.list.clear()
        for topic, start, line in hits:
            self._add(f"{self._topics[topic].partition(':')[0]}\n… {line} …", topic, start)
        if not is_searching:
            for topic, title in self._topics.items():
                self._add(title, topic, None)
        pages = counted(len({topic for topic, _, _ in hits}), "page")
        self.count.setText(f"{counted(len(hits), 'hit')} on {pages}" if is_searching else "")
        for button in (self.previous, self.next):
            button.setEnabled(bool(hits))
        self._mark()

    def _add(self, text: str, topic: str, position: int | None) -> None:
        item = QListWidgetItem(text)
        item.setData(_PLACE, (topic, position))
        self.list.addItem(item)

    def _step(self, by: int) -> None:
        n = self.list.count()
        if n and self.next.isEnabled():
            row = self.list.currentRow()
            self.list.setCurrentRow((row + by) % n if row >= 0 else 0 if by > 0 else n - 1)

    def _show(self, item: QListWidgetItem | None) -> None:
        if item is None:
            return
        topic, position = item.data(_PLACE)
        self.browser.open(topic)
        self._mark()
        if position is not None:
            self.browser.go_to(position, len(self.field.text().strip()))

    def _follow(self, source: QUrl) -> None:
        """Select the page in the list that a link has led to."""
        self._mark()
        for row in range(self.list.count()):
            topic, position = self.list.item(row).data(_PLACE)
            if topic == topic_of(source) and position is None:
                with QSignalBlocker(self.list):
                    self.list.setCurrentRow(row)

    def _mark(self) -> None:
        """Highlight all hits on the page on show."""
        marks = []
        words = self.field.text().strip()
        document = self.browser.document()
        found = document.find(words) if len(words) >= _FEWEST else QTextCursor()
        while not found.isNull():
            mark = QTextEdit.ExtraSelection()
            mark.cursor = found
            mark.format.setBackground(self.palette().color(QPalette.ColorRole.Accent))
            mark.format.setForeground(self.palette().color(QPalette.ColorRole.Base))
            marks.append(mark)
            found = document.find(words, found)
        self.browser.setExtraSelections(marks)


def _button(text: str, tip: str, act: Any) -> QPushButton:
    return made(
        QPushButton, text, toolTip=tip, autoDefault=False, enabled=False, clicked=lambda: act()
    )


_PACKAGES = ("torch", "numpy", "pyqtgraph", "gguf", "tokenizers")


def environment() -> dict[str, str]:
    """Versions and machine; reads package metadata, imports nothing."""
    found = {
        "Draftscope": version(),
        "Python": platform.python_version(),
        "PySide6": f"{PySide6.__version__} (Qt {qVersion()})",
    }
    for name in _PACKAGES:
        found[name] = metadata.version(name)
    found["processor"] = processor_name()
    found["system"] = f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs"
    return found


def environment_text() -> str:
    """The same as a Markdown list."""
    return "".join(f"- {name}: {value}\n" for name, value in environment().items())


def report(files: OpenedFiles | None, compute: str, log_lines: Sequence[str]) -> str:
    """Environment, model and the last log lines as Markdown."""
    lines = [f"- {name}: {value}" for name, value in environment().items()]
    if files is not None:
        lines.append(f"- model: {files.target.name}, {files.info.architecture}, {compute or '-'}")
        lines.append(f"- model identity: {files.identity}")
    drafts = files.drafts if files is not None else ()
    lines += [f"- draft: {path.name}, {drafter}" for path, drafter, _ in drafts]
    return "\n".join([*lines, "", "```", *(log_lines or ("log is empty",)), "```", ""])


class AboutDialog(ModelessDialog):
    """Version, licence and environment; it does not block the window."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__("About Draftscope", parent)
        rows = "\n".join(f"{name} {value}" for name, value in environment().items())
        text = QLabel(
            "Inspect speculative decoding on hybrid recurrent language models: accepted and "
            "rejected drafts, rollbacks, snapshots and their cost.\n\n"
            f"{rows}\n{sys.executable}\n\nMIT licence"
        )
        text.setWordWrap(True)
        text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        buttons = made(QDialogButtonBox, CLOSE, rejected=self.reject)
        copy = buttons.addButton("&Copy environment", QDialogButtonBox.ButtonRole.ActionRole)
        copy.setToolTip("Copy versions and machine as Markdown")
        copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(environment_text()))
        vbox(text, buttons, of=self)


class ShortcutsDialog(ModelessDialog):
    """Made from the actions themselves, so that it cannot be out of date."""

    def __init__(self, actions: Actions, parent: QWidget) -> None:
        super().__init__("Keyboard shortcuts", parent)
        self.table = made(QTableWidget, len(SPECS), 3, accessibleName=self.windowTitle())
        self.table.setHorizontalHeaderLabels(["Action", "Keys", "Description"])
        self.table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        rows = self.table.verticalHeader()
        rows.hide()
        rows.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        for row, spec in enumerate(SPECS):
            keys = actions[spec.id].shortcut().toString(QKeySequence.SequenceFormat.NativeText)
            for column, text in enumerate((spec.text.replace("&", ""), keys, spec.tip)):
                self.table.setItem(row, column, item := QTableWidgetItem(text))
                item.setToolTip(text)
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setStretchLastSection(True)
        buttons = made(QDialogButtonBox, CLOSE, rejected=self.reject)
        vbox(self.table, buttons, of=self)
        self.resize(self.fontMetrics().averageCharWidth() * 110, 520)
