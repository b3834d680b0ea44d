"""Which tokens of a stream satisfy a filter: all at once, over the columns of the trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from app.panels.tokens.token_filter import (
    CHOICES,
    FIELDS,
    ChoiceTerm,
    KindTerm,
    NumberTerm,
    Term,
    TextTerm,
    is_of_round,
)
from app.trace_models.token_stream import GHOSTS, KIND, TokenStream
from app.trace_models.token_text import pieces_at
from engine.trace.records import MISSING, TOKEN_KINDS

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
    """Indices of the tokens that satisfy all terms, int64 [n] ascending; none without terms.

    A text counts where it begins. If all terms are about rounds, only the first token of a round
    counts, so that the hits are rounds.
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
    """The hit after (+1) or before (-1) a place, over all sequences and round their ends.

    hits: indices of each sequence's hits, int64 [n] ascending. A place is a sequence and the index
    of a token; without one it is the first hit or the last. None without hits.
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
    """The columns of one stream as arrays [n], made when a term asks for them."""

    def __init__(self, stream: TokenStream, n: int) -> None:
        self._stream, self._n = stream, n
        self._store = stream.store
        self._rows = np.array(stream.rows[:n], np.int64)
        self.rounds = np.array(stream.rounds[:n], np.int64)
        self._kinds = np.frombuffer(bytes(stream.kinds[:n]), np.uint8)
        self._of_round: np.ndarray | None = None

    def satisfy(self, term: Term) -> np.ndarray:
        """Whether each token satisfies a term, bool [n]."""
        if isinstance(term, KindTerm):
            found = self._kinds == KIND[term.kind]
            if term.kind == "replayed":
                found |= np.frombuffer(bytes(self._stream.replayed[: self._n]), np.uint8) != 0
            return found
        if isinstance(term, NumberTerm):
            values = self._values(*FIELDS[term.field])
            found = _TESTS[term.sign](values, term.number)
            observed = values != MISSING if values.dtype.kind == "i" else ~np.isnan(values)
            both: np.ndarray = found & observed
            return both
        if isinstance(term, ChoiceTerm):
            codes = [self._store.text_pool.find(value) for value in term.values]
            values = self._values("rounds", CHOICES[term.name])
            chosen: np.ndarray = np.isin(values, codes)
            return chosen
        return self._text(term)

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
        nothing = 0 if column.dtype == np.int32 else MISSING  # text codes have a zero
        values: np.ndarray = np.where(known, column[np.where(known, at, 0)], nothing)
        return values

    def _round_rows(self) -> np.ndarray:
        """Row of the rounds table for each token, -1 while it is not written."""
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

    def _text(self, term: TextTerm) -> np.ndarray:
        """Tokens in which the text begins; a ghost has to contain all of it."""
        found = np.zeros(self._n, bool)
        wanted = term.text.encode()
        fold: Callable[[bytes], bytes] = bytes.lower if term.folded else bytes
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
