"""One sequence of tokens in scrolling rows: laid out in slices, following the newest; and searches
for neighbours, rounds, rejections and positions in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from PySide6.QtCore import QPoint, QPointF, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QAbstractScrollArea, QFrame

from app.engine_thread.feed import timer
from app.looks import Theme, fixed_font
from app.panels.tokens.token_layout import TokenFragment, TokenLayout
from app.trace_models.run_rows import Position
from app.trace_models.token_stream import GHOSTS, KIND, TokenStream
from app.widgets.fitted_labels import Chip
from app.widgets.token_paint import TokenMetrics

MARGIN = 10
_LEAST_ROWS = 2


class TokenScroll(QAbstractScrollArea):
    """Knows the place of every token of a stream; paints nothing.

    Layout happens in slices of 8 ms. Until a new layout (other width, rejected tokens shown or
    hidden) has reached the visible place, a preview of that place is shown.
    """

    follow_changed = Signal(bool)
    laid_out = Signal()
    """The whole stream is laid out."""
    scrolled = Signal()
    """By the reader, not by the layout."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.stream: TokenStream | None = None
        self._metrics = TokenMetrics(fixed_font())
        self._rows: TokenRows | None = None
        self._hidden: frozenset[int] = frozenset()
        self.follow = True
        self._moving_bar = False
        self._drawn: tuple[TokenLayout, int, int] | None = None
        self._chip = Chip("↓ To the end", theme, self)
        self._chip.setToolTip("Follow the newest token again (End)")
        self._chip.hide()
        self._chip.clicked.connect(lambda: self.set_follow(True))
        self._chip.clicked.connect(self.scrolled)
        self._work = timer(self, self._lay_out, once=True)
        self._widened = timer(self, self._start_layout, once=True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.viewport().setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)

    def grow(self) -> None:
        self._lay_out()

    def set_ghosts(self, shown: bool) -> None:
        """Show or hide rejected and ignored tokens, keeping the place in the text."""
        hidden = frozenset() if shown else GHOSTS
        if hidden != self._hidden:
            self._hidden = hidden
            self._start_layout()

    def set_follow(self, follow: bool) -> None:
        """Follow the newest token, or keep the reader's place."""
        if follow != self.follow:
            top = None if follow else self._top_token()
            self.follow = follow
            if self._rows is not None and (follow or self._rows.preview is not None):
                self._rows.look_at(top)
                self._lay_out()
            self.follow_changed.emit(follow)
        if follow:
            self._move_bar(to_end=True)
        self._place_chip()
        self.viewport().update()

    def token_at(self, point: QPoint | QPointF, *, nearest: bool = False) -> int:
        """Index of the token under a point of the viewport, -1 for none."""
        found, row_y = NOWHERE, None
        for span, y in self._spans_in_sight():
            if y > point.y():
                break
            if y + self._metrics.row_height <= point.y():
                found = span.token if nearest else NOWHERE
                continue
            left = span.x + MARGIN
            if left <= point.x() < left + span.width:
                return span.token
            if nearest and (row_y != y or left <= point.x()):
                found, row_y = span.token, y
        return found

    def top_of(self, token: int) -> int:
        """The y of a token's row from the first row, pixels; 0 if not known yet."""
        layout = None if self._rows is None else self._rows.layout
        known = layout is not None and token < layout.placed
        return layout.row_of(token) * self._metrics.row_height if layout and known else 0

    def minimumSizeHint(self) -> QSize:
        """Two rows: in a low window the plots need room, too."""
        rows = _LEAST_ROWS * self._metrics.row_height + MARGIN
        return QSize(super().minimumSizeHint().width(), rows)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._widened.start(0)  # moving docks resize it several times
        else:
            self._lay_out()

    # -- layout and scrolling --------------------------------------------------------------

    def _start_layout(self) -> None:
        """Start a new layout, keeping the place: the end while following, else the top."""
        self._work.stop()
        self._drawn = None
        anchor = None if self.follow else self._top_token()
        if self.stream is None:
            self._rows = None
            self._update_bar()
            self.viewport().update()
            return
        width = max(1, self.viewport().width() - 2 * MARGIN)
        self._rows = TokenRows(self.stream, self._metrics.width, width, self._hidden)
        self._rows.look_at(anchor)
        self._lay_out()

    def _top_token(self) -> int | None:
        """The first token of the top visible row."""
        view = self._in_sight()
        if view is None:
            return None
        layout, row, _ = view
        return layout.first_token(min(row, layout.n_rows - 1))

    def _lay_out(self) -> None:
        rows = self._rows
        if rows is None:
            return
        in_sight = self.viewport().height() // self._metrics.row_height + 2
        complete = rows.advance(in_sight, follow=self.follow)
        self._update_bar()
        if self.follow:
            self._move_bar(to_end=True)
        elif rows.anchor is not None and rows.preview is None:
            self._move_bar(rows.layout.row_of(rows.anchor) * self._metrics.row_height)
            rows.anchor = None
        self._place_chip()
        self._paint_new(rows)
        if complete:
            self.laid_out.emit()
        else:
            self._work.start(0)

    def _paint_new(self, rows: TokenRows) -> None:
        """Repaint what has changed since the last call: the former last row and later ones."""
        assert self.stream is not None
        layout, n_marked = rows.layout, self.stream.n_marked
        before, self._drawn = self._drawn, None
        if rows.preview is None:
            self._drawn = layout, layout.n_rows, n_marked
        if self._drawn is None or before is None or (before[0], before[2]) != (layout, n_marked):
            self.viewport().update()
            return
        y = MARGIN // 2 + (before[1] - 1) * self._metrics.row_height
        y -= self.verticalScrollBar().value()
        view = self.viewport().rect()
        changed = view.intersected(QRect(0, y, view.width(), view.height() + abs(y)))
        if not changed.isEmpty():
            self.viewport().update(changed)

    def scrollContentsBy(self, _dx: int, dy: int) -> None:
        if self._drawn is not None:
            self.viewport().scroll(0, dy)
        else:
            self.viewport().update()

    def _in_sight(self) -> tuple[TokenLayout, int, int] | None:
        """The layout shown, its first visible row, and that row's y."""
        if self._rows is None:
            return None
        top, height = MARGIN // 2, self._metrics.row_height
        preview = self._rows.preview
        if preview is None:
            above = self.verticalScrollBar().value() - top
            row = max(0, above // height)
            return self._rows.layout, row, row * height - above
        fitting = (self.viewport().height() - MARGIN) // height
        return preview, max(0, preview.n_rows - fitting) if self.follow else 0, top

    def _update_bar(self) -> None:
        rows = 0 if self._rows is None else self._rows.layout.n_rows
        height = self.viewport().height()
        bar = self.verticalScrollBar()
        self._moving_bar = True
        bar.setRange(0, max(0, rows * self._metrics.row_height + MARGIN - height))
        bar.setPageStep(height)
        bar.setSingleStep(self._metrics.row_height)
        self._moving_bar = False

    def _move_bar(self, value: int = 0, *, to_end: bool = False) -> None:
        bar = self.verticalScrollBar()
        self._moving_bar = True
        bar.setValue(bar.maximum() if to_end else value)
        self._moving_bar = False

    def _on_scrolled(self, value: int) -> None:
        if not self._moving_bar and self._rows is not None and self._rows.preview is None:
            at_end = value >= self.verticalScrollBar().maximum() and self._rows.layout.complete
            if at_end != self.follow:
                self.set_follow(at_end)
            self.scrolled.emit()

    def _shows(self, token: int, height: int) -> bool:
        """Whether a token is visible in a viewport of this height, pixels."""
        if self._rows is None or not 0 <= token < self._rows.layout.placed:
            return False
        top = self._rows.layout.row_of(token) * self._metrics.row_height
        above = self.verticalScrollBar().value()
        return above <= top <= above + height - self._metrics.row_height

    def _reveal(self, token: int) -> None:
        """Scroll as little as needed to bring a token into sight."""
        if self._rows is None:
            return
        layout = self._rows.layout
        if token >= layout.placed:
            self.set_follow(False)
            self._rows.look_at(token)
            self._lay_out()
            return
        height = self._metrics.row_height
        top = layout.row_of(token) * height
        bar = self.verticalScrollBar()
        value = min(max(bar.value(), top + height + MARGIN - bar.pageStep()), top)
        if value != bar.value():
            self._move_bar(value)
            self._leave_end()
            self.scrolled.emit()

    def _leave_end(self) -> None:
        if self.follow and self.verticalScrollBar().value() < self.verticalScrollBar().maximum():
            self.set_follow(False)

    def _place_chip(self) -> None:
        bar = self.verticalScrollBar()
        self._chip.setVisible(not self.follow and bar.value() < bar.maximum())
        view = self.viewport().geometry()
        self._chip.move(
            view.center().x() - self._chip.width() // 2,
            view.bottom() - self._chip.height() - MARGIN,
        )

    def _spans_in_sight(self, part: QRect | None = None) -> Iterator[tuple[TokenFragment, int]]:
        """Fragments of the visible rows, or those in a part of the viewport, each with its row's
        y."""
        view = self._in_sight()
        if view is None:
            return
        part = self.viewport().rect() if part is None else part
        layout, row, y = view
        skipped = max(0, (part.top() - y) // self._metrics.row_height)
        row, y = row + skipped, y + skipped * self._metrics.row_height
        while row < layout.n_rows and y <= part.bottom():
            for span in layout.spans(row):
                yield span, y
            row += 1
            y += self._metrics.row_height

    def _box(self, span: TokenFragment, y: int) -> QRectF:
        return QRectF(span.x + MARGIN, y + 0.5, span.width, self._metrics.row_height - 2)


SLICE_SECONDS = 0.008
"""Longest layout slice, so that a window keeps 30 frames per second."""
_TAIL_TOKENS = 3000


class TokenRows:
    """A layout that grows in slices, and a preview of the wanted place until it gets there.

    The wanted place is a token at the top, or the end of the stream.
    """

    def __init__(
        self,
        stream: TokenStream,
        measure: Callable[[str], float],
        width: float,
        hidden: frozenset[int],
    ) -> None:
        self._stream = stream
        self._measure = measure
        self._width = width
        self._hidden = hidden
        self.layout = self._new_layout(0)
        self.preview: TokenLayout | None = None
        self.anchor: int | None = None
        """The token wanted at the top, until it has been scrolled to."""

    def look_at(self, token: int | None) -> None:
        """Set the token wanted at the top; None: the current scroll position."""
        self.anchor = token
        self.preview = None

    def advance(self, rows: int, *, follow: bool) -> bool:
        """Lay out for one slice; `rows` fit into the viewport. True when done."""
        complete = self.layout.advance(SLICE_SECONDS)
        if complete or self._arrived(rows, follow):
            self.preview = None
        elif follow:
            end = len(self._stream)
            if self.preview is None or self.preview.placed < end - _TAIL_TOKENS:
                self.preview = self._new_layout(max(0, end - _TAIL_TOKENS))
            self.preview.advance_to(end)  # complete, else a busy machine would show older tokens
        elif self.anchor is not None:
            if self.preview is None:
                self.preview = self._new_layout(self.anchor)
            while self.preview.n_rows <= rows and not self.preview.complete:
                self.preview.advance_to(self.preview.placed + rows)
        return complete

    def _arrived(self, rows: int, follow: bool) -> bool:
        if follow:
            return False
        if self.anchor is None:
            return True
        layout = self.layout
        return layout.placed > self.anchor and layout.n_rows > layout.row_of(self.anchor) + rows

    def _new_layout(self, start: int) -> TokenLayout:
        return TokenLayout(self._stream, self._measure, self._width, self._hidden, start)


NOWHERE = -1
"""The index for no token."""

FindToken = Callable[[TokenStream, int, int, frozenset[int]], int]
"""(stream, token to start from, +1 or -1, hidden kinds) -> index of a token or NOWHERE."""


def next_shown(stream: TokenStream, token: int, step: int, hidden: frozenset[int]) -> int:
    """The first token from `token` on, including it, that is not hidden."""
    token = min(token, len(stream) - 1) if step < 0 else max(token, 0)
    while 0 <= token < len(stream):
        if stream.kinds[token] not in hidden:
            return token
        token += step
    return NOWHERE


def next_rejection(stream: TokenStream, token: int, step: int, hidden: frozenset[int]) -> int:
    """The rejected token after or before `token`, or its replacement if those are hidden or not
    reported."""
    is_told = KIND["rejected"] in stream.kinds
    rejected = bytes((KIND["rejected" if is_told else "replacement"],))
    if step > 0:
        found = stream.kinds.find(rejected, token + 1)
    else:
        end = len(stream) if token == NOWHERE else token
        if token != NOWHERE and is_told and KIND["rejected"] in hidden:
            # the rejection that this token replaced is before it in the same round
            end = stream.round_span(stream.rounds[token])[0]
        found = stream.kinds.rfind(rejected, 0, end)
    return NOWHERE if found < 0 else next_shown(stream, found, +1, hidden)


def place_of(stream: TokenStream, position: Position, hidden: frozenset[int]) -> int:
    """The token at a position, preferably the emitted one; else the first of its round."""
    start, stop = stream.round_span(position.round)
    anywhere = replace(position, row=None)  # the token itself may be hidden
    emitted = hidden if position.pos is None else hidden | GHOSTS
    by_row = [(position, hidden)] if position.row is not None else []
    for place, skipped in (*by_row, (anywhere, emitted), (anywhere, hidden)):
        for token in range(start, stop):
            if stream.kinds[token] not in skipped and stands_at(stream, token, place):
                return token
    return next_shown(stream, start, +1, hidden) if start < stop else NOWHERE


def stands_at(stream: TokenStream, token: int, position: Position) -> bool:
    """Whether a token is in a position's round and, if that names one, at its place."""
    if token == NOWHERE or stream.rounds[token] != position.round:
        return False
    if position.row is not None:
        return stream.rows[token] == position.row
    return position.pos is None or stream.position(token) == position.pos
