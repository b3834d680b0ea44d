"""What was drafted in recorded rounds, token by token, and what the text says of it."""

from __future__ import annotations

import numpy as np

from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_columns import RunColumns
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
        at, row = at[row >= 0], row[row >= 0]
        index = rows["draft_index"][at]
        self.length = verified.copy()
        np.maximum.at(self.length, row, index + 1)
        k = int(self.length.max(initial=0))
        self.tokens = np.full((len(order), k), MISSING, np.int64)
        self.confidence = np.full((len(order), k), np.nan)
        self.tokens[row, index] = rows["token_id"][at]
        self.confidence[row, index] = rows["draft_p"][at]

    def fate(self, rounds: RunColumns, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leading tokens that the text of the run has at their place, int64 [n], and whether it is
        known to have another behind them, bool [n]."""
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
    keys = (rounds["seq_id"][order].astype(np.int64) << 32) + rounds["round"][order]
    by_key = np.argsort(keys)
    wanted = (seq_id.astype(np.int64) << 32) + round_
    if not len(keys):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(keys[by_key], wanted), len(keys) - 1)
    found = by_key[place]
    return np.where(keys[found] == wanted, found, -1)
