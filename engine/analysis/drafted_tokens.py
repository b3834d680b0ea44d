"""Drafted tokens of rounds as a table, a row for each round, and what the text says of them."""

from __future__ import annotations

import numpy as np

from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_columns import RunColumns, paired, places_of, round_keys
from engine.trace.run_ref import RunRef

_DRAFTED_KINDS = ("accepted", "rejected", "ignored", "replacement", "bonus", "target")
_LONGEST = 1024
_MOST_POSITIONS = 1 << 22
"""Of a sequence's text that is looked into, tokens."""


class DraftedTokens:
    """The drafted tokens of some rounds. length: int64 [n]; tokens: ids [n, k], MISSING where there
    is none; confidence: float [n, k]."""

    def __init__(
        self, run: RunRef, rounds: RunColumns, order: np.ndarray, verified: np.ndarray
    ) -> None:
        self._rows = rows = RunColumns(run.store, "tokens", run.run_id)
        drafted = rows.is_text("kind", *_DRAFTED_KINDS) & (rows["draft_index"] >= 0)
        at = np.flatnonzero(drafted & (rows["draft_index"] < _LONGEST))
        row = rows_of(rounds, order, rows["round"][at], rows["seq_id"][at])
        self._at, row = at[row >= 0], row[row >= 0]
        index = rows["draft_index"][self._at]
        self._place = row, index
        self.length = verified.copy()
        np.maximum.at(self.length, row, index + 1)
        self._shape = len(order), int(self.length.max(initial=0))
        self.tokens = np.full(self._shape, MISSING, np.int64)
        self.tokens[self._place] = rows["token_id"][self._at]
        self.confidence = self.column("draft_p")

    def column(self, name: str) -> np.ndarray:
        """What the trace says of each token, float [n, k], NaN where there is none."""
        found = np.full(self._shape, np.nan)
        found[self._place] = self._rows[name][self._at]
        return found

    def fate(self, rounds: RunColumns, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leading tokens that the text of the run has at their place, int64 [n], and whether it is
        known to have another after them, bool [n]."""
        text = self._rows
        mine = np.flatnonzero(text.is_text("kind", *EMITTED_KINDS) & (text["token_id"] >= 0))
        pos = text["pos"][mine]
        mine = mine[(pos >= 0) & (pos < _MOST_POSITIONS)]
        seq_ids, seq = np.unique(rounds["seq_id"][order], return_inverse=True)
        there = np.isin(text["seq_id"][mine], seq_ids)
        mine = mine[there]
        seq_of, pos = np.searchsorted(seq_ids, text["seq_id"][mine]), text["pos"][mine]
        known = np.full((len(seq_ids), int(pos.max(initial=0)) + 2), MISSING, np.int64)
        known[seq_of, pos] = text["token_id"][mine]
        n, k = self.tokens.shape
        place = rounds["pos0"][order][:, None] + 1 + np.arange(k)
        inside = (place >= 0) & (place < known.shape[1])
        said = np.where(inside, known[seq[:, None], np.where(inside, place, 0)], MISSING)
        there = (said != MISSING) & (self.tokens != MISSING)
        same = there & (said == self.tokens)
        n_right = np.where(same.all(1), k, np.argmin(same, 1)) if k else np.zeros(n, np.int64)
        after = np.minimum(n_right, max(k - 1, 0))
        wrong = there[np.arange(n), after] & ~same[np.arange(n), after] if k else np.zeros(n, bool)
        return n_right, wrong


def rows_of(
    rounds: RunColumns, order: np.ndarray, round_: np.ndarray, seq_id: np.ndarray
) -> np.ndarray:
    """Index into `order` of each round of a sequence, -1 where it is not among them."""
    return places_of(round_keys(rounds)[order], paired(round_, seq_id))
