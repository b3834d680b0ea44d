"""Token streams for display, one per sequence."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from engine.trace.records import EMITTED_KINDS, GHOST_KINDS, TOKEN_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.token_text import display_text, inline_newlines, pieces_at, styled_newlines

KIND = {kind: code for code, kind in enumerate(TOKEN_KINDS)}
GHOSTS = frozenset(KIND[kind] for kind in GHOST_KINDS)
PLAIN = frozenset((KIND["prompt"], KIND["target"]))
_IN_TEXT = np.array([kind == "prompt" or kind in EMITTED_KINDS for kind in TOKEN_KINDS])
_FORMS = (str, styled_newlines, inline_newlines)
_FORM_OF_KIND = np.array(
    [2 if code in GHOSTS else 0 if code in PLAIN else 1 for code in range(len(TOKEN_KINDS))]
)
_ROWS_PER_POLL = 16_384


class TokenStream:
    """The tokens of one sequence in reading order.

    Columns of equal length: texts (for display, with line feeds), kinds (codes of TOKEN_KINDS),
    replayed (1 if the token was decoded again after a restore), rounds and rows (index into the
    tokens table).

    A replayed row repeats a token that is already in the stream, so it marks that token; only a
    replayed row that repeats nothing becomes a token of its own.
    """

    def __init__(self, run: RunRef, seq_id: int) -> None:
        self.run, self.store = run, run.store
        self.seq_id = seq_id
        self.texts: list[str] = []
        self.kinds = bytearray()
        self.replayed = bytearray()
        self.rounds = array("q")
        self.rows = array("q")
        self.n_marked = 0
        """Number of marks set on earlier tokens."""
        self._text_positions = array("q")
        self._text_rows = array("q")
        self._forms: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def n_generated(self) -> int:
        """Tokens of the output: neither prompt nor ghosts."""
        return sum(map(self.kinds.count, (KIND[kind] for kind in EMITTED_KINDS)))

    def append(self, rows: np.ndarray, kinds: np.ndarray) -> None:
        """Add rows of the tokens table, int64 [n] ascending, with their kind codes [n]."""
        table = self.store.tokens
        stop = int(rows[-1]) + 1
        ids = table.column("token_id", 0, stop)
        positions = table.column("pos", 0, stop)
        in_text = rows[_IN_TEXT[kinds]]
        self._text_positions.frombytes(positions[in_text].tobytes())
        self._text_rows.frombytes(in_text.tobytes())

        shown = np.ones(len(rows), bool)
        repeated = []
        for i in np.flatnonzero(kinds == KIND["replayed"]).tolist():
            row = int(rows[i])
            origin = self._row_in_text(int(positions[row]))
            if origin is not None and origin < row and ids[origin] == ids[row]:
                shown[i] = False
                repeated.append(origin)
        rows, kinds = rows[shown], kinds[shown]

        self.texts.extend(self._display(ids[rows], table.column("text", 0, stop)[rows], kinds))
        self.kinds.extend(kinds.astype(np.uint8).tobytes())
        self.replayed.extend(bytes(len(rows)))
        self.rounds.frombytes(table.column("round", 0, stop)[rows].tobytes())
        self.rows.frombytes(rows.tobytes())
        for origin in repeated:
            self.replayed[bisect_left(self.rows, origin)] = 1
        self.n_marked += len(repeated)

    def facts(self, index: int) -> dict[str, Any]:
        """The row of one token in the tokens table."""
        return self.store.tokens.row(self.rows[index])

    def position(self, index: int) -> int:
        """Position that one token has, or would have had."""
        return int(self.store.tokens.column("pos")[self.rows[index]])

    def round_span(self, round_: int) -> tuple[int, int]:
        """First and one-past-last index of the tokens of a round."""
        return bisect_left(self.rounds, round_), bisect_right(self.rounds, round_)

    def text(self, start: int = 0, stop: int | None = None, *, prompt: bool = True) -> str:
        """The text of tokens start..stop, without ghosts unless there is nothing but ghosts."""
        stop = len(self) if stop is None else stop
        wanted = [i for i in range(start, stop) if _IN_TEXT[self.kinds[i]]]
        if not prompt:
            wanted = [i for i in wanted if self.kinds[i] != KIND["prompt"]]
        elif not wanted:
            wanted = list(range(start, stop))
        rows = np.array([self.rows[i] for i in wanted], np.int64)
        joined = b"".join(pieces_at(self.store, rows))
        return joined.decode("utf-8", "replace")

    def _row_in_text(self, position: int) -> int | None:
        at = bisect_left(self._text_positions, position)
        if at == len(self._text_positions) or self._text_positions[at] != position:
            return None
        return self._text_rows[at]

    def _display(self, ids: np.ndarray, texts: np.ndarray, kinds: np.ndarray) -> list[str]:
        """Tokens for display. ids, texts, kinds: [n] each; tokens with a text of their own are
        keyed by it, as codes below -1; -1 is a token without id and text."""
        sources = np.where(texts > 0, -1 - texts.astype(np.int64), np.maximum(ids, -1))
        keys = sources * len(_FORMS) + _FORM_OF_KIND[kinds]
        forms = self._forms
        for key in np.unique(keys).tolist():
            if key not in forms:
                source, form = divmod(key, len(_FORMS))
                if source < -1:
                    piece = self.store.text_pool.text(-1 - source).encode()
                else:
                    piece = self.store.pieces.get(source, b"")
                forms[key] = _FORMS[form](display_text(piece, max(source, -1)))
        return [forms[key] for key in keys.tolist()]


class RunStreams:
    """The streams of a run's sequences, read from the growing tokens table."""

    def __init__(self, run: RunRef) -> None:
        self.run, self.store = run, run.store
        self.by_seq: dict[int, TokenStream] = {}
        self._next_row = 0
        self._kind_of_code = np.full(0, -1, np.int64)

    @property
    def behind(self) -> int:
        """Rows not read yet."""
        return len(self.store.tokens) - self._next_row

    def poll(self) -> set[int]:
        """Read some of the new rows; returns the sequences that changed."""
        table = self.store.tokens
        start = self._next_row
        stop = min(len(table), start + _ROWS_PER_POLL)
        if start == stop:
            return set()
        self._next_row = stop
        mine = table.column("run_id", start, stop) == self.run.run_id
        kinds = self._kinds(table.column("kind", start, stop))
        seq_ids = table.column("seq_id", start, stop)
        found = {int(seq_id) for seq_id in np.unique(seq_ids[mine])}
        for seq_id in sorted(found):
            if seq_id not in self.by_seq:
                self.by_seq[seq_id] = TokenStream(self.run, seq_id)
            at = np.flatnonzero(mine & (seq_ids == seq_id) & (kinds >= 0))
            if len(at):
                self.by_seq[seq_id].append(at + start, kinds[at])
        return found

    def _kinds(self, codes: np.ndarray) -> np.ndarray:
        known = self._kind_of_code
        highest = int(codes.max(initial=0))
        if highest >= len(known):
            known = np.full(highest + 1, -1, np.int64)
            for kind, number in KIND.items():
                code = self.store.text_pool.find(kind)
                if 0 <= code <= highest:
                    known[code] = number
            self._kind_of_code = known
        return known[codes]
