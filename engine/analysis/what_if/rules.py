"""Drafting rules of engines, which choose draft and verify lengths round by round.

A new one is a chooser plus an entry in RULES. Choosers run many settings and texts at once: a
walker is one setting in one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine.analysis.acceptance.counts import Survival
from engine.analysis.what_if.positions import Positions, Scale
from engine.analysis.what_if.recorded import RoundCosts
from engine.draft.adaptive import ADAPT_RULES, AdaptRule
from engine.draft.adaptive import Setting as Setting
from engine.draft.adaptive import column as _column

NO_DRAFTER = -1
"""Steps of a drafter that is not called."""


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Inputs of a rule. settings: int64 [walkers], the index of each walker's setting."""

    positions: Positions
    costs: RoundCosts
    survival: Survival
    scale: Scale
    settings: np.ndarray


DraftLengths = tuple[np.ndarray, np.ndarray]
"""Per draft, int64: tokens to be verified, and drafter steps."""


class Chooser:
    """Chooses lengths for walkers, [n] indices, at places, [n] indices of Positions."""

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        """Tokens to verify and drafter steps; NO_DRAFTER steps for a plain round."""
        raise NotImplementedError

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Update after the round: tokens verified and accepted, [n] each."""


class FixedLengths(Chooser):
    """n_max, p_min, n_min, the same in every round; n_max 0 is plain decoding."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        self._positions, self._of = inputs.positions, inputs.settings
        floors, self._floor = np.unique(_column(settings, "p_min", 0.0), return_inverse=True)
        self._below = floors_at(inputs.positions.confidence, floors)
        # unrecorded tokens have no confidence and pass every floor
        self._below[self._below == inputs.positions.confidence.shape[1]] = 1 << 20
        self._n_max = _column(settings, "n_max", 0).astype(np.int64)
        self._n_min = _column(settings, "n_min", 0).astype(np.int64)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        return self.lengths(walkers, at, self._n_max[self._of[walkers]])

    def lengths(self, walkers: np.ndarray, at: np.ndarray, n_max: np.ndarray) -> DraftLengths:
        """The same for a given longest draft, [n]."""
        setting, places = self._of[walkers], self._positions
        verified, steps = cut_lengths(
            places.available[at],
            self._below[self._floor[setting], at],
            places.limit[at],
            n_max,
            self._n_min[setting],
        )
        return verified, np.where(n_max > 0, steps, NO_DRAFTER)


class AdaptedLengths(Chooser):
    """Fixed lengths with n_max from a rule of engine.draft.adaptive."""

    def __init__(self, rule: AdaptRule, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        self._fixed = FixedLengths(inputs, settings)
        self._depth = rule.make(settings, inputs.settings)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        return self._fixed.lengths(walkers, at, self._depth.n_max(walkers))

    def learn(self, walkers: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        self._depth.learn(walkers, drafted, accepted)


class OracleLengths(Chooser):
    """Optimal lengths in hindsight, the bound for every rule."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        places, costs, self._of = inputs.positions, inputs.costs, inputs.settings
        n_max = _column(settings, "n_max", 0).astype(np.int64)
        k = np.arange(int(n_max.max(initial=0)) + 1)
        round_ms = costs.draft(k) + costs.verify(1 + k) + costs.sample(1 + k) + costs.other
        round_ms[1:] += costs.save(1 + k)[1:]
        round_ms[0] = costs.plain_ms
        if not (np.isfinite(round_ms).all() and (round_ms > 0).all()):
            round_ms = np.ones(len(k))  # without times, minimise rounds
        right = np.minimum(np.minimum(places.right, places.available), places.limit)
        self._best = np.zeros((len(n_max), len(places)), np.int64)
        texts = [slice(*both) for both in zip(places.begins, places.ends, strict=True)]
        plan = _soonest
        if places.is_independent:  # the next round is at the next place whatever was accepted
            plan, texts = _fastest, [slice(None)]
        for row, most in enumerate(n_max.tolist()):
            for text in texts:
                self._best[row, text] = plan(np.minimum(right[text], most), round_ms)

    def choose(self, walkers: np.ndarray, at: np.ndarray) -> DraftLengths:
        n = self._best[self._of[walkers], at]
        return n, np.where(n > 0, n, NO_DRAFTER)


def _soonest(right: np.ndarray, round_ms: np.ndarray) -> np.ndarray:
    """The length at each place of a text that finishes it soonest, from its end backwards. right:
    correct tokens of a draft there; round_ms: by length."""
    n = len(right)
    best, left = np.zeros(n, np.int64), np.zeros(n + 1)
    for at in range(n - 1, -1, -1):
        after = np.minimum(at + 1 + np.arange(right[at] + 1), n)
        ms = round_ms[: right[at] + 1] + left[after]
        best[at], left[at] = ms.argmin(), ms.min()
    return best


def _fastest(right: np.ndarray, round_ms: np.ndarray) -> np.ndarray:
    """The lengths that minimise total time per token: no round spends more on one more token than
    the average (Dinkelbach 1967)."""
    lengths, ms_per_token = np.arange(len(round_ms)), np.inf
    best, now = np.zeros(len(right), np.int64), float(round_ms[0])
    while now < ms_per_token:
        ms_per_token = now
        lost = np.where(lengths <= right[:, None], round_ms - ms_per_token * (1 + lengths), np.inf)
        best = lost.argmin(1)
        now = float(round_ms[best].sum() / (1 + best).sum())
    return best


class SurvivingLengths(Chooser):
    """Drafts n_max tokens and verifies as many as maximise tokens per second by their survival."""

    def __init__(self, inputs: RuleInputs, settings: Sequence[Setting]) -> None:
        places, self._of = inputs.positions, inputs.settings
        n_max = _column(settings, "n_max", 0).astype(np.int64)
        k = int(n_max.max(initial=0))
        sure = inputs.scale(places.confidence[:, :k])
        sure = np.pad(sure, ((0, 0), (0, k - sure.shape[1])), constant_values=np.nan)
        rates = inputs.survival.conditional
        rates = np.resize(rates, k) if len(rates) else np.zeros(k)
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
        setting = self._of[walkers]
        return self._best[setting, at], self._steps[setting, at]


class SwitchingOff(Chooser):
    """Fixed lengths until acceptance over a window of rounds falls below a threshold; plain
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
        (verified, steps), off = self._fixed.choose(walkers, at), self._is_off[walkers]
        return np.where(off, 0, verified), np.where(off, NO_DRAFTER, steps)

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
"""p_min values to try."""


FIXED = AdaptRule(
    "fixed",
    "the same n_max, p_min and n_min in every round",
    "llama.cpp --spec-draft-*",
    lambda n_max: [{"n_max": k, "p_min": p} for k in _lengths_to_try(n_max) for p in FLOORS],
    FixedLengths,
)
_RULES = (
    FIXED,
    *(replace(rule, make=partial(AdaptedLengths, rule)) for rule in ADAPT_RULES.values()),
    AdaptRule(
        "survival",
        "drafts n_max tokens and verifies those that give most tokens per second, by the "
        "calibrated product of their confidences and the measured cost of a wider pass",
        "vLLM enable_adaptive_verification",
        lambda n_max: [{"n_max": k} for k in _lengths_to_try(n_max)],
        SurvivingLengths,
        runs_here=False,
    ),
    AdaptRule(
        "switch-off",
        "n_max until the acceptance in a window of rounds falls below a threshold, then plain "
        "decoding to the end of the text",
        "TensorRT-LLM acceptance_rate_window_size, acceptance_rate_threshold",
        lambda n_max: [
            {"n_max": k, "window": 20, "threshold": threshold}
            for k in _lengths_to_try(min(n_max, 8))
            for threshold in (0.2, 0.3, 0.4, 0.5)
        ],
        SwitchingOff,
        runs_here=False,
    ),
    AdaptRule(
        "oracle",
        "the optimal lengths for each text, known in advance: an upper bound for all rules",
        "computed, no engine's",
        lambda n_max: [{"n_max": n_max}],
        OracleLengths,
        runs_here=False,
    ),
)
RULES: dict[str, AdaptRule] = {rule.name: rule for rule in _RULES}


def floors_at(confidence: np.ndarray, p_min: np.ndarray) -> np.ndarray:
    """Index of the first drafted token below each floor, k if none.

    confidence: float [n, k], NaN without one: such tokens pass. p_min: [m]. Returns int64 [m, n].
    """
    n, k = confidence.shape
    found = np.full((len(p_min), n), k, np.int64)
    for row, floor in enumerate(p_min if k else ()):
        below = confidence < floor
        hit = below.any(1)
        found[row, hit] = below[hit].argmax(1)
    return found


def cut_lengths(
    available: np.ndarray,
    below_floor: np.ndarray,
    limit: np.ndarray,
    n_max: np.ndarray | int,
    n_min: np.ndarray | int = 0,
) -> DraftLengths:
    """Draft lengths under a setting, element by element.

    available: tokens that the drafter offers. below_floor: see floors_at. limit: tokens that
    context and token limit allow. All int64 [n].
    """
    room = np.minimum(np.minimum(available, limit), n_max)
    length = np.minimum(room, below_floor)
    # the token below the floor was drafted too, unless no more were requested
    steps = length + (below_floor < room)
    return np.where(length < n_min, 0, length), steps
