"""The drafted tokens of a run as arrays: how sure the drafter was of each, what became of it, and
where the target's own token stood among the drafter's candidates when one was rejected.

Only drafts of which the trace holds every token are taken apart: of another engine's run the
accepted ones alone may be known, and every rate over those would be 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import RunRef

ACCEPTED, REJECTED, NOT_JUDGED = 0, 1, 2
"""Fates of a drafted token. An end token that the target chose too is emitted as the target's own,
and accepted here; after a rejected token none is judged."""
BEYOND, UNKNOWN = 0, -1
"""Ranks of a target's token that is not among the candidates, and of one without candidates."""

_LOW_BITS = 31


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """Drafts in the order they were verified.

    By step, [s]: drafter (code of the store's texts), n_drafted, n_accepted, is_told (whether its
    tokens are among the following). By drafted token, [n]: step, index in the draft, confidence
    (of the drafter's confidence head if it has one; NaN of a token that was looked up), fate. By
    rejection, [m]: rejected_step, rejected_index, rank of the token that the target chose instead
    among the drafter's candidates, from 1.
    """

    drafter: np.ndarray
    n_drafted: np.ndarray
    n_accepted: np.ndarray
    is_told: np.ndarray
    step: np.ndarray
    index: np.ndarray
    confidence: np.ndarray
    fate: np.ndarray
    rejected_step: np.ndarray
    rejected_index: np.ndarray
    rank: np.ndarray

    @property
    def is_judged(self) -> np.ndarray:
        """Which tokens the target has judged, bool [n]."""
        return self.fate != NOT_JUDGED


class DraftReader:
    """Reads the drafts of a run, each once, while the run grows."""

    def __init__(self, run: RunRef) -> None:
        self._run = run
        self._rounds_read = self._tokens_read = 0

    def read(self) -> JudgedDrafts | None:
        """The drafts that were verified since the last call; None without any.

        The row of a round is written after the rows of its tokens.
        """
        store, run_id = self._run.store, self._run.run_id
        start, stop = self._rounds_read, len(store.rounds)
        stop_tokens = len(store.tokens)  # after the rounds: their tokens are complete
        self._rounds_read = stop
        rounds = store.rounds

        def of_round(name: str) -> np.ndarray:
            return rounds.column(name, start, stop)

        drafted = of_round("num_draft_tokens")
        steps = np.flatnonzero(
            (of_round("run_id") == run_id) & (drafted > 0) & (of_round("n_merged") == MISSING)
        )
        if not steps.size:
            return None
        keys = _keys(of_round("round")[steps], of_round("seq_id")[steps])
        order = np.argsort(keys, kind="stable")
        tokens = _Tokens(self._run, self._tokens_read, stop_tokens, keys[order], order)
        self._tokens_read = tokens.end
        n_drafted = drafted[steps]
        index = tokens.column("draft_index")
        is_drafted = (index >= 0) & (index < n_drafted[tokens.step])  # others were not verified
        is_drafted &= ~tokens.is_kind("replayed")
        is_told = np.bincount(tokens.step[is_drafted], minlength=len(steps)) == n_drafted
        chosen = is_drafted & is_told[tokens.step]
        fate = np.full(len(index), NOT_JUDGED, np.int8)
        fate[tokens.is_kind(*EMITTED_KINDS)] = ACCEPTED
        fate[tokens.is_kind("rejected")] = REJECTED
        rejected = np.flatnonzero(chosen & (fate == REJECTED))
        return JudgedDrafts(
            drafter=of_round("drafter")[steps],
            n_drafted=n_drafted,
            n_accepted=np.clip(of_round("num_accepted_draft_tokens")[steps], 0, n_drafted),
            is_told=is_told,
            step=tokens.step[chosen],
            index=index[chosen],
            confidence=tokens.confidence()[chosen],
            fate=fate[chosen],
            rejected_step=tokens.step[rejected],
            rejected_index=index[rejected],
            rank=tokens.ranks(rejected),
        )


def judged_drafts(run: RunRef) -> JudgedDrafts | None:
    """All drafts of a run that have been verified by now; None without any."""
    return DraftReader(run).read()


class _Tokens:
    """Rows start .. stop of `tokens` that belong to steps, [n], and which step each belongs to.

    keys: ascending, of the steps `order`.
    """

    def __init__(
        self, run: RunRef, start: int, stop: int, keys: np.ndarray, order: np.ndarray
    ) -> None:
        self._table, self._pool = run.store.tokens, run.store.text_pool
        mine = np.flatnonzero(self._table.column("run_id", start, stop) == run.run_id) + start
        of = _keys(*(self._table.column(name, 0, stop)[mine] for name in ("round", "seq_id")))
        at = np.minimum(np.searchsorted(keys, of), len(keys) - 1)
        found = keys[at] == of
        self._rows, self._stop = mine[found], stop
        self.step: np.ndarray = order[at[found]]
        self.end = int(self._rows[-1]) + 1 if len(self._rows) else start
        """After the last of them."""

    def column(self, name: str) -> np.ndarray:
        values: np.ndarray = self._table.column(name, 0, self._stop)[self._rows]
        return values

    def confidence(self) -> np.ndarray:
        """What the drafter's confidence head said, where it has one, else its probability."""
        head = self.column("draft_conf")
        return np.where(np.isnan(head), self.column("draft_p"), head)

    def is_kind(self, *kinds: str) -> np.ndarray:
        codes = [self._pool.find(kind) for kind in kinds]
        return np.isin(self.column("kind"), codes)

    def ranks(self, rejected: np.ndarray) -> np.ndarray:
        """Rank of the target's token among the candidates of rejected tokens, int64 [m]."""
        ids, places = self.column("token_id"), _keys(self.column("pos"), self.step)
        replacing = np.flatnonzero(self.is_kind("replacement"))
        replacing = replacing[np.argsort(places[replacing], kind="stable")]
        if not len(replacing):
            return np.full(len(rejected), UNKNOWN)
        at = np.searchsorted(places[replacing], places[rejected])
        own = replacing[np.minimum(at, len(replacing) - 1)]
        chosen = np.where(places[own] == places[rejected], ids[own], MISSING)
        candidates = self._table.column("draft_top_id", 0, self._stop)[self._rows[rejected]]
        is_there = candidates == chosen[:, None]
        rank = np.where(is_there.any(axis=1), 1 + is_there.argmax(axis=1), BEYOND)
        known = (chosen != MISSING) & (candidates != MISSING).any(axis=1)
        return np.where(known, rank, UNKNOWN)


def _keys(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """One number for a pair, int64 [n]; low: below 2 ** 31."""
    return (high << _LOW_BITS) + low
