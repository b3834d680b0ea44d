"""The Conversation panel: turns continued, edited and branched, and what each reused from
memory."""

from __future__ import annotations

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QResizeEvent, QShowEvent, QTextCursor
from PySide6.QtWidgets import QCheckBox, QComboBox, QLabel, QPushButton, QScrollArea, QWidget

from app.engine_thread.events import OpenedFiles
from app.engine_thread.feed import Pacer
from app.looks import Theme, fixed_font
from app.panels.conversation.turn_card import (
    CheckpointStrip,
    TurnCard,
    answer_text,
    fact_lines,
    leaf_of,
    said_text,
)
from app.trace_models.run_rows import Position
from app.widgets.build import hbox, key_in, made, scrolling, vbox, words
from app.widgets.empty_state import EmptyState
from app.widgets.fields import offer, text_box
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.option_groups import OptionGroup
from engine.conversation.turns import (
    CheckpointHistory,
    Message,
    Turn,
    TurnTree,
    content_of,
    conversations,
)
from engine.option_fields import build, options_in
from engine.options import CacheOptions
from engine.plain_text import counted, size_text
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET

_MOST_CARDS = 60
_PROMPT_LINES, _LEAST_LINES = 4, 2
"""Height of the input box in lines; the least in a low window, of the turns, too."""
_MEMORY_FROM = 20
"""Lines of height from which the context checkpoints are shown."""
_FRAME, _SPACING = 12, 4
_NEW = -1
_CHOICE_CHARACTERS = 14
_PERIOD_MS = 200


class ConversationView(QWidget):
    """The turns of a branch from top to bottom, a strip of the context checkpoints, and an input
    box."""

    say_asked = Signal(object, object, str, bool)
    """Number of the conversation (None: a new one), of the turn to continue (None: at its
    start), the text, and whether the chat template is used."""
    run_selected = Signal(object)  # RunRef

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.store: TraceStore | None = None
        """The trace that the conversation on show is part of."""
        self._number: int | None = None
        self._tree = TurnTree([])
        self._leaf: int | None = None
        self._shown: list[int] = []
        self._parent_of_edit: int | None = None
        self._edits: int | None = None
        self._left: int | None = None
        """The last turn on show before a branch was started at an earlier one."""
        self._place_words = ""
        """The place of the next turn, if not after the last one."""
        self._has_template = False
        self._to_end = True
        """Whether the view follows the newest turn as it grows."""
        self._pacer = Pacer(self._refresh, _PERIOD_MS, self)
        self._make()
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.box)
        self.set_ready("Open a model first.")
        self.set_files(None)
        self._list()
        self._show()

    def cache_options(self) -> CacheOptions:
        """How many context checkpoints the next turn may keep, and how far apart."""
        return build(CacheOptions, self.checkpoints.values())

    # -- what the window sets --------------------------------------------------------------

    def set_files(self, files: OpenedFiles | None) -> None:
        """The model in use: whether it has a chat template."""
        self._has_template = files is not None and files.has_chat_template
        self.chat.setEnabled(self._has_template)
        # the bundled model continues texts and has not learned to chat
        self.chat.setChecked(
            self._has_template and files is not None and files.target != DEMO_TARGET
        )
        self._say_how()

    def set_ready(self, why_not: str) -> None:
        """Whether a turn can begin; why_not: empty if it can."""
        self._why_not = why_not
        self._enable()
        self._say_how()
        if self.isVisible():
            self._pacer.now()

    def show_run(self, run: RunRef | None) -> None:
        """The conversation that a run is a turn of; else the newest one of its trace."""
        store = None if run is None else run.store
        turn = None if run is None else run.facts.turn
        before = self.store, self._number
        if store is not self.store:
            known = [] if store is None else conversations(store.runs)
            self.store, self._number, self._leaf = store, known[-1] if known else None, None
        if turn is not None:
            if self._left is not None:
                self._drop_change()
            self._number, self._leaf = turn.conversation, turn.number
            if turn.messages[-1:] == [{"role": "user", "content": self.box.toPlainText()}]:
                self._begun()
        if before != (self.store, self._number):  # turns have the numbers of another one
            self._drop_change()
        self._list()
        self._pacer.stop()
        self._refresh()

    def refresh(self) -> None:
        """Read new rows of the trace, now or soon; if hidden, when it is shown."""
        if self.isVisible():
            self._pacer.ask()

    def _refresh(self) -> None:
        if self.store is not None and self._number is not None:
            self._tree = TurnTree.of(self.store.runs, self._number)
        else:
            self._tree = TurnTree([])
        self._leaf = leaf_of(self._tree, self._leaf) if self._number is not None else None
        self._show()

    def set_cursor(self, position: Position | None) -> None:
        """Does nothing: positions of several runs are shown side by side here."""

    # -- what goes along with the next turn -------------------------------------------------

    def said_up_to(self, number: int | None) -> list[Message]:
        """All messages of the conversation on show up to the answer of a turn."""
        return self._tree.messages(number)

    def kept_of_edit(self) -> list[Message]:
        """The other messages of the edited turn: the box has the last one."""
        return [] if self._edits is None else list(self._tree.turns[self._edits].messages[:-1])

    # -- what the user does ----------------------------------------------------------------

    def send(self) -> None:
        text = self.box.toPlainText()
        if self._why_not or not text:
            return
        parent = self._parent_of_edit if self._edits is not None else self._leaf
        self.box.setFocus()  # disabling the focused button now would lose the keyboard focus
        self.say_asked.emit(self._number, parent, text, self.chat.isChecked())

    def edit_turn(self, number: int) -> None:
        """Put a turn's text into the box; the new turn replaces it."""
        turn = self._tree.turns[number]
        self._edits, self._parent_of_edit = number, turn.parent
        self.box.setPlainText(content_of(turn.messages[-1]) if turn.messages else "")
        self.box.moveCursor(QTextCursor.MoveOperation.End)
        self.cancel.setText("Cancel edit")
        self._place_words = f"Replaces turn {self._place(number)}, as a branch"
        self._say_how()
        self.box.setFocus()

    def branch_behind(self, number: int) -> None:
        """Continue at an earlier turn."""
        left = self._leaf if self._left is None else self._left
        self._drop_change()
        self._leaf, self._left = number, left
        self.cancel.setText("Cancel branch")
        self._place_words = f"After turn {self._place(number)}, as a branch: later turns stay"
        self._say_how()
        self._refresh()
        self.box.setFocus()

    def begin_new(self) -> None:
        """The next turn begins a conversation."""
        self._drop_change()
        self._number, self._leaf = None, None
        self._list()
        self._refresh()
        self.box.setFocus()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh()

    # -- building --------------------------------------------------------------------------

    def _make(self) -> None:
        self.choice = made(QComboBox, accessibleName="Conversation", toolTip="Shown conversation")
        self.new = made(QPushButton, "New", toolTip="Start a new conversation with the next turn")
        self.chat = QCheckBox("Chat template")
        self.chat.setToolTip("Format the messages with the model's chat template")
        self.empty = EmptyState(
            "No turn yet",
            "Type a message below. Each turn reuses the cached prefix, and shows how many tokens "
            "were reused and processed again.",
        )
        self.cards: list[TurnCard] = []
        self.earlier = made(QLabel, muted=True)
        self.strip = CheckpointStrip(self._theme)
        self.summary = made(ElidedLabel, muted=True)
        self.checkpoints = OptionGroup(
            "Context checkpoints",
            options_in(CacheOptions),
            plain=f"{CacheOptions().ctx_checkpoints} at most",
        )
        self.how = words(muted=True)
        self.cancel = QPushButton("Cancel edit")
        self.cancel.hide()
        self.box = text_box("Next message", "Next message; Ctrl+Enter sends it")
        self.box.setFont(fixed_font())
        line = self.box.fontMetrics().lineSpacing()
        self.box.setMinimumHeight(_LEAST_LINES * line + _FRAME)
        self.box.setMaximumHeight(_PROMPT_LINES * line + _FRAME)
        self.say = QPushButton("Send")

    def _lay_out(self) -> None:
        self.choice.setSizeAdjustPolicy(
            self.choice.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.choice.setMinimumContentsLength(_CHOICE_CHARACTERS)
        top = hbox((self.choice, 1), self.new)
        page = QWidget()
        self._column = vbox(
            self.earlier, (self.empty, 1), 1, of=page, margins=(0, 0, 4, 0), spacing=6
        )
        self.area = scrolling(QScrollArea(), page, "Turns")
        self.area.setMinimumHeight(_LEAST_LINES * self.fontMetrics().lineSpacing())
        self._memory = QWidget()
        memory = self.strip, self.summary, self.checkpoints
        vbox(*memory, of=self._memory, margins=(0, 0, 0, 0), spacing=_SPACING)
        below = hbox(self.chat, 1, self.cancel, self.say)
        parts = top, (self.area, 1), self._memory, self.box, self.how
        column = vbox(*parts, of=self, margins=(8, 6, 8, 6), spacing=_SPACING)
        column.addLayout(below)

    def minimumSizeHint(self) -> QSize:
        """Without the context checkpoints, which are hidden in a low view."""
        least = super().minimumSizeHint()
        if not self._memory.isHidden():
            least -= QSize(0, self._memory.minimumSizeHint().height() + _SPACING)
        return least

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        lines = event.size().height() / self.fontMetrics().height()
        self._memory.setVisible(lines >= _MEMORY_FROM)

    def _connect(self) -> None:
        bar = self.area.verticalScrollBar()
        bar.rangeChanged.connect(self._keep_at_end)
        bar.actionTriggered.connect(self._leave_end)
        self.choice.activated.connect(self._choose)
        self.new.clicked.connect(self.begin_new)
        self.chat.toggled.connect(self._say_how)
        self.say.clicked.connect(self.send)
        self.cancel.clicked.connect(self._cancel)
        self.box.textChanged.connect(self._enable)
        for key in ("Ctrl+Return", "Ctrl+Enter"):
            key_in(self.box, key, self.send)

    # -- internals -------------------------------------------------------------------------

    def _keep_at_end(self, _least: int, most: int) -> None:
        if self._to_end:
            self.area.verticalScrollBar().setValue(most)

    def _leave_end(self, _action: int) -> None:
        self._to_end = False

    def _begun(self) -> None:
        """The requested turn has started: clear the box."""
        self.box.clear()
        self._drop_change()

    def _cancel(self) -> None:
        """Let the next turn follow the last one again, and show that."""
        self._leaf = self._leaf if self._left is None else self._left
        self._drop_change()
        self._refresh()

    def _drop_change(self) -> None:
        """Drop the edit or the branch."""
        if self._edits is not None:
            self.box.clear()
        self._edits = self._parent_of_edit = self._left = None
        self._place_words = ""
        self._say_how()

    def _place(self, number: int) -> int:
        """The number of a turn in its branch, from 1."""
        return len(self._tree.path(number))

    def _list(self) -> None:
        known = [] if self.store is None else conversations(self.store.runs)
        items = [(f"Conversation {number + 1}", number) for number in known]
        new = [("New conversation", _NEW)] if self._number is None else []
        offer(self.choice, [*items, *new], _NEW if self._number is None else self._number)

    def _choose(self, index: int) -> None:
        number = self.choice.itemData(index)
        self._drop_change()
        self._number, self._leaf = (None if number == _NEW else number), None
        self._list()
        self._refresh()

    def _show(self) -> None:
        path = self._tree.path(self._leaf)
        shown = path[-_MOST_CARDS:]
        self.earlier.setVisible(len(path) > len(shown))
        self.earlier.setText(f"{len(path) - len(shown):,} earlier turns")
        self.empty.setVisible(not shown)
        follows = [turn.number for turn in shown] != self._shown
        self._shown = [turn.number for turn in shown]
        while len(self.cards) < len(shown):
            self._add_card()
        for card in self.cards[len(shown) :]:
            card.hide()
        for card, turn in zip(self.cards, shown, strict=False):
            self._fill(card, turn)
            card.show()
        self._show_checkpoints(shown[-1] if shown else None)
        self._to_end |= follows

    def _fill(self, card: TurnCard, turn: Turn) -> None:
        siblings = self._tree.siblings(turn.number)
        place = ""
        if len(siblings) > 1:
            place = f"{siblings.index(turn.number) + 1}/{len(siblings)}"
        title = f"Turn {self._place(turn.number)}"
        card.show_turn(title, said_text(turn), fact_lines(turn), place)
        if self.store is not None:
            card.set_answer(answer_text(self.store, turn))
        card.branch.setVisible(turn.number != self._leaf)

    def _add_card(self) -> None:
        card, index = TurnCard(self._theme), len(self.cards)
        card.edit_asked.connect(lambda: self.edit_turn(self._shown[index]))
        card.branch_asked.connect(lambda: self.branch_behind(self._shown[index]))
        card.run_asked.connect(lambda: self._select(self._shown[index]))
        card.sibling_asked.connect(lambda step: self._step_sibling(self._shown[index], step))
        self.cards.append(card)
        self._column.insertWidget(self._column.count() - 1, card)

    def _select(self, number: int) -> None:
        if self.store is not None:
            self.run_selected.emit(RunRef(self.store, self._tree.turns[number].run_id))

    def _step_sibling(self, number: int, step: int) -> None:
        siblings = self._tree.siblings(number)
        at = siblings.index(number) + step
        if 0 <= at < len(siblings):
            self._drop_change()
            self._leaf = self._tree.newest_behind(siblings[at])
            self._refresh()

    def _show_checkpoints(self, turn: Turn | None) -> None:
        record = turn.record if turn else None
        history = CheckpointHistory()
        if turn is not None and record is not None and self.store is not None:
            history = CheckpointHistory.of(self.store.runs, record.slot, turn.run_id)
        self.strip.setVisible(record is not None)
        self.summary.setVisible(record is not None)
        self.strip.set_turn(record, history)
        self.summary.setText(summary_words(history))

    def _say_how(self) -> None:
        words = "Messages are formatted with the model's chat template"
        if not self.chat.isChecked():
            words = "Turns are plain text, concatenated"
            if not self._has_template:
                words = f"No chat template in the model: {words[0].lower()}{words[1:]}"
        self.cancel.setVisible(bool(self._place_words))
        self.how.setText(self._why_not or self._place_words or words)

    def _enable(self) -> None:
        empty = not self.box.toPlainText()
        self.say.setEnabled(not self._why_not and not empty)
        self.say.setToolTip(self._why_not or ("The message is empty." if empty else "Ctrl+Enter"))


def summary_words(history: CheckpointHistory) -> str:
    """The context checkpoints in memory, and the results of looking for them."""
    n_bytes = sum(mark.n_bytes for mark in history.held)
    words = [f"{counted(len(history.held), 'context checkpoint')} ({size_text(n_bytes)})"]
    misses = "1 miss" if len(history.misses) == 1 else f"{len(history.misses)} misses"
    words.append(f"{counted(history.n_hits, 'hit')}, {misses}")
    if history.n_erased or history.n_evicted:
        words.append(f"{history.n_erased} erased, {history.n_evicted} evicted")
    if history.misses:
        _, n_common, n_reused, why = history.misses[-1]
        words.append(f"last miss at {n_common:,}, started at {n_reused:,}: {why.sentence}")
    return " · ".join(words)
