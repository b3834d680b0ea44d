"""Adaptive depth: rules that choose n_max of each draft from past acceptance.

A rule runs many walkers at once, each with its own state: the sequences of a run, or the settings
and texts of a simulation. Rounds without a draft do not change the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Setting = Mapping[str, float]
"""Values of a rule's settings by name; n_max is the longest draft."""


class AdaptiveDepth:
    """Adaptive depth for walkers, given as int64 [n] indices."""

    def n_max(self, walkers: np.ndarray) -> np.ndarray:
        """Longest next draft of each, int64 [n]."""
        raise NotImplementedError

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Update walkers after a round: tokens verified and accepted, int64 [n]."""
        has = drafted > 0
        self._learn(walkers[has], drafted[has], accepted[has])

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Update the walkers whose round had a draft."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AdaptRule:
    """A rule. about: what it does. source: its author and where it is described. settings: those to
    try for a given longest draft; the first is the default. make: makes an AdaptiveDepth from
    settings and the setting of each walker, int64 [walkers]; in engine.analysis.what_if.rules a
    Chooser. runs_here: whether this engine can run it."""

    name: str
    about: str
    source: str
    settings: Callable[[int], list[Setting]]
    make: Callable[[Any, Any], Any]
    runs_here: bool = True


def column(settings: Sequence[Setting], name: str, default: float) -> np.ndarray:
    """One value of each setting, float [settings]."""
    return np.array([setting.get(name, default) for setting in settings], float)


class _Stepped(AdaptiveDepth):
    """Changes by one at a time, between 1 and n_max."""

    def __init__(self, settings: Sequence[Setting], of: np.ndarray) -> None:
        self._most = column(settings, "n_max", 8).astype(np.int64)[of]
        start = column(settings, "start", 1).astype(np.int64)[of]
        self._n = np.clip(start, 1, self._most)

    def n_max(self, walkers: np.ndarray) -> np.ndarray:
        return self._n[walkers]

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        more = (accepted >= drafted) & (drafted >= self._n[walkers])
        less = (accepted < drafted // 2) | (accepted == 0)
        n = self._n[walkers] + more.astype(np.int64) - less
        self._n[walkers] = np.clip(n, 1, self._most[walkers])


class _InARow(_Stepped):
    """One more after `threshold` drafts in a row with at most `bias` rejected tokens, one less
    after as many with more."""

    def __init__(self, settings: Sequence[Setting], of: np.ndarray) -> None:
        super().__init__(settings, of)
        self._threshold = column(settings, "threshold", 11)[of]
        self._bias = column(settings, "bias", 0)[of]
        self._streak = np.zeros(len(of), np.int64)

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        won = accepted >= drafted - self._bias[walkers]
        streak = self._streak[walkers]
        streak = np.where(won, np.maximum(streak, 0) + 1, np.minimum(streak, 0) - 1)
        turn = np.abs(streak) >= self._threshold[walkers]
        change = np.where(turn, np.sign(streak), 0)
        self._n[walkers] = np.clip(self._n[walkers] + change, 1, self._most[walkers])
        self._streak[walkers] = np.where(turn, 0, streak)


class _ProbedMean(AdaptiveDepth):
    """The rounded mean of accepted tokens. A fully accepted draft only proves a lower bound, so it
    adds a probe; others enter an exponential mean."""

    def __init__(self, settings: Sequence[Setting], of: np.ndarray) -> None:
        self._most = column(settings, "n_max", 8)[of]
        self._alpha = column(settings, "alpha", 0.25)[of]
        self._probe = column(settings, "probe", 1.0)[of]
        self._mean = column(settings, "start", 2.0)[of]

    def n_max(self, walkers: np.ndarray) -> np.ndarray:
        wanted = np.floor(self._mean[walkers] + 0.5)
        return np.clip(wanted, 1, self._most[walkers]).astype(np.int64)

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        mean, full = self._mean[walkers], accepted >= drafted
        probed = np.maximum(mean, drafted) + self._probe[walkers]
        mean = np.where(full, probed, mean + self._alpha[walkers] * (accepted - mean))
        self._mean[walkers] = np.minimum(mean, self._most[walkers])


_TIERS = np.array([1, 3, 7])
_START_TIER = 1


class _TieredMean(AdaptiveDepth):
    """Tiers of n_max by the exponential mean of accepted lengths, one step beyond it."""

    def __init__(self, settings: Sequence[Setting], of: np.ndarray) -> None:
        self._alpha = column(settings, "alpha", 0.2)[of]
        self._warm_up = column(settings, "warm_up", 10)[of]
        self._interval = column(settings, "interval", 5).astype(np.int64)[of]
        self._down = column(settings, "down", -0.25)[of]
        self._up = column(settings, "up", 0.0)[of]
        self._most = column(settings, "n_max", 7)[of]
        self._tier = np.full(len(of), _START_TIER)
        self._mean = np.full(len(of), np.nan)
        self._seen = np.zeros(len(of), np.int64)

    def n_max(self, walkers: np.ndarray) -> np.ndarray:
        return np.minimum(_TIERS[self._tier[walkers]], self._most[walkers]).astype(np.int64)

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        mean, alpha = self._mean[walkers], self._alpha[walkers]
        mean = np.where(np.isnan(mean), accepted, mean + alpha * (accepted - mean))
        self._mean[walkers] = mean
        self._seen[walkers] += 1
        seen = self._seen[walkers]
        due = (seen > self._warm_up[walkers]) & (seen % self._interval[walkers] == 0)
        walkers, mean = walkers[due], mean[due]
        tier = self._tier[walkers]
        below = _TIERS[np.maximum(tier - 1, 0)]
        up = mean > _TIERS[tier] - 0.5 + self._up[walkers]
        down = mean <= below - 0.5 + self._down[walkers]
        self._tier[walkers] = np.clip(tier + up - (down & ~up), 0, len(_TIERS) - 1)


class _Goodput(AdaptiveDepth):
    """The length with the most expected tokens per cost, from the mean acceptance at each index of
    the tokens that reached it. draft_cost, overhead: of a drafted token and of a round, in target
    passes. Every tenth draft has full length, so that later indices are sampled too."""

    def __init__(self, settings: Sequence[Setting], of: np.ndarray) -> None:
        self._most = column(settings, "n_max", 8).astype(np.int64)[of]
        self._alpha = column(settings, "alpha", 0.1)[of]
        self._cost = column(settings, "draft_cost", 0.1)[of]
        self._overhead = column(settings, "overhead", 0.1)[of]
        k = max(1, int(self._most.max(initial=1)))
        self._rates = np.full((len(of), k), 0.5)
        self._n = self._most.copy()
        self._seen = np.zeros(len(of), np.int64)

    def n_max(self, walkers: np.ndarray) -> np.ndarray:
        explores = self._seen[walkers] % 10 == 9
        return np.where(explores, self._most[walkers], self._n[walkers])

    def _learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        rates, index = self._rates[walkers], np.arange(self._rates.shape[1])
        judged = index < np.minimum(drafted, accepted + 1)[:, None]
        right = index < accepted[:, None]
        moved = rates + self._alpha[walkers][:, None] * (right - rates)
        self._rates[walkers] = rates = np.where(judged, moved, rates)
        self._seen[walkers] += 1
        expected = 1 + np.cumsum(np.cumprod(rates, 1), 1)
        k = 1 + index
        cost = 1 + self._overhead[walkers][:, None] + k * self._cost[walkers][:, None]
        gain = expected / cost
        gain[k > self._most[walkers][:, None]] = 0.0
        best = 1 + gain.argmax(1)
        held = np.abs(best - self._n[walkers]) <= 1  # a difference of one step is noise
        self._n[walkers] = np.where(held, self._n[walkers], best)


def _longest(n_max: int) -> list[Setting]:
    return [{"n_max": k} for k in sorted({n_max, max(1, n_max // 2)}, reverse=True)]


_RULES = (
    AdaptRule(
        "step",
        "one token more after a fully accepted draft, one less after one of which less than half "
        "was",
        "llama.cpp #27210, by its log lines",
        _longest,
        _Stepped,
    ),
    AdaptRule(
        "streak",
        "one token more after a number of full acceptances in a row, one less after the same "
        "number of others",
        "llama.cpp #25726",
        lambda n_max: [
            {"n_max": n_max, "threshold": threshold, "bias": bias}
            for threshold in (11, 5, 2)
            for bias in (0, 1)
        ],
        _InARow,
    ),
    AdaptRule(
        "probed-mean",
        "the rounded mean of accepted tokens; a full acceptance is only a lower bound and adds a "
        "probe",
        "--spec-draft-adaptive of forks of llama.cpp",
        lambda n_max: [{"n_max": n_max, "alpha": alpha} for alpha in (0.25, 0.1, 0.5)],
        _ProbedMean,
    ),
    AdaptRule(
        "accepted-mean",
        "n_max from 1, 3 and 7 by the exponential mean of accepted lengths, of each text by itself",
        "SGLang --speculative-adaptive, with its defaults",
        lambda n_max: [{"n_max": min(n_max, 7), "alpha": alpha} for alpha in (0.2, 0.1, 0.4)],
        _TieredMean,
    ),
    AdaptRule(
        "goodput",
        "the length with most expected tokens per cost, by acceptance at each index",
        "vLLM #44336",
        lambda n_max: [{"n_max": n_max, "draft_cost": cost} for cost in (0.1, 0.03, 0.3)],
        _Goodput,
    ),
)
ADAPT_RULES: dict[str, AdaptRule] = {rule.name: rule for rule in _RULES}


class AdaptedSequences:
    """A rule in a run: one walker per slot, reset for each sequence."""

    def __init__(self, rule: AdaptRule, n_max: int) -> None:
        self._rule, self._setting = rule, {**rule.settings(n_max)[0], "n_max": n_max}
        self._of: dict[int, AdaptiveDepth] = {}
        self._only = np.zeros(1, np.int64)

    def n_max(self, seq: int) -> int:
        """Longest next draft of a sequence."""
        return int(self._depth(seq).n_max(self._only)[0])

    def learn(self, seq: int, drafted: int, accepted: int) -> None:
        """A draft of a sequence was verified."""
        self._depth(seq).learn(self._only, np.array([drafted]), np.array([accepted]))

    def forget(self, seq: int) -> None:
        """The sequence has ended."""
        self._of.pop(seq, None)

    def carry_on(self, other: AdaptedSequences) -> None:
        """Continue from another instance's state if rule and longest draft are the same."""
        if (self._rule, self._setting) == (other._rule, other._setting):
            self._of = other._of

    def _depth(self, seq: int) -> AdaptiveDepth:
        if seq not in self._of:
            self._of[seq] = self._rule.make([self._setting], self._only)
        return self._of[seq]


def adapted(rule: str, n_max: int) -> AdaptedSequences | None:
    """The rule that chooses the draft lengths of a run. rule: its name, "" for a fixed length
    (None)."""
    found = ADAPT_RULES.get(rule)
    return AdaptedSequences(found, n_max) if found else None
