"""Positions of the recorded texts at which a round could have started under other settings.

Under other settings rounds begin elsewhere. Inside a stretch of accepted tokens, the drafter would
have continued as it did: the rest of the recorded draft is what it would have drafted there. That
is exact for a draft model, which sees the same tokens, and for a run in which nothing was verified
(--spec-verify-max 0), which drafts at every place; else it is the first of `ASSUMPTIONS`.

The probability that drafted tokens are right is counted by place and by confidence. Drafts with a
partly known fate (accepted as far as they went) count at each place they reached, as in the
product-limit estimate of Kaplan and Meier (1958).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.analysis.acceptance.counts import Survival
from engine.analysis.draft_quality import N_BINS, Calibration
from engine.analysis.what_if.recorded import RecordedRounds

_SEED = 1


def survival_of(rounds: RecordedRounds) -> Survival:
    """Survival of a run's drafts, as far as their fate is known."""
    known = np.where(rounds.drafted > 0, rounds.accepted + rounds.is_final, 0)
    return Survival.of(known, rounds.accepted, size=rounds.n_max)


def _draw_more(rates: np.ndarray, reached: np.ndarray, wanted: int) -> np.ndarray:
    """How many more tokens would have been right, drawn with fixed random numbers: int64 of the
    shape of `reached`, the draft place of the first one; at most `wanted`. rates: by place, given
    correct predecessors."""
    if not len(rates) or not wanted:
        return np.zeros(reached.shape, np.int64)
    random = np.random.default_rng(_SEED).random((*reached.shape, wanted))
    place = np.minimum(reached[..., None] + np.arange(wanted), len(rates) - 1)
    right = random < rates[place]
    found: np.ndarray = np.where(right.all(-1), wanted, np.argmin(right, -1))
    return found


Scale = Callable[[np.ndarray], np.ndarray]
"""Maps confidences to probabilities of being right, same shape; NaN stays."""


def confidence_scale(rounds: RecordedRounds) -> Scale:
    """Calibration of the drafter's confidence: in each tenth the share of judged tokens (accepted
    and first wrong ones) that was right; the middle of the tenth where none was judged."""
    place = np.arange(rounds.confidence.shape[1])
    right = place < rounds.accepted[:, None]
    wrong = (place == rounds.accepted[:, None]) & rounds.is_final[:, None]
    judged = (right | wrong) & np.isfinite(rounds.confidence)
    found = Calibration.of(rounds.confidence[judged], right[judged], N_BINS)
    edges = np.linspace(0.0, 1.0, N_BINS + 1)
    rates = np.where(found.n > 0, found.rate, (edges[:-1] + edges[1:]) / 2)

    def scaled(confidence: np.ndarray) -> np.ndarray:
        known = np.isfinite(confidence)
        tenth = np.clip((np.where(known, confidence, 0.0) * N_BINS).astype(np.int64), 0, N_BINS - 1)
        return np.where(known, rates[tenth], np.nan)

    return scaled


_ENDLESS = 1 << 20
_LONGEST = 1024
"""Most tokens of a round."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Places of all texts, one text after the other, [n] each.

    available: tokens that the drafter offers. right: how many of their leading ones are right.
    limit: what the token limit leaves of a draft. confidence: float [n, k], NaN if unknown. begins,
    ends: index of each text's first place, and one past its last: [n texts]. is_begin: whether a
    recorded round begins there, bool [n]. is_independent: a text repeats the recorded rounds, one
    place per token; the next round is at the next place whatever was accepted, and a text ends with
    as many tokens as it has places. ends_at_limit: bool [n texts].
    """

    available: np.ndarray
    right: np.ndarray
    limit: np.ndarray
    confidence: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    is_begin: np.ndarray
    is_independent: bool
    ends_at_limit: np.ndarray

    def __len__(self) -> int:
        return len(self.available)

    @classmethod
    def of(cls, rounds: RecordedRounds, n_max: int) -> Positions:
        """The places where rounds with drafts of up to n_max tokens may begin."""
        rates = survival_of(rounds).conditional
        if rounds.is_independent:
            source, texts, nth = _again(rounds)
            offset = np.zeros(len(source), np.int64)
            limit = np.full(len(source), _ENDLESS)
        else:
            # an untrusted trace may contain any number
            span = np.clip(rounds.emitted, 0, _LONGEST)
            source = np.repeat(np.arange(len(rounds)), span)
            offset = np.arange(len(source)) - np.repeat(np.cumsum(span) - span, span)
            texts = rounds.seq[source]
            length = np.bincount(texts, minlength=len(rounds.ends_at_limit))
            left = length[texts] - (rounds.start[source] + offset)
            limit = np.where(rounds.ends_at_limit[texts], np.maximum(left - 1, 0), _ENDLESS)
        rest = np.maximum(rounds.drafted[source] - offset, 0)
        right = np.clip(rounds.accepted[source] - offset, 0, rest)
        is_final = rounds.is_final[source]
        if rounds.is_independent and rounds.chance is not None:
            right, is_final = rounds.chance[nth], np.ones(len(source), bool)
        goes_on = (rounds.was_full | _cut_by_limit(rounds))[source]
        available = np.where(goes_on, np.maximum(rest, n_max), rest)
        is_open = ~is_final & (right < available)
        more = _draw_more(rates, (offset + right)[is_open], n_max)
        right[is_open] = np.minimum(right[is_open] + more, available[is_open])
        k = rounds.confidence.shape[1]
        place = offset[:, None] + np.arange(k)
        inside = place < k
        confidence = (
            rounds.confidence[source[:, None], np.where(inside, place, 0)]
            if k
            else (np.full((len(source), 0), np.nan))
        )
        confidence = np.where(inside, confidence, np.nan)
        counts = np.bincount(texts, minlength=len(rounds.ends_at_limit))
        ends = np.cumsum(counts)
        return cls(
            available=available,
            right=right,
            limit=limit,
            confidence=confidence,
            begins=ends - counts,
            ends=ends,
            is_begin=offset == 0,
            is_independent=rounds.is_independent,
            ends_at_limit=rounds.ends_at_limit,
        )


def _cut_by_limit(rounds: RecordedRounds) -> np.ndarray:
    """Rounds whose draft may be short because their text was about to end, and that are also played
    elsewhere in it: bool [n]."""
    if not rounds.is_independent:
        return np.zeros(len(rounds), bool)
    is_last = np.append(rounds.seq[1:] != rounds.seq[:-1], True)[: len(rounds)]
    found: np.ndarray = is_last & rounds.ends_at_limit[rounds.seq]
    return found


def _again(rounds: RecordedRounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rounds of each text, repeated to as many as it has tokens: round, text, and number of the
    round in the text, int64 [tokens] each. With shorter drafts a text takes more rounds than were
    recorded."""
    n_texts = len(rounds.ends_at_limit)
    n_rounds = np.bincount(rounds.seq, minlength=n_texts)
    n_tokens = np.bincount(rounds.seq, np.maximum(rounds.emitted, 0), n_texts).astype(np.int64)
    texts = np.repeat(np.arange(n_texts), n_tokens)
    first = np.cumsum(n_tokens) - n_tokens
    nth = np.arange(len(texts)) - first[texts]
    source = (np.cumsum(n_rounds) - n_rounds)[texts] + nth % np.maximum(n_rounds, 1)[texts]
    return source, texts, nth
