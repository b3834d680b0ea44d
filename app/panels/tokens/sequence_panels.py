"""The panels of sequences: one each, arranged as tiles or as tabs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from PySide6.QtGui import QPalette, QResizeEvent
from PySide6.QtWidgets import QApplication, QStackedWidget, QTabWidget, QWidget

from app.looks import Theme, mark_front_tab
from app.panels.tokens.token_area import TokenArea
from app.trace_models.run_notes import run_name, sent
from app.trace_models.token_stream import KIND, TokenStream
from app.widgets.build import SAME, made, split, turn, vbox
from app.widgets.fitted_labels import ElidedLabel, LowPanel
from engine.plain_text import counted

_PER_ROW = 3
NARROW = 60
"""Width in characters below which sentences wrap, and two texts are stacked."""


class SequencePanels(QStackedWidget):
    """Panels by sequence, at most three per row. A single sequence has no tab."""

    def __init__(self) -> None:
        super().__init__()
        self._panels: dict[int, QWidget] = {}
        self._as_tabs = False
        self._rows = split(down=True)
        self._tabs = made(QTabWidget, documentMode=True)
        mark_front_tab(self._tabs.tabBar())
        for part in (self._tabs, self._tabs.tabBar()):
            part.setAccessibleName("Sequences")
        self._page = LowPanel(self._rows)
        self.addWidget(self._page)
        self.addWidget(self._tabs)

    @property
    def n_rows(self) -> int:
        """Number of rows of panels."""
        return 1 if self.as_tabs else self._rows.count()

    @property
    def as_tabs(self) -> bool:
        """Whether only one sequence is visible."""
        return self.currentWidget() is self._tabs

    def add(self, panels: Mapping[int, QWidget]) -> None:
        self._panels.update(panels)
        self._place()

    def clear(self) -> None:
        for panel in self._panels.values():
            panel.hide()
            panel.setParent(None)
            panel.deleteLater()
        self._panels = {}
        self._place()

    def set_tabs(self, as_tabs: bool) -> None:
        if as_tabs != self._as_tabs:
            self._as_tabs = as_tabs
            self._place()

    def reveal(self, seq_id: int) -> None:
        """Show a sequence's panel."""
        panel = self._panels.get(seq_id)
        if panel is not None and self.as_tabs:
            self._tabs.setCurrentWidget(panel)
        elif panel is not None:
            self._page.ensureWidgetVisible(panel)

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
                panels = [panel for _, panel in ordered[start : start + per_row]]
                self._rows.addWidget(split(*panels))
                for panel in panels:
                    panel.show()
        for old in old_rows:
            old.hide()
            old.setParent(None)
            old.deleteLater()
        self.setCurrentWidget(self._tabs if tabs else self._page)
        if focus is not None and self.isAncestorOf(focus):
            focus.setFocus()


class SequencePanel(QWidget):
    """One sequence: its title, shown if there are several, the prompt sent to another engine, its
    reply if tokens do not show it, and its tokens; for a fork the parent's text next to it, or
    below it if it is narrow, with the fork's round aligned."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.area, self.before = TokenArea(theme), TokenArea(theme)
        self._titles = ElidedLabel(), ElidedLabel()
        self._sent: dict[str, str] = {}
        self._shows_title = self._moves = False
        self._sides = split()
        for title, area in zip(self._titles, (self.area, self.before), strict=True):
            title.setContentsMargins(10, 4, 10, 4)
            title.setForegroundRole(QPalette.ColorRole.PlaceholderText)
            title.hide()
            side = QWidget()
            vbox(title, (area, 1), of=side, margins=(0, 0, 0, 0), spacing=0)
            self._sides.addWidget(side)
            self._side_of_before = side  # the parent's
            area.laid_out.connect(partial(self._line_up, self.area))
        self.area.verticalScrollBar().valueChanged.connect(lambda: self._line_up(self.area))
        self.before.scrolled.connect(partial(self._line_up, self.before))
        self._side_of_before.hide()
        vbox(self._sides, of=self, margins=(0, 0, 0, 0))

    def show_stream(self, stream: TokenStream | None) -> None:
        """Show another stream, or nothing; a fork's parent follows."""
        self._side_of_before.hide()
        self.before.set_stream(None)
        self.area.set_stream(stream)
        self._sent = {}
        if stream is not None:
            prompt, text = sent(stream.run.facts, stream.seq_id)
            prompt = "" if KIND["prompt"] in stream.kinds else prompt
            self._sent = {"prompt": prompt, "text": text}
        self._count()

    def show_before(self, stream: TokenStream | None) -> None:
        """Show the parent's text, or new tokens of it; the first token of the fork's round is
        marked."""
        if stream is not None and self.before.stream is not stream:
            self.before.set_stream(stream)
            self.before.set_follow(False)
            self._sides.setSizes([SAME] * 2)
            self._side_of_before.show()
        self.before.grow()
        if stream is not None:
            self.before.set_hits(np.array([self._fork_in(stream)]))
        self._count()

    def show_title(self, shown: bool) -> None:
        self._shows_title = shown
        self._count()

    def grow(self) -> None:
        """Show and count new tokens of the stream."""
        self._count()
        self.area.grow()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = event.size().width() < NARROW * self.fontMetrics().averageCharWidth()
        turn(self._sides, down=narrow)

    def _fork_in(self, stream: TokenStream) -> int:
        assert self.area.stream is not None
        fork = self.area.stream.run.facts.fork
        return 0 if fork is None else stream.round_span(fork.round - (fork.n_kept is not None))[0]

    def _line_up(self, moved: TokenArea) -> None:
        """Scroll the other text along, so that the fork's round is aligned. The fork's own text
        leads unless the reader scrolls the other."""
        stream, before = self.area.stream, self.before.stream
        if self._moves or stream is None or before is None:
            return
        here = self.area.top_of(self._fork_in(stream))
        there = self.before.top_of(self._fork_in(before))
        other, down = (
            (self.before, there - here) if moved is self.area else (self.area, here - there)
        )
        self._moves = True
        other.verticalScrollBar().setValue(moved.verticalScrollBar().value() + down)
        self._moves = False

    def _count(self) -> None:
        for title, area in zip(self._titles, (self.area, self.before), strict=True):
            stream, words = area.stream, list[str]()
            if stream is not None and self._shows_title:
                words = [f"seq {stream.seq_id}", counted(stream.n_generated, "token")]
                words[:0] = [run_name(stream.run)] if self.before.stream else []
            if area is self.area:
                words += [f"{name}: {text}" for name, text in self._sent.items() if text]
            title.setText(" · ".join(words))
            title.setVisible(bool(words))
