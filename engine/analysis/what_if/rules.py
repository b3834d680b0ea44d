"""Rules by which engines choose how much to draft and to verify, round by round.

A new one is its chooser and an entry in RULES. Choosers work on many settings and texts at once: a
walker is one setting in one text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.analysis.what_if.acceptance_probability import ConfidenceScale, SurvivalRates
from engine.analysis.what_if.costs import RoundCosts
from engine.analysis.what_if.lengths import DraftLengths, cut_lengths, floors_at
from engine.analysis.what_if.positions import Positions

Setting = Mapping[str, float]
"""Values of a rule's settings by name."""

NO_DRAFTER = -1
"""Steps of a drafter that is not asked."""


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What a rule may go by. settings: int64 [walkers], the index of each walker's setting."""

    positions: Positions
    costs: RoundCosts
    rates: SurvivalRates
    scale: ConfidenceScale
    settings: np.ndarray


class Chooser(Protocol):
    """Chooses for walkers, [n] indices, that stand at places, [n] indices of Positions."""

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """What is verified, and what the drafter does; NO_DRAFTER steps for a plain round."""

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """The round that was chosen is over: tokens verified and accepted, [n] each."""


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A rule. about: what it does. source: whose it is, and where it is described. runs_here:
    whether this engine can run it. settings: those to try for a longest draft. make: a chooser."""

    name: str
    about: str
    source: str
    runs_here: bool
    settings: Callable[[int], list[Setting]]
    make: Callable[[RuleInputs, Sequence[Setting]], Chooser]


def _column(settings: Sequence[Setting], name: str, default: float) -> np.ndarray:
    return np.array([setting.get(name, default) for setting in settings])


class FixedLengths:
    """n_max, p_min, n_min, the same in every round; n_max 0 is plain decoding."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        self._positions, self._of = inputs.positions, inputs.settings
        floors, self._floor = np.unique(_column(settings, "p_min", 0.0), return_inverse=True)
        self._below = floors_at(inputs.positions.confidence, floors)
        # tokens that were not recorded have no confidence and pass every floor
        self._below[self._below == inputs.positions.confidence.shape[1]] = 1 << 20
        self._n_max = _column(settings, "n_max", 0).astype(np.int64)
        self._n_min = _column(settings, "n_min", 0).astype(np.int64)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """See Chooser."""
        return self.lengths(walkers, at, self._n_max[self._of[walkers]])

    def lengths(self, walkers: np.ndarray, at: np.ndarray, n_max: np.ndarray) -> DraftLengths:
        """The same for a longest draft of the caller's choice, [n]."""
        setting, places = self._of[walkers], self._positions
        found = cut_lengths(
            places.available[at],
            self._below[self._floor[setting], at],
            places.limit[at],
            n_max,
            self._n_min[setting],
        )
        return DraftLengths(found.verified, np.where(n_max > 0, found.steps, NO_DRAFTER))

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing to learn."""


_TIERS = np.array([1, 3, 7])
_START_TIER = 1


class MeanLengths:
    """Tiers of n_max by the exponential mean of accepted lengths, one step beyond it."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        self._fixed = FixedLengths(inputs, settings)
        self._of = of = inputs.settings
        self._alpha = _column(settings, "alpha", 0.2)[of]
        self._warm_up = _column(settings, "warm_up", 10)[of]
        self._interval = _column(settings, "interval", 5).astype(np.int64)[of]
        self._down = _column(settings, "down", -0.25)[of]
        self._up = _column(settings, "up", 0.0)[of]
        self._most = _column(settings, "n_max", 7)[of]
        self._tier = np.full(len(of), _START_TIER)
        self._mean = np.full(len(of), np.nan)
        self._seen = np.zeros(len(of), np.int64)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """See Chooser."""
        n_max = np.minimum(_TIERS[self._tier[walkers]], self._most[walkers]).astype(np.int64)
        return self._fixed.lengths(walkers, at, n_max)

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Chooser. Rounds without a draft say nothing."""
        walkers, accepted = walkers[drafted > 0], accepted[drafted > 0]
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


class SurvivingLengths:
    """Drafts n_max tokens and verifies as many as bring most tokens a second by their survival."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        places, self._of = inputs.positions, inputs.settings
        n_max = _column(settings, "n_max", 0).astype(np.int64)
        k = int(n_max.max(initial=0))
        sure = inputs.scale(places.confidence[:, :k])
        sure = np.pad(sure, ((0, 0), (0, k - sure.shape[1])), constant_values=np.nan)
        rates = (
            np.resize(inputs.rates.conditional, k)
            if len(inputs.rates.conditional)
            else (np.zeros(k))
        )
        survival = np.cumprod(np.where(np.isnan(sure), rates, sure), axis=1)
        expected = 1 + np.pad(np.cumsum(survival, axis=1), ((0, 0), (1, 0)))
        width = 1 + np.arange(k + 1)
        costs = inputs.costs
        rest_ms = costs.verify(width) + costs.sample(width) + costs.other
        rest_ms[1:] += costs.save(width)[1:]
        room = np.minimum(places.available, places.limit)
        self._best = np.zeros((len(n_max), len(places)), np.int64)
        self._steps = np.minimum(room, n_max[:, None])
        for row, most in enumerate(n_max):
            steps = self._steps[row]
            gain = expected / (costs.draft(steps)[:, None] + rest_ms)
            gain[np.arange(k + 1) > np.minimum(steps, most)[:, None]] = 0.0
            self._best[row] = gain.argmax(1)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """See Chooser."""
        setting = self._of[walkers]
        return DraftLengths(self._best[setting, at], self._steps[setting, at])

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing to learn."""


class SwitchingOff:
    """Fixed lengths until the acceptance over a window of rounds falls below a threshold; plain
    decoding from there to the end of the text."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        self._fixed = FixedLengths(inputs, settings)
        of = inputs.settings
        self._window = _column(settings, "window", 20).astype(np.int64)[of]
        self._least = _column(settings, "threshold", 0.3)[of]
        size = int(self._window.max(initial=1))
        self._drafted = np.zeros((len(of), size), np.int64)
        self._accepted = np.zeros((len(of), size), np.int64)
        self._seen = np.zeros(len(of), np.int64)
        self._is_off = np.zeros(len(of), bool)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """See Chooser."""
        found, off = self._fixed.choose(walkers, at), self._is_off[walkers]
        return DraftLengths(
            np.where(off, 0, found.verified), np.where(off, NO_DRAFTER, found.steps)
        )

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Chooser. Rounds without a draft do not count."""
        walkers, accepted = walkers[drafted > 0], accepted[drafted > 0]
        drafted = drafted[drafted > 0]
        place = self._seen[walkers] % self._window[walkers]
        self._drafted[walkers, place], self._accepted[walkers, place] = drafted, accepted
        self._seen[walkers] += 1
        full = self._seen[walkers] >= self._window[walkers]
        rate = self._accepted[walkers].sum(1) / np.maximum(self._drafted[walkers].sum(1), 1)
        self._is_off[walkers[full & (rate < self._least[walkers])]] = True


def _lengths_to_try(n_max: int) -> list[int]:
    return sorted({*range(1, min(n_max, 8) + 1), *range(10, n_max + 1, 2), n_max} - {0})


FLOORS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""p_min values that are tried."""


def _fixed_settings(n_max: int) -> list[Setting]:
    return [{"n_max": k, "p_min": p} for k in _lengths_to_try(n_max) for p in FLOORS]


FIXED = RuleSpec(
    "fixed",
    "the same n_max, p_min and n_min in every round",
    "llama.cpp --spec-draft-*",
    True,
    _fixed_settings,
    FixedLengths,
)
_RULES = (
    FIXED,
    RuleSpec(
        "accepted-mean",
        "n_max from 1, 3 and 7 by the exponential mean of accepted lengths, of each text by itself",
        "SGLang --speculative-adaptive, with its defaults",
        False,
        lambda n_max: [{"n_max": min(n_max, 7), "alpha": alpha} for alpha in (0.1, 0.2, 0.4)],
        MeanLengths,
    ),
    RuleSpec(
        "survival",
        "n_max tokens are drafted, and those verified that bring most tokens a second by the "
        "calibrated product of their confidences and the measured cost of a wider pass",
        "vLLM enable_adaptive_verification",
        False,
        lambda n_max: [{"n_max": k} for k in _lengths_to_try(n_max)],
        SurvivingLengths,
    ),
    RuleSpec(
        "switch-off",
        "n_max until the acceptance of a window of rounds is below a threshold, then plain "
        "decoding to the end of the text",
        "TensorRT-LLM acceptance_rate_window_size, acceptance_rate_threshold",
        False,
        lambda n_max: [
            {"n_max": k, "window": 20, "threshold": threshold}
            for k in _lengths_to_try(min(n_max, 8))
            for threshold in (0.2, 0.3, 0.4, 0.5)
        ],
        SwitchingOff,
    ),
)
RULES: dict[str, RuleSpec] = {rule.name: rule for rule in _RULES}
