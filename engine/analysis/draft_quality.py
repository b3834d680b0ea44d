"""Quality of drafts per drafter: calibration of its confidence, how far drafts get, what a tree
would gain.

Only drafts with all tokens in the trace are analysed: of another engine's run only the accepted
ones may be known, and every rate over those would be 1.

With p_min, tokens below it are missing, so their confidence bins stay empty.

A draft that ended early tells nothing about later indices and is left out of them (the
product-limit estimate of Kaplan and Meier, JASA 1958). This assumes that drafts cut short would
have fared like the others; where p_min cuts them, they would have fared worse.

The tree is the recorded chain plus single tokens: at a place (index in the draft, rank among the
drafter's candidates) it also holds that candidate. If the chain was rejected at this index and the
target chose that candidate, the tree's step emits one token more: the accepted candidate and the
target's token after it. Further assumptions are listed in `ASSUMPTIONS`. Drafted trees
(engine.draft.drafter) are measured by running them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.analysis.acceptance.counts import Survival, wilson
from engine.trace.records import EMITTED_KINDS, MISSING, N_TOP
from engine.trace.run_ref import RunRef, paired, places_of
from engine.trace.timings import joint_counts

ACCEPTED, REJECTED, NOT_JUDGED = 0, 1, 2
"""Fates of a drafted token. An end token that the target chose too is the target's own, neither
accepted nor rejected, and ends its draft for these figures; like a rejected token, nothing after it
is judged."""
BEYOND, UNKNOWN = 0, -1
"""Rank of a target's token that is not among the candidates, and of one without candidates."""


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """Drafts in the order of verification.

    By step, [s]: drafter (code of the store's texts), n_drafted (before an end token), n_accepted,
    is_told (whether its tokens are listed below). By drafted token, [n]: step, index in the draft,
    confidence (from the confidence head if there is one; NaN for looked-up tokens), fate. By
    rejection, [m]: rejected_step, rejected_index, rank of the target's choice among the drafter's
    candidates, from 1.
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
        """Whether each token was judged by the target, bool [n]."""
        return self.fate != NOT_JUDGED


class DraftReader:
    """Reads the drafts of a growing run, each once."""

    def __init__(self, run: RunRef) -> None:
        self._run = run
        self._rounds_read = self._tokens_read = 0

    def read(self) -> JudgedDrafts | None:
        """The drafts verified since the last call; None without any.

        A round's row is written after the rows of its tokens.
        """
        store, run_id = self._run.store, self._run.run_id
        start, stop = self._rounds_read, len(store.rounds)
        stop_tokens = len(store.tokens)  # read after the rounds, so their tokens are complete
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
        keys = paired(of_round("round")[steps], of_round("seq_id")[steps])
        tokens = _Tokens(self._run, self._tokens_read, stop_tokens, keys)
        self._tokens_read = tokens.end
        n_drafted = drafted[steps]
        index = tokens.column("draft_index")
        is_drafted = (index >= 0) & (index < n_drafted[tokens.step])  # others were not verified
        is_drafted &= ~tokens.is_kind("replayed")
        is_told = np.bincount(tokens.step[is_drafted], minlength=len(steps)) == n_drafted
        chosen = is_drafted & is_told[tokens.step]
        fate = np.full(len(index), NOT_JUDGED, np.int8)
        fate[tokens.is_kind("accepted")] = ACCEPTED
        fate[tokens.is_kind("rejected")] = REJECTED
        rejected = np.flatnonzero(chosen & (fate == REJECTED))
        n_accepted = np.clip(of_round("num_accepted_draft_tokens")[steps], 0, n_drafted)
        ended = tokens.step[chosen & (fate == NOT_JUDGED) & tokens.is_kind(*EMITTED_KINDS)]
        n_drafted[ended] = n_accepted[ended]
        return JudgedDrafts(
            drafter=of_round("drafter")[steps],
            n_drafted=n_drafted,
            n_accepted=n_accepted,
            is_told=is_told,
            step=tokens.step[chosen],
            index=index[chosen],
            confidence=tokens.confidence()[chosen],
            fate=fate[chosen],
            rejected_step=tokens.step[rejected],
            rejected_index=index[rejected],
            rank=tokens.ranks(rejected),
        )


class _Tokens:
    """Rows start .. stop of `tokens` that belong to steps with these keys, [n], and the step of
    each."""

    def __init__(self, run: RunRef, start: int, stop: int, keys: np.ndarray) -> None:
        self._table, self._pool = run.store.tokens, run.store.text_pool
        mine = np.flatnonzero(self._table.column("run_id", start, stop) == run.run_id) + start
        of = paired(*(self._table.column(name, 0, stop)[mine] for name in ("round", "seq_id")))
        step = places_of(keys, of)
        self._rows, self._stop = mine[step >= 0], stop
        self.step = step[step >= 0]
        self.end = int(self._rows[-1]) + 1 if len(self._rows) else start
        """One past the last of them."""

    def column(self, name: str) -> np.ndarray:
        values: np.ndarray = self._table.column(name, 0, self._stop)[self._rows]
        return values

    def confidence(self) -> np.ndarray:
        """From the drafter's confidence head if there is one, else its probability."""
        head = self.column("draft_conf")
        return np.where(np.isnan(head), self.column("draft_p"), head)

    def is_kind(self, *kinds: str) -> np.ndarray:
        codes = [self._pool.find(kind) for kind in kinds]
        return np.isin(self.column("kind"), codes)

    def ranks(self, rejected: np.ndarray) -> np.ndarray:
        """Rank of the target's token among the candidates of rejected tokens, int64 [m]."""
        ids, places = self.column("token_id"), paired(self.column("pos"), self.step)
        replacing = np.flatnonzero(self.is_kind("replacement"))
        at = places_of(places[replacing], places[rejected])
        chosen = np.append(ids[replacing], MISSING)[at]  # -1: none
        candidates = self._table.column("draft_top_id", 0, self._stop)[self._rows[rejected]]
        is_there = candidates == chosen[:, None]
        rank = np.where(is_there.any(axis=1), 1 + is_there.argmax(axis=1), BEYOND)
        known = (chosen != MISSING) & (candidates != MISSING).any(axis=1)
        return np.where(known, rank, UNKNOWN)


N_BINS = 10
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sums over bins of equal width on 0 … 1, [n_bins] each; those of two runs can be added.

    n: tokens, int64. accepted: how many the target accepted, int64. confidence: the sum of their
    confidences, float64.
    """

    n: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray

    @classmethod
    def of(cls, confidence: np.ndarray, accepted: np.ndarray, n_bins: int = N_BINS) -> Calibration:
        """Of judged tokens: confidence float [n], accepted bool [n]. Tokens without a confidence
        (NaN) are left out."""
        known = np.isfinite(confidence)
        p, accepted = np.clip(confidence[known], 0.0, 1.0), accepted[known]
        bins = np.minimum((p * n_bins).astype(np.int64), n_bins - 1)
        return cls(
            np.bincount(bins, minlength=n_bins),
            np.bincount(bins[accepted], minlength=n_bins),
            np.bincount(bins, p, n_bins),
        )

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(
            self.n + other.n, self.accepted + other.accepted, self.confidence + other.confidence
        )

    @property
    def n_tokens(self) -> int:
        """Tokens in all bins."""
        return int(self.n.sum())

    @property
    def mean_confidence(self) -> np.ndarray:
        """Mean confidence of each bin, NaN where it is empty, float64 [n_bins]."""
        return _over(self.confidence, self.n)

    @property
    def rate(self) -> np.ndarray:
        """Accepted / judged of each bin, NaN where it is empty, float64 [n_bins]."""
        return _over(self.accepted, self.n)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % interval of each rate (Wilson), NaN where a bin is empty."""
        counts = list(zip(self.accepted.tolist(), self.n.tolist(), strict=True))
        low, high = (
            np.array([wilson(k, n, z) if n else np.nan for k, n in counts]) for z in (-_Z, _Z)
        )
        return low, high

    @property
    def ece(self) -> float | None:
        """Expected calibration error: the mean over tokens of |rate - confidence| of their bin.
        None without tokens."""
        if not self.n_tokens:
            return None
        return float(np.abs(self.accepted - self.confidence).sum()) / self.n_tokens

    @property
    def excess(self) -> float | None:
        """Mean confidence minus acceptance rate: above 0 the drafter is overconfident."""
        if not self.n_tokens:
            return None
        return float(self.confidence.sum() - self.accepted.sum()) / self.n_tokens


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.full(len(whole), np.nan)
    return np.divide(part, whole, out=result, where=whole > 0)


LEAVES = (2, 4, 8)
ASSUMPTIONS = (
    "the chain and single alternatives to its tokens, at the same positions in every step",
    "the positions that would have helped most in this run",
    "nothing is drafted after such an alternative",
    f"only the first {N_TOP} candidates are recorded; others count as misses",
    "every branch of a recurrent layer needs its own state, whose cost is not included here",
)


@dataclass(frozen=True, slots=True)
class TreeGain:
    """A tree of n_leaves. tokens_per_step: with the tree. places: (index in the draft, rank) of the
    added candidates; fewer if no others would have helped."""

    n_leaves: int
    tokens_per_step: float
    places: tuple[tuple[int, int], ...]

    @property
    def n_more(self) -> int:
        """Tokens verified per step in addition to the chain."""
        return len(self.places)


def tree_gains(ranks: np.ndarray, n_steps: int, n_accepted: int) -> list[TreeGain]:
    """Estimates for trees of LEAVES leaves.

    ranks[i, r - 1]: steps rejected at index i in which the target chose the candidate of rank r,
    int64 [K, N_TOP]; n_steps: steps that could be counted so, accepted or not; n_accepted: tokens
    accepted in them. No steps, no estimates.
    """
    if not n_steps:
        return []
    chain = 1 + n_accepted / n_steps
    order = np.argsort(-ranks, axis=None, kind="stable")
    order = order[ranks.flat[order] > 0]
    found = []
    for n in LEAVES:
        best = order[: n - 1]
        index, rank = np.unravel_index(best, ranks.shape)
        places = tuple(zip(index.tolist(), (rank + 1).tolist(), strict=True))
        found.append(TreeGain(n, chain + int(ranks.flat[best].sum()) / n_steps, places))
    return found


def width_cost(
    widths: np.ndarray, ms: np.ndarray, n: np.ndarray, width: float, n_more: int
) -> tuple[float, bool] | None:
    """Ratio of the cost of a pass over width + n_more tokens to one over width, and whether passes
    that wide, or some on both sides, were recorded; if not, it is extrapolated.

    widths, ascending, ms and n, [k] each: the mean time of n passes. Between widths interpolation
    is linear; beyond the last one the slope is a least-squares fit; never less than the narrower
    pass. None if there are fewer than two widths where two are needed, or the narrower pass was not
    measured.
    """
    if not len(widths) or not widths[0] <= width <= widths[-1]:
        return None
    wider = width + n_more
    now, then = np.interp([width, wider], widths, ms).tolist()
    is_measured = bool(wider <= widths[-1])
    if not is_measured:
        off = widths - np.average(widths, weights=n)
        if len(widths) < 2:
            return None
        slope = float((n * off * ms).sum() / (n * off * off).sum())
        then = max(then, now) + max(slope, 0.0) * float(wider - widths[-1])
    return (then / now, is_measured) if now > 0 else None


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Sums over the drafts of one or several drafters; can be added.

    counts[d, a]: steps that drafted d and accepted a tokens, int64 [K + 1, K + 1]. ranks[i, r]:
    rejections at index i by rank r of the target's token among the candidates, 0 if it is not among
    them, int64 [K, N_TOP + 1]. n_ranked, n_ranked_accepted: steps with recorded candidates,
    rejected or not, and the tokens accepted in them. n_untold: steps whose tokens are not all in
    the trace.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros((1, 1), np.int64))
    calibration: Calibration = field(
        default_factory=lambda: Calibration.of(np.zeros(0), np.zeros(0, bool))
    )
    ranks: np.ndarray = field(default_factory=lambda: np.zeros((0, N_TOP + 1), np.int64))
    n_ranked: int = 0
    n_ranked_accepted: int = 0
    n_untold: int = 0

    @classmethod
    def of(cls, drafts: JudgedDrafts, steps: np.ndarray) -> DraftQuality:
        """Figures of the chosen steps, bool [s]."""
        mine = steps[drafts.step] & drafts.is_judged
        rejected = steps[drafts.rejected_step]
        rank, index = drafts.rank[rejected], drafts.rejected_index[rejected]
        known = rank != UNKNOWN
        ranks = np.zeros((int(index.max(initial=-1)) + 1, N_TOP + 1), np.int64)
        np.add.at(ranks, (index[known], rank[known]), 1)
        has_candidates = np.zeros(len(steps), bool)
        has_candidates[drafts.step[steps[drafts.step] & np.isfinite(drafts.confidence)]] = True
        has_candidates[drafts.rejected_step[rejected][~known]] = False
        return cls(
            joint_counts(drafts.n_drafted[steps], drafts.n_accepted[steps]),
            Calibration.of(drafts.confidence[mine], drafts.fate[mine] == ACCEPTED),
            ranks,
            int(has_candidates.sum()),
            int(drafts.n_accepted[has_candidates].sum()),
            int((steps & ~drafts.is_told).sum()),
        )

    def __add__(self, other: DraftQuality) -> DraftQuality:
        return DraftQuality(
            _sum(self.counts, other.counts),
            self.calibration + other.calibration,
            _sum(self.ranks, other.ranks),
            self.n_ranked + other.n_ranked,
            self.n_ranked_accepted + other.n_ranked_accepted,
            self.n_untold + other.n_untold,
        )

    @property
    def n_steps(self) -> int:
        """Drafts verified."""
        return int(self.counts.sum())

    @property
    def tokens_per_step(self) -> float | None:
        """1 + accepted tokens per draft; None without drafts."""
        if not self.n_steps:
            return None
        return 1 + float(np.arange(len(self.counts)) @ self.counts.sum(0)) / self.n_steps

    @property
    def survival(self) -> Survival:
        """How many drafts survive to each index."""
        drafted, accepted = np.nonzero(self.counts)
        return Survival.of(drafted, accepted, self.counts[drafted, accepted])

    @property
    def n_rejections(self) -> int:
        """Rejections whose target's token and candidates are known."""
        return int(self.ranks.sum())

    @property
    def by_rank(self) -> np.ndarray:
        """Rejections by rank of the target's token, from 1; the last entry: not among the
        candidates. int64 [N_TOP + 1]."""
        total = self.ranks.sum(0)
        return np.append(np.delete(total, BEYOND), total[BEYOND])

    @property
    def tree_gains(self) -> list[TreeGain]:
        """What trees would have gained; empty without recorded candidates."""
        return tree_gains(self.ranks[:, 1:], self.n_ranked, self.n_ranked_accepted)


def by_drafter(drafts: JudgedDrafts) -> dict[int, DraftQuality]:
    """Figures of each drafter, by its code in the store's texts."""
    return {
        int(code): DraftQuality.of(drafts, drafts.drafter == code)
        for code in np.unique(drafts.drafter)
    }


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of two tables aligned at their first entries."""
    shape = tuple(max(sizes) for sizes in zip(one.shape, other.shape, strict=True))
    total = np.zeros(shape, np.int64)
    for part in (one, other):
        total[tuple(slice(0, n) for n in part.shape)] += part
    return total
