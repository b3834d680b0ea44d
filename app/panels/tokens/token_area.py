"""One sequence as flowing text with a style per token; paints only the rows in sight."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np
from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import (
    QGuiApplication,
    QHelpEvent,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QToolTip

from app.looks import Theme, fixed_font
from app.panels.tokens.token_scroll import (
    MARGIN,
    NOWHERE,
    FindToken,
    TokenScroll,
    next_rejection,
    next_shown,
    place_of,
    stands_at,
)
from app.trace_models.run_rows import Position, RunRange
from app.trace_models.token_stream import KIND, TokenStream
from app.widgets.token_paint import (
    PlacedToken,
    TokenMetrics,
    TokenPainter,
    paint_cursor,
    paint_hits,
    paint_selection,
)
from engine.trace.token_text import MEANING, pieces_at


class TokenArea(TokenScroll):
    """Shows a TokenStream, follows its end, and lets a reader walk and select its tokens."""

    position_selected = Signal(object)  # Position | None
    range_selected = Signal(object)  # RunRange
    inspect_asked = Signal()
    """Enter or a double click: inspect the round of the outlined token."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme)
        self._theme = theme
        self._painter = TokenPainter(theme, self._metrics)
        self.current = NOWHERE
        """Index of the outlined token, -1 without one."""
        self._round: int | None = None
        self.selection = (0, 0)
        """First and one-past-last token of the dragged selection; equal without one."""
        self._hits = np.zeros(0, np.int64)
        self._pressed_at = NOWHERE
        self._zoom = 0
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.viewport().setCursor(Qt.CursorShape.IBeamCursor)
        self.setAccessibleName("Token stream")

    # -- what is shown ---------------------------------------------------------------------

    def set_stream(self, stream: TokenStream | None) -> None:
        self.stream = stream
        self.current, self._round, self.selection = NOWHERE, None, (0, 0)
        self._hits = np.zeros(0, np.int64)
        self.follow = True
        title = "Token stream" if stream is None else f"Tokens of sequence {stream.seq_id}"
        self.setAccessibleName(title)
        self.setAccessibleDescription("")
        self._start_layout()

    def set_cursor(self, position: Position | None) -> None:
        """Outline the token at a position; of another sequence mark only its round."""
        stream = self.stream
        if stream is None or position is None or position.run != stream.run:
            self._round, self.current = None, NOWHERE
        else:
            self._round = position.round
            if position.seq_id != stream.seq_id:
                self.current = NOWHERE
            elif not stands_at(stream, self.current, position):
                self.current = place_of(stream, position, self._hidden)
                if self.current != NOWHERE:
                    self._reveal(self.current)
        self.viewport().update()

    def set_range(self, chosen: RunRange | None) -> None:
        """Select the tokens of a range of rounds, or none."""
        stream = self.stream
        if stream is None or self._pressed_at != NOWHERE:
            return
        selection = (0, 0)
        if chosen is not None and chosen.run == stream.run and chosen.last is not None:
            selection = stream.round_span(chosen.first)[0], stream.round_span(chosen.last)[1]
        if selection != self.selection:
            self.selection = selection if selection[0] < selection[1] else (0, 0)
            self.viewport().update()

    def set_hits(self, hits: np.ndarray) -> None:
        """Mark the tokens found: indices, int64 [n] ascending."""
        changed, self._hits = np.setxor1d(hits, self._hits), hits
        bottom = self.verticalScrollBar().value() + self.viewport().height()
        if len(changed) and self.top_of(int(changed[0])) < bottom:
            self.viewport().update()

    def copy_text(self) -> str:
        """The selected text, or all emitted text; ghosts only if nothing else is selected."""
        if self.stream is None:
            return ""
        start, stop = self.selection
        if start < stop:
            return self.stream.text(start, stop)
        return self.stream.text(prompt=False)

    # -- walking ---------------------------------------------------------------------------

    def go_to(self, token: int) -> None:
        """Select a token, or the next visible one if it is hidden."""
        self._walk(next_shown, token, +1)

    def set_zoom(self, zoom: int) -> None:
        """Change the font size by this many tenths (smaller below 0), keeping the place."""
        if zoom != self._zoom:
            self._zoom = zoom
            self._take_font()

    def step_token(self, step: int) -> None:
        self._walk(next_shown, self.current + step, step)

    def step_rejection(self, step: int) -> bool:
        """Select the next (+1) or previous (-1) rejected token, or its replacement; returns whether
        there is one."""
        return self._walk(next_rejection, self.current, step)

    def step_row(self, step: int) -> None:
        """Select the token above (-1) or below (+1)."""
        layout = None if self._rows is None else self._rows.layout
        if layout is None or not 0 <= self.current < layout.placed:
            self.step_token(step)
            return
        row = layout.row_of(self.current)
        here = next((s for s in layout.spans(row) if s.token == self.current), None)
        middle = 0.0 if here is None else here.x + here.width / 2
        row += step
        while 0 <= row < layout.n_rows:
            spans = list(layout.spans(row))
            if spans:
                self._select(min(spans, key=lambda s: abs(s.x + s.width / 2 - middle)).token)
                return
            row += step

    def _walk(self, find: FindToken, token: int, step: int) -> bool:
        if self.stream is None:
            return False
        found = find(self.stream, token, step, self._hidden)
        self._select(found)
        return found != NOWHERE

    def _select(self, token: int) -> None:
        if token == NOWHERE or self.stream is None:
            return
        self.current = token
        self._round = self.stream.rounds[token]
        self._reveal(token)
        self.setAccessibleDescription(token_summary(self.stream, token))
        self.viewport().update()
        stream = self.stream
        place = stream.position(token), stream.rows[token]
        self.position_selected.emit(Position(stream.run, stream.seq_id, self._round, *place))

    # -- painting --------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), self._theme.color("ui.panel"))
        stream = self.stream
        if stream is not None:
            height = self._metrics.row_height  # marks extend into adjacent rows
            part = event.rect().adjusted(0, -height, 0, height)
            theme, placed = self._theme, list(self._spans_in_sight(part))
            is_marked = self._round is not None or len(self._hits) > 0 or any(self.selection)
            boxes = [(s.token, self._box(s, y)) for s, y in placed] if is_marked else []
            paint_selection(painter, boxes, self.selection, theme.color("ui.selection"))
            kinds, replayed = stream.kinds, stream.replayed
            self._painter.paint(
                painter,
                (
                    PlacedToken(
                        s.text, kinds[s.token], s.x + MARGIN, y, s.width, bool(replayed[s.token])
                    )
                    for s, y in placed
                ),
            )
            focus = theme.color("ui.focus")
            paint_hits(painter, boxes, self._hits, theme.color("ui.hit"))
            if self._round is not None:
                written = self._written_in(stream, self._round, {token for token, _ in boxes})
                paint_cursor(painter, boxes, written, self.current, focus)
        painter.end()

    def _written_in(self, stream: TokenStream, round_: int, tokens: set[int]) -> set[int]:
        """The tokens among `tokens` written by a round; prompt tokens are not."""
        first, stop = stream.round_span(round_)
        prompt = KIND["prompt"]
        return {t for t in tokens if first <= t < stop and stream.kinds[t] != prompt}

    # -- mouse, keys, events ---------------------------------------------------------------

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._pressed_at = self.token_at(event.position())
            self.selection = (0, 0)
            self.viewport().update()
        elif event.button() == Qt.MouseButton.RightButton:
            self._select(self.token_at(event.position()))  # the menu's token

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._pressed_at == NOWHERE:
            return
        y = event.position().y()
        if not 0 <= y < self.viewport().height():
            bar = self.verticalScrollBar()
            bar.setValue(bar.value() + (bar.singleStep() if y > 0 else -bar.singleStep()))
        at = self.token_at(event.position(), nearest=True)
        if at not in (NOWHERE, self._pressed_at) or self.selection != (0, 0):
            ends = sorted((self._pressed_at, max(at, 0)))
            self.selection = (ends[0], ends[1] + 1)
            self.viewport().update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and self.selection == (0, 0):
            self._select(self._pressed_at)
        elif event.button() == Qt.MouseButton.LeftButton and self.stream is not None:
            start, stop = self.selection
            rounds = self.stream.rounds[start:stop]
            if rounds:
                chosen = RunRange(self.stream.run, min(rounds), max(rounds))
                self.range_selected.emit(chosen)
        self._pressed_at = NOWHERE

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._inspect()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            QGuiApplication.clipboard().setText(self.copy_text())
            return
        actions: dict[int, Callable[[], object]] = {
            Qt.Key.Key_Left: lambda: self.step_token(-1),
            Qt.Key.Key_Right: lambda: self.step_token(+1),
            Qt.Key.Key_Up: lambda: self.step_row(-1),
            Qt.Key.Key_Down: lambda: self.step_row(+1),
            Qt.Key.Key_Home: lambda: self._walk(next_shown, 0, +1),
            Qt.Key.Key_End: self._go_to_end,
            Qt.Key.Key_Return: self._inspect,
            Qt.Key.Key_Enter: self._inspect,
            Qt.Key.Key_Escape: self._clear,
        }
        act = actions.get(event.key())
        if act is None:
            super().keyPressEvent(event)
        else:
            act()

    def wheelEvent(self, event: QWheelEvent) -> None:
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            event.ignore()  # the view zooms all texts
        else:
            super().wheelEvent(event)

    def _inspect(self) -> None:
        if self.current != NOWHERE:
            self.inspect_asked.emit()

    def _go_to_end(self) -> None:
        if self.stream is not None:
            self._walk(next_shown, len(self.stream) - 1, -1)
            self.set_follow(True)

    def _clear(self) -> None:
        self.selection = (0, 0)
        self.set_cursor(None)
        self.position_selected.emit(None)

    def viewportEvent(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            token = self.token_at(event.pos())
            if token == NOWHERE or self.stream is None:
                QToolTip.hideText()
            else:
                tip = token_tip(self.stream, token)
                QToolTip.showText(event.globalPos(), tip, self.viewport())
            return True
        return super().viewportEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Keep the outlined token of a finished run in sight, if it was."""
        stays = (
            self.stream is not None
            and self.stream.run.ended
            and self._shows(self.current, event.oldSize().height())
        )
        super().resizeEvent(event)
        if stays:
            self._reveal(self.current)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.ApplicationFontChange):
            self._take_font()

    def _take_font(self) -> None:
        self._metrics = TokenMetrics(fixed_font(self._zoom))
        self._painter = TokenPainter(self._theme, self._metrics)
        self._start_layout()


def token_tip(stream: TokenStream, index: int) -> str:
    """Rich text for one token of a stream."""
    row = stream.facts(index)
    kind = row["kind"]
    piece = pieces_at(stream.store, np.array([stream.rows[index]]))[0]
    lines = [f"<b>{escape(kind)}</b>: {MEANING[kind]}"]
    if stream.replayed[index]:
        lines.append(f"<b>replayed</b>: {MEANING['replayed']}")
    cells = [
        ("text", escape(repr(piece.decode("utf-8", "backslashreplace")), quote=False)),
        ("id", _whole(row["token_id"]) or "not observed"),
        ("round", _whole(row["round"])),
        ("position", _whole(row["pos"])),
        ("draft index", _whole(row["draft_index"])),
        ("target p", _real(row["target_p"])),
        ("rule p", _real(row["rule_p"])),
        ("rule q", _real(row["rule_q"])),
        ("target rank", _whole(row["target_rank"])),
        ("target entropy", _real(row["target_entropy"], " nats")),
        ("draft q", _real(row["draft_p"])),
        ("draft confidence", _real(row["draft_conf"])),
    ]
    rows = "".join(
        f"<tr><td style='padding-right:10px'>{name}</td><td>{value}</td></tr>"
        for name, value in cells
        if value
    )
    return "<br>".join(lines) + f"<table>{rows}</table>"


def token_summary(stream: TokenStream, index: int) -> str:
    """One plain line for a screen reader."""
    row: dict[str, Any] = stream.facts(index)
    replayed = ", replayed" if stream.replayed[index] else ""
    return (
        f"{stream.texts[index]!r}, {row['kind']}{replayed}, "
        f"round {_whole(row['round'])}, position {_whole(row['pos'])}"
    )


def _whole(value: int | None) -> str:
    return "" if value is None else str(value)


def _real(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.4g}{unit}"
