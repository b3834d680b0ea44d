"""The find bar: the tokens of a stream that satisfy a filter, all at once, over its columns.

A query is a list of terms, and a token has to satisfy all of them:

- a kind, such as `rejected` or `replayed`;
- a comparison, such as `depth>2` or `p<0.1`, with `<`, `<=`, `>`, `>=`, `=` or `!=`. FIELDS has
  the names; a figure that was not observed satisfies none;
- a choice, such as `path:restore` or `seq:1`. `path:restore` also finds the restores for whose
  depth no snapshot was left (`path:restore_depth`);
- anything else is text, and so is anything in double quotes. Words in a row are one text. Text
  in lower case is found in either case, and it may begin in one token and end in another.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QPalette
from PySide6.QtWidgets import QLabel, QLineEdit, QToolButton, QWidget

from app.looks import Theme, icon
from app.trace_models.token_stream import GHOSTS, KIND, TokenStream
from app.widgets.build import flat_button, hbox, made, vbox, words
from engine.plain_text import counted
from engine.trace.records import MISSING, ROLLBACK_PATHS, TOKEN_KINDS
from engine.trace.token_text import pieces_at

FIELDS = {
    "depth": ("rounds", "rollback_depth"),
    "drafted": ("rounds", "num_draft_tokens"),
    "emitted": ("rounds", "num_emitted"),
    "width": ("rounds", "verify_width"),
    "round": ("rounds", "round"),
    "seq": ("rounds", "seq_id"),
    "pos": ("tokens", "pos"),
    "index": ("tokens", "draft_index"),
    "p": ("tokens", "target_p"),
    "q": ("tokens", "draft_p"),
    "conf": ("tokens", "draft_conf"),
    "rank": ("tokens", "target_rank"),
    "entropy": ("tokens", "target_entropy"),
    "rule_p": ("tokens", "rule_p"),
    "rule_q": ("tokens", "rule_q"),
}
"""Fields compared with a number: name -> table and column."""
CHOICES = {"path": "rollback_path", "drafter": "drafter", "rule": "accept_rule"}
"""Other choices with a colon than `kind:` and the fields: name -> column of rounds."""
_PART = re.compile(r'"([^"]*)("?)|(\S+)')
_COMPARISON = re.compile(r"(\w+)(<=|>=|!=|<|>|=)(\S+)")
_CHOICE = re.compile(r"(\w+):(\S+)")
_IN_QUOTES = "Put text with such signs in double quotes."


class FilterError(ValueError):
    """An invalid query; the message is one sentence and a remedy."""


class Term(NamedTuple):
    """A condition on tokens. name: "kind", of FIELDS or of CHOICES; empty for text contained in the
    tokens. sign: comparison, = except for numbers. value: a kind, a number, the allowed values of a
    column of the round, or the text."""

    name: str
    value: Any
    sign: str = "="


def is_of_round(term: Term) -> bool:
    """Whether a term is about the round, so that all or none of its tokens match."""
    return term.name in CHOICES or FIELDS.get(term.name, ("",))[0] == "rounds"


def parse_filter(query: str) -> tuple[Term, ...]:
    """The terms of a query, none for an empty one. Raises FilterError."""
    terms: list[Term] = []
    text_start: int | None = None
    end = 0

    def close_text(stop: int) -> None:
        nonlocal text_start
        if text_start is not None:
            terms.append(Term("", query[text_start:stop]))
            text_start = None

    for part in _PART.finditer(query):
        quoted, closed, word = part.groups()
        if quoted is not None:
            close_text(end)
            if not closed:
                raise FilterError(f"The quote before {quoted!r} is not closed. Add another.")
            if quoted:
                terms.append(Term("", quoted))
        else:
            if (term := _term(word)) is not None:
                close_text(end)
                terms.append(term)
            elif text_start is None:
                text_start = part.start()
        end = part.end()
    close_text(end)
    return tuple(terms)


def _term(word: str) -> Term | None:
    """The term of a word; None if it is text to search for."""
    if word in TOKEN_KINDS:
        return Term("kind", word)
    if found := _COMPARISON.fullmatch(word):
        return _comparison(*found.groups())
    if found := _CHOICE.fullmatch(word):
        return _choice(*found.groups())
    return None


def _comparison(name: str, sign: str, value: str) -> Term:
    if name not in FIELDS:
        raise FilterError(f"There is no figure {name!r}; use {', '.join(FIELDS)}. {_IN_QUOTES}")
    return Term(name, _number(name, value), sign)


def _choice(name: str, value: str) -> Term:
    if name == "kind":
        if value not in TOKEN_KINDS:
            raise FilterError(f"There is no kind {value!r}; use {', '.join(TOKEN_KINDS)}.")
        return Term("kind", value)
    if name in FIELDS:
        return Term(name, _number(name, value))
    if name not in CHOICES:
        known = ", ".join(f"{one}:" for one in ("kind", "seq", *CHOICES))
        raise FilterError(f"There is no filter {name + ':'!r}; use {known}. {_IN_QUOTES}")
    if name != "path":
        return Term(name, (value,))
    paths = tuple(path for path in ROLLBACK_PATHS if path in (value, f"{value}_depth"))
    if not paths:
        raise FilterError(f"There is no path {value!r}; use {', '.join(ROLLBACK_PATHS)}.")
    return Term(name, paths)


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise FilterError(f"{name} needs a number, not {value!r}.")
    return number


_TESTS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_IS_GHOST = np.array([code in GHOSTS for code in range(len(TOKEN_KINDS))])


def find_hits(terms: Sequence[Term], stream: TokenStream) -> np.ndarray:
    """Indices of the tokens that match all terms, int64 [n] ascending; none without terms.

    A text counts where it begins. If all terms are about rounds, only the first token of a round
    counts, so that hits are rounds.
    """
    n = len(stream)
    if not terms or not n:
        return np.zeros(0, np.int64)
    columns = _Columns(stream, n)
    found = np.ones(n, bool)
    for term in terms:
        found &= columns.satisfy(term)
    hits = np.flatnonzero(found)
    if len(hits) and all(is_of_round(term) for term in terms):
        hits = hits[np.diff(columns.rounds[hits], prepend=-1) != 0]
    return hits


def neighbour_hit(
    hits: Mapping[int, np.ndarray], here: tuple[int, int] | None, step: int
) -> tuple[int, int] | None:
    """The hit after (+1) or before (-1) a place, over all sequences, wrapping around.

    hits: indices of each sequence's hits, int64 [n] ascending. A place is a sequence and a token
    index; without one it is the first or the last hit. None without hits.
    """
    seq_ids = sorted(seq_id for seq_id in hits if len(hits[seq_id]))
    if not seq_ids:
        return None
    end = 0 if step > 0 else -1
    if here is None:
        return seq_ids[end], int(hits[seq_ids[end]][end])
    seq_id, token = here
    own = hits.get(seq_id, np.zeros(0, np.int64))
    at = int(np.searchsorted(own, token, "right" if step > 0 else "left")) - (step < 0)
    if 0 <= at < len(own):
        return seq_id, int(own[at])
    beyond = [one for one in seq_ids if (one > seq_id if step > 0 else one < seq_id)]
    chosen = (beyond or seq_ids)[end]
    return chosen, int(hits[chosen][end])


class _Columns:
    """The columns of one stream as arrays [n], read on demand."""

    def __init__(self, stream: TokenStream, n: int) -> None:
        self._stream, self._n = stream, n
        self._store = stream.store
        self._rows = np.array(stream.rows[:n], np.int64)
        self.rounds = np.array(stream.rounds[:n], np.int64)
        self._kinds = np.frombuffer(bytes(stream.kinds[:n]), np.uint8)
        self._of_round: np.ndarray | None = None

    def satisfy(self, term: Term) -> np.ndarray:
        """Whether each token matches a term, bool [n]."""
        if term.name == "kind":
            found = self._kinds == KIND[term.value]
            if term.value == "replayed":
                found |= np.frombuffer(bytes(self._stream.replayed[: self._n]), np.uint8) != 0
            return found
        if term.name in FIELDS:
            values = self._values(*FIELDS[term.name])
            found = _TESTS[term.sign](values, term.value)
            observed = values != MISSING if values.dtype.kind == "i" else ~np.isnan(values)
            both: np.ndarray = found & observed
            return both
        if term.name:
            codes = [self._store.text_pool.find(value) for value in term.value]
            values = self._values("rounds", CHOICES[term.name])
            chosen: np.ndarray = np.isin(values, codes)
            return chosen
        return self._text(term.value)

    def _values(self, table: str, name: str) -> np.ndarray:
        if table == "tokens":
            return self._store.tokens.column(name)[self._rows]
        if name == "round":
            return self.rounds
        if name == "seq_id":
            return np.full(self._n, self._stream.seq_id)
        column = self._store.rounds.column(name)
        if not len(column):
            return np.full(self._n, MISSING)
        at = self._round_rows()
        known = (at >= 0) & (at < len(column))
        nothing = 0 if column.dtype == np.int32 else MISSING  # text codes include zero
        values: np.ndarray = np.where(known, column[np.where(known, at, 0)], nothing)
        return values

    def _round_rows(self) -> np.ndarray:
        """Row of the rounds table for each token, -1 until it is written."""
        if self._of_round is None:
            table, n = self._store.rounds, len(self._store.rounds)
            mine = table.column("run_id", 0, n) == self._stream.run.run_id
            mine &= table.column("seq_id", 0, n) == self._stream.seq_id
            rows = np.flatnonzero(mine)
            known = table.column("round", 0, n)[rows]
            at = np.searchsorted(known, self.rounds)
            inside = np.minimum(at, len(rows) - 1)
            hit = (known[inside] == self.rounds) if len(rows) else np.zeros(self._n, bool)
            self._of_round = np.where(hit, rows[inside] if len(rows) else -1, -1)
        return self._of_round

    def _text(self, text: str) -> np.ndarray:
        """Tokens where the text begins, ignoring case if it has no capital; a ghost must
        contain all of it."""
        found = np.zeros(self._n, bool)
        wanted = text.encode()
        fold: Callable[[bytes], bytes] = bytes.lower if text == text.lower() else bytes
        is_ghost = _IS_GHOST[self._kinds]
        ghosts = pieces_at(self._store, self._rows[is_ghost])
        containing = {piece for piece in set(ghosts) if wanted in fold(piece)}
        found[is_ghost] = [piece in containing for piece in ghosts]

        said = np.flatnonzero(~is_ghost)
        if len(said):
            parts = pieces_at(self._store, self._rows[said])
            lengths = np.fromiter(map(len, parts), np.int64, len(parts))
            starts = np.cumsum(lengths) - lengths
            places = _places(fold(b"".join(parts)), wanted)
            found[said[np.searchsorted(starts, places, side="right") - 1]] = True
        return found


def _places(text: bytes, wanted: bytes) -> np.ndarray:
    places = []
    at = text.find(wanted)
    while at >= 0:
        places.append(at)
        at = text.find(wanted, at + 1)
    return np.array(places, np.int64)


_EXAMPLES = "rejected   depth>2   path:restore   seq:1   p<0.1   text"
_HELP = (
    f"Kinds: {', '.join(TOKEN_KINDS)}\nFigures: {', '.join(FIELDS)}\n"
    f"Choices: {', '.join(f'{name}:' for name in CHOICES)}\n"
    "Anything else is text, and so is anything in double quotes."
)


class FindBar(QWidget):
    """The query, the number of hits, and the error of an invalid query."""

    query_changed = Signal(object)  # tuple[Term, ...]
    step_asked = Signal(int)
    closed = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.line = made(
            QLineEdit, placeholderText=_EXAMPLES, accessibleName="Find tokens", toolTip=_HELP
        )
        self.line.textChanged.connect(self._on_text)
        self.count = made(QLabel, accessibleName="Hits")
        self.error = words(accessibleName="What is wrong with the query")
        self.error.hide()
        self._buttons: dict[str, QToolButton] = {}
        for drawing, tip in (
            ("go-previous", "Previous hit (Shift+Enter)"),
            ("go-next", "Next hit (Enter)"),
            ("close", "Close (Esc)"),
        ):
            name = tip.partition(" (")[0]
            self._buttons[drawing] = flat_button("", tip, accessibleName=name)
        self.previous_button, self.next_button, self.close_button = self._buttons.values()
        self.previous_button.clicked.connect(lambda: self.step_asked.emit(-1))
        self.next_button.clicked.connect(lambda: self.step_asked.emit(+1))
        self.close_button.clicked.connect(self.closed)
        row = hbox((self.line, 1), self.count, *self._buttons.values(), spacing=4)
        vbox(row, self.error, of=self, margins=(8, 4, 4, 2), spacing=2)
        self.show_count(0, None)
        self._theme = theme
        theme.apply(self._recolour)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the query; empty while it has an error."""
        try:
            return parse_filter(self.line.text())
        except FilterError:
            return ()

    def begin(self) -> None:
        self.line.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.line.selectAll()

    def show_count(self, n: int, at: int | None) -> None:
        """Show the number of hits, and which one (from 0) the cursor is at."""
        if not self.terms:
            text = ""
        elif not n:
            text = "no hits"
        else:
            text = counted(n, "hit") if at is None else f"{at + 1:,} of {n:,}"
        self.count.setText(text)
        self.previous_button.setEnabled(n > 0)
        self.next_button.setEnabled(n > 0)

    def _recolour(self) -> None:
        theme = self._theme
        for drawing, button in self._buttons.items():
            button.setIcon(icon(drawing, theme))
        palette = self.error.palette()
        palette.setColor(QPalette.ColorRole.WindowText, theme.color("status.error"))
        self.error.setPalette(palette)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            back = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
            self.step_asked.emit(-1 if back else +1)
        elif event.key() == Qt.Key.Key_Escape:
            self.closed.emit()
        else:
            super().keyPressEvent(event)

    def _on_text(self, text: str) -> None:
        try:
            terms, error = parse_filter(text), ""
        except FilterError as wrong:
            terms, error = (), str(wrong)
        self.error.setText(error)
        self.error.setVisible(bool(error))
        self.query_changed.emit(terms)
