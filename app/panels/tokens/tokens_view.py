"""The Tokens panel: the token streams of a run, as tiles or tabs, one per sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PySide6.QtCore import QPoint, QSize, Qt, Signal
from PySide6.QtGui import QAction, QWheelEvent
from PySide6.QtWidgets import QFrame, QLabel, QMenu, QPlainTextEdit, QStackedWidget, QWidget

from app.engine_thread.feed import Pacer, timer
from app.looks import Theme
from app.panels.tokens.end_card import EndCard, gravest_finding
from app.panels.tokens.sequence_panels import NARROW, SequencePanel, SequencePanels
from app.panels.tokens.token_area import TokenArea
from app.panels.tokens.token_hits import FindBar, Term, find_hits, neighbour_hit
from app.trace_models.run_facts import has_no_client, is_ours, untold_by
from app.trace_models.run_notes import reply_texts
from app.trace_models.run_rows import Position, RunRange
from app.trace_models.token_stream import RunStreams, TokenStream
from app.widgets.build import Fitting, made, vbox, words
from app.widgets.empty_state import EmptyState
from app.widgets.legend import TokenLegend
from engine.report.run import why_it_ended
from engine.trace.run_ref import RunRef

_EMPTY, _WAITING, _STREAMS, _TEXTS = range(4)
_FIND_PERIOD_MS = 500
_NOTHING = "No run yet", "Press Run (F5) to watch tokens arrive."
_WAIT_MS = 250
"""How long a run may be without tokens before the view says what it waits for."""
_CARD_FROM, _NARROW_CARD_FROM = 16, 26
"""Lines of height from which there is room for the whole card, and in a NARROW view, where its
sentences wrap."""
_ROW_LINES = 5
"""Additional lines for each further row of sequences."""
_WHEEL_STEP = 120
"""One step of the wheel, in Qt's eighths of a degree."""
_MOST_PANELS = 128
"""Most sequences with a panel; of more, the first ones are shown."""


class TokensView(Fitting, QStackedWidget):
    """Streams of all sequences of a run above a legend, or a description while there is none."""

    position_selected = Signal(object)  # Position | None
    range_selected = Signal(object)  # RunRange
    follow_changed = Signal(bool)
    inspect_asked = Signal()
    cancel_asked = Signal(object, int)  # RunRef, sequence
    """Asks to cancel a sequence."""
    zoom_asked = Signal(int)
    """Zoom steps, larger above zero: Ctrl and the wheel."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.menu_actions: list[QAction] = []
        """The context menu of a token."""
        self._run: RunStreams | None = None
        self._parent: RunStreams | None = None
        """The run that a fork continues."""
        self._without = _WAITING
        """The page of a run without tokens."""
        self._panels: dict[int, SequencePanel] = {}
        self._spare: dict[int, SequencePanel] = {}
        """The previous run's panels, emptied: a run with the same sequences reuses them."""
        self._ghosts = True
        self.follow = True
        """Whether every sequence follows its newest token."""
        self._zoom = self._turned = 0
        self._cursor: Position | None = None
        self.cancellable: RunRef | None = None
        """While this run is shown, its sequences can be cancelled one by one."""
        self._hits: dict[int, np.ndarray] = {}
        self._hit: tuple[int, int] | None = None
        self._stepping = False
        self._search = Pacer(self._find, _FIND_PERIOD_MS, self)
        self.find_bar = FindBar(theme)
        self.find_bar.hide()
        self.find_bar.query_changed.connect(self._on_query)
        self.find_bar.step_asked.connect(self.step_hit)
        self.find_bar.closed.connect(self._close_find)
        self._places = SequencePanels()
        self._legend = TokenLegend(theme)
        self._catch_up = timer(self, self.refresh, once=True)
        self._late = timer(self, self._say_what_it_waits_for, once=True)
        page = QWidget()
        column = vbox(self.find_bar, (self._places, 1), of=page, margins=(0, 0, 0, 4), spacing=4)
        self._more = made(QLabel, muted=True)
        self._more.setContentsMargins(10, 0, 10, 0)
        self._more.hide()
        column.addWidget(self._more)
        self.end_card = EndCard()
        column.addWidget(self.end_card)
        legend_row = vbox(self._legend, margins=(10, 0, 10, 0))
        column.addLayout(legend_row)
        self.empty = EmptyState(*_NOTHING, waits_for_run=True)
        self.addWidget(self.empty)
        self._waiting = EmptyState("Processing the prompt", "Chosen tokens appear here.")
        self.addWidget(self._waiting)
        self.addWidget(page)
        self._about_texts = words(muted=True)
        self._texts = made(QPlainTextEdit, readOnly=True, accessibleName="Text of the replies")
        self._texts.setFrameShape(QFrame.Shape.NoFrame)
        vbox(self._about_texts, (self._texts, 1), of=(texts := QWidget()), margins=(10, 4, 0, 4))
        self.addWidget(texts)
        self.setAccessibleName("Token streams")

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Wheel events that the texts do not use. Touchpads send fractions of a step."""
        if not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            event.ignore()
            return
        self._turned += event.angleDelta().y()
        if steps := int(self._turned / _WHEEL_STEP):
            self._turned -= steps * _WHEEL_STEP
            self.zoom_asked.emit(steps)

    def tell_kept(self, n_runs: int, why_not: str) -> None:
        """Say in an empty view that this many runs can be chosen. why_not: why no run can start,
        empty if one can."""
        title, text = _NOTHING
        text = why_not or text
        if n_runs:
            title = "No run shown"
            text += f" {'One run is' if n_runs == 1 else f'{n_runs:,} runs are'} kept in Runs."
        self.empty.change(title, text)

    def set_range(self, chosen: RunRange | None) -> None:
        """Select the tokens of a range of rounds in every sequence."""
        for area in self.areas.values():
            area.set_range(chosen)

    def minimumSizeHint(self) -> QSize:
        """With the card as a single line, which it becomes if there is no room for more."""
        return super().minimumSizeHint() - QSize(0, self.end_card.spare)

    def fit(self) -> None:
        """Shrink the legend and the card where they would take much of the text's room."""
        size = self.size()
        self._legend.setVisible(self._legend.heightForWidth(size.width()) * 5 <= size.height())
        metrics = self.fontMetrics()
        narrow = size.width() < NARROW * metrics.averageCharWidth()
        least = _NARROW_CARD_FROM if narrow else _CARD_FROM
        least += _ROW_LINES * (self._places.n_rows - 1)
        self.end_card.set_low(size.height() < least * metrics.height())

    @property
    def areas(self) -> dict[int, TokenArea]:
        return {seq_id: panel.area for seq_id, panel in self._panels.items()}

    def show_run(self, run: RunRef | None) -> None:
        self._catch_up.stop()
        self._search.stop()
        self._late.stop()
        self._spare |= self._panels
        for panel in self._panels.values():
            panel.show_stream(None)
        self._more.hide()
        self._panels, self._hits, self._hit = {}, {}, None
        self._without = _WAITING
        self._cursor = None
        self._run = None if run is None else RunStreams(run)
        fork = None if run is None else run.facts.fork
        self._parent = None
        if run is not None and fork is not None and fork.parent in run.store.runs:
            self._parent = RunStreams(run.sibling(fork.parent))
        self._set_followed(True)
        self.refresh()
        if run is None:
            self._drop_spare()
            self.setCurrentIndex(_EMPTY)
        elif not self._panels and self._spare and not run.ended:
            self._late.start(_WAIT_MS)  # switching pages costs layouts
        elif not self._panels:
            self._say_what_it_waits_for()

    def refresh(self) -> None:
        """Show new rows of the trace; the rest of a long one follows in slices."""
        run = self._run
        if run is None:
            return
        grown, parent = run.poll(), self._parent
        grown_before = parent.poll() if parent is not None else set()
        new = [seq_id for seq_id in sorted(grown & run.by_seq.keys()) if seq_id not in self._panels]
        if new:
            self._add_panels([run.by_seq[seq_id] for seq_id in new])
        for seq_id in sorted(grown & self._panels.keys()):
            self._panels[seq_id].grow()
        if parent is not None:
            for seq_id in sorted((grown_before | set(new)) & self._panels.keys()):
                self._panels[seq_id].show_before(parent.by_seq.get(seq_id))
        if self._panels:
            self.setCurrentIndex(_STREAMS)
            if self.hasFocus():  # the focus was on an empty view's button
                next(iter(self.areas.values())).setFocus()
        if grown and self.find_bar.terms and not self.find_bar.isHidden():
            self._search.ask()
        if run.behind or (parent is not None and parent.behind):
            self._catch_up.start(0)
        elif not self._panels:
            self._tell_why_empty(run.run)

    def set_cursor(self, position: Position | None) -> None:
        """Outline the token at the shared position."""
        self._cursor = position
        for area in self.areas.values():
            area.set_cursor(position)
        if position is not None:
            self._places.reveal(position.seq_id)
        if not self._stepping:
            self._hit = None
            self._show_count()

    def toggle_ghosts(self, shown: bool) -> None:
        self._ghosts = shown
        for area in self._every_area():
            area.set_ghosts(shown)

    def set_zoom(self, zoom: int) -> None:
        """Change the font size of all tokens by this many tenths, smaller below 0."""
        self._zoom = zoom
        for area in self._every_area():
            area.set_zoom(zoom)

    def step_rejection(self, step: int) -> None:
        """Select the next (+1) or previous (-1) rejected token; after a sequence's last one, the
        next sequence's first."""
        seq_ids = sorted(self.areas)[::step]
        if (place := self._place()) is not None:
            seq_ids = seq_ids[seq_ids.index(place[0]) :]
        self._stepping = True
        found = next((one for one in seq_ids if self.areas[one].step_rejection(step)), None)
        self._stepping = False
        if found is not None:
            self._places.reveal(found)

    def set_follow(self, follow: bool) -> None:
        """Follow the newest tokens of every sequence, or keep their places."""
        if follow != self.follow:
            for area in self.areas.values():
                area.set_follow(follow)
            self._set_followed(follow)

    def set_tabs(self, as_tabs: bool) -> None:
        """Show one sequence at a time in tabs, or all of them as tiles."""
        self._places.set_tabs(as_tabs)
        if self._cursor is not None:
            self._places.reveal(self._cursor.seq_id)
        self._show_titles()
        self.fit()

    def open_find(self) -> None:
        self.find_bar.show()
        self.find_bar.begin()
        self._find()

    def step_hit(self, step: int) -> None:
        """Select the next (+1) or previous (-1) hit, wrapping around."""
        if self.find_bar.isHidden():
            self.open_find()
        found = neighbour_hit(self._hits, self._hit or self._place(), step)
        if found is None:
            return
        self._hit = found
        seq_id, token = found
        self._stepping = True
        self._places.reveal(seq_id)
        self.areas[seq_id].go_to(token)
        self._stepping = False
        self._show_count()

    def copy_text(self) -> str:
        """The selection, or the emitted text of the current sequence, else of the first one."""
        if self.currentIndex() == _TEXTS:
            return self._texts.textCursor().selection().toPlainText() or self._texts.toPlainText()
        areas = list(self.areas.values())
        for chosen in (
            next((a for a in areas if a.selection[0] < a.selection[1]), None),
            next((a for a in areas if a.hasFocus()), None),
            self.areas.get(self._cursor.seq_id) if self._cursor is not None else None,
            areas[0] if areas else None,
        ):
            if chosen is not None:
                return chosen.copy_text()
        return ""

    def _every_area(self) -> Iterator[TokenArea]:
        for panel in self._panels.values():
            yield from (panel.area, panel.before)

    def _tell_why_empty(self, run: RunRef) -> None:
        """What a run without tokens waits for, or why it has none."""
        facts, has_ended = run.facts, run.ended
        if facts.listens_at and not has_ended and facts.requests:
            self._waiting.say(
                "Nothing is streamed yet",
                "Replies that are not streamed are counted when watching stops (Shift+F5).",
            )
        elif facts.listens_at and not has_ended:
            self._waiting.say(
                "Waiting for a client", f"Set the client's server address to {facts.listens_at}."
            )
        elif has_ended and (facts.error or is_ours(facts) or has_no_client(facts)):
            self._waiting.say("No tokens", why_it_ended(run))
        elif has_ended and (texts := reply_texts(facts)):
            self._show_texts(untold_by(facts, "the tokens"), texts)
        elif "stops" in facts and not is_ours(facts):
            found = gravest_finding(run)
            said = untold_by(facts, "the tokens"), "Runs (Ctrl+8) lists what it reports."
            self._waiting.say("Not observed", " ".join((*said, found.why if found else "")).strip())
        else:
            self._waiting.say()

    def _show_texts(self, why: str, texts: dict[int, str]) -> None:
        """The replies as received, each under its number if there are several."""
        head = "Reply {}\n" if len(texts) > 1 else ""
        every = (head.format(seq_id) + text for seq_id, text in texts.items())
        self._about_texts.setText(f"{why} Its reply, as received:")
        self._texts.setPlainText("\n\n".join(every))
        self._without = _TEXTS
        self._say_what_it_waits_for()

    def _say_what_it_waits_for(self) -> None:
        self._drop_spare()
        self.setCurrentIndex(self._without)

    def _drop_spare(self) -> None:
        if self._spare:
            self._spare = {}
            self._places.clear()

    def _add_panels(self, streams: list[TokenStream]) -> None:
        self._late.stop()
        if {stream.seq_id for stream in streams} == self._spare.keys():
            new, self._spare = self._spare, {}
        else:
            self._drop_spare()
            room = _MOST_PANELS - len(self._panels)
            new = {stream.seq_id: self._panel() for stream in streams[:room]}
            if new:
                self._places.add(new)
        self._panels |= new
        for stream in streams:
            if stream.seq_id in new:
                self._begin(new[stream.seq_id], stream)
        self._show_titles()
        self.fit()
        n_more = len(self._run.by_seq) - len(self._panels) if self._run is not None else 0
        self._more.setVisible(n_more > 0)
        self._more.setText(f"{n_more:,} more sequences are not shown here.")

    def _begin(self, panel: SequencePanel, stream: TokenStream) -> None:
        """Show a stream in a panel with the current settings."""
        area = panel.area
        for one in (area, panel.before):
            one.set_zoom(self._zoom)
            one.set_ghosts(self._ghosts)
        panel.show_stream(stream)
        area.set_follow(self.follow)
        area.set_cursor(self._cursor)

    def _panel(self) -> SequencePanel:
        panel = SequencePanel(self._theme)
        area = panel.area
        area.position_selected.connect(self.position_selected)
        area.range_selected.connect(self.range_selected)
        area.follow_changed.connect(self._on_follow_changed)
        area.inspect_asked.connect(self.inspect_asked)
        panel.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        panel.customContextMenuRequested.connect(lambda where: self._ask(panel, where))
        return panel

    def _show_titles(self) -> None:
        for panel in self._panels.values():
            panel.show_title(
                self._parent is not None or (len(self._panels) > 1 and not self._places.as_tabs)
            )

    def _on_query(self, _terms: tuple[Term, ...]) -> None:
        self._hit = None
        self._find()

    def _close_find(self) -> None:
        self.find_bar.hide()
        self._search.stop()
        self._find()
        area = next(iter(self.areas.values()), None)
        if self._cursor is not None:
            area = self.areas.get(self._cursor.seq_id, area)
        if area is not None:
            area.setFocus()

    def _find(self) -> None:
        """Mark the hits of the query; none while the find bar is closed."""
        terms = () if self.find_bar.isHidden() else self.find_bar.terms
        self._hits = {}
        for seq_id, area in sorted(self.areas.items()):
            if area.stream is not None:
                self._hits[seq_id] = find_hits(terms, area.stream)
                area.set_hits(self._hits[seq_id])
        self._show_count()

    def _show_count(self) -> None:
        at, before = None, 0
        for seq_id, hits in self._hits.items():
            if self._hit is not None and self._hit[0] == seq_id:
                at = before + int(np.searchsorted(hits, self._hit[1]))
            before += len(hits)
        self.find_bar.show_count(before, at)

    def _place(self) -> tuple[int, int] | None:
        """Sequence and index of the outlined token."""
        for seq_id, area in self.areas.items():
            if area.current >= 0:
                return seq_id, area.current
        return None

    def _ask(self, panel: SequencePanel, where: QPoint) -> None:
        """The menu of a sequence (also by the menu key)."""
        stream = panel.area.stream
        if stream is None:
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addActions(self.menu_actions)
        menu.addSeparator()
        text = f"End Sequence {stream.seq_id}"
        end = menu.addAction(text, lambda: self.cancel_asked.emit(stream.run, stream.seq_id))
        end.setObjectName("tokens.end_sequence")
        end.setEnabled(stream.run == self.cancellable)
        menu.popup(panel.mapToGlobal(where))

    def _on_follow_changed(self) -> None:
        self._set_followed(all(area.follow for area in self.areas.values()))

    def _set_followed(self, follow: bool) -> None:
        if follow != self.follow:
            self.follow = follow
            self.follow_changed.emit(follow)
