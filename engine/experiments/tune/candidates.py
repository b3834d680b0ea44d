"""Every drafter under every rule, simulated; the settings worth a real run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.analysis.what_if.rules import FIXED, RULES, RuleSpec, Setting
from engine.analysis.what_if.simulation import Outcomes, simulate
from engine.experiments.tune.lengths import DraftSetting, has_floor
from engine.experiments.tune.record import TuneRecording

_AS_GOOD = 0.005
"""A simpler setting that loses no more than this share of the speed is preferred."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A drafter under a rule. setting: of the rule. acceptance: NaN where nothing is drafted.
    runs_here: whether this engine has the rule."""

    drafter: str
    rule: str
    setting: Setting
    tokens_per_second: float
    acceptance: float
    runs_here: bool

    @property
    def draft(self) -> DraftSetting:
        """As a user would set it, under the fixed rule."""
        return DraftSetting(
            self.drafter, int(self.setting["n_max"]), float(self.setting.get("p_min", 0.0))
        )


def estimates(recordings: Sequence[TuneRecording]) -> list[Estimate]:
    """Every setting of every rule for every drafter that drafted anything and was timed."""
    found: list[Estimate] = []
    for one in recordings:
        if one.costs is None or not one.rounds.n_drafts:
            continue
        for rule in RULES.values():
            found += _of_rule(one, rule)
    return found


def _of_rule(one: TuneRecording, rule: RuleSpec) -> Iterable[Estimate]:
    settings = rule.settings(one.rounds.n_max)
    # what chance accepts, no confidence tells
    has_floors = has_floor(one.drafter) and not one.rounds.is_independent
    if not (has_floors and one.rounds.has_confidence):
        settings = [setting for setting in settings if not setting.get("p_min")]
    played = simulate(one.rounds, one.costs, rule, settings)
    speeds, rates = played.tokens_per_second(), played.acceptance()
    for setting, speed, rate in zip(settings, speeds.tolist(), rates.tolist(), strict=True):
        if np.isfinite(speed):
            yield Estimate(one.drafter, rule.name, setting, speed, rate, rule.runs_here)


def best_of_rules(found: Sequence[Estimate]) -> list[Estimate]:
    """The fastest of each drafter and rule, the fastest first."""
    best: dict[tuple[str, str], Estimate] = {}
    for one in found:
        key = one.drafter, one.rule
        if key not in best or one.tokens_per_second > best[key].tokens_per_second:
            best[key] = one
    return sorted(best.values(), key=lambda one: -one.tokens_per_second)


def to_confirm(found: Sequence[Estimate], n: int = 3) -> list[Estimate]:
    """The best settings that this engine can run: of each drafter and length the lowest floor that
    is as good as its best. One of them is of another drafter than the rest where there is one: an
    estimate may favour a drafter as such."""
    best: dict[tuple[str, int], list[Estimate]] = {}
    for one in found:
        if one.runs_here and one.rule == FIXED.name:
            best.setdefault((one.drafter, one.draft.n_max), []).append(one)
    chosen = []
    for same in best.values():
        least = max(one.tokens_per_second for one in same) * (1 - _AS_GOOD)
        good = [one for one in same if one.tokens_per_second >= least]
        chosen.append(min(good, key=lambda one: one.draft.p_min))
    chosen.sort(key=lambda one: -one.tokens_per_second)
    first, rest = chosen[:n], chosen[n:]
    others = [one for one in rest if one.drafter != first[0].drafter]
    if others and len({one.drafter for one in first}) == 1 < n:
        first[-1] = others[0]
    return first


def outcome(recording: TuneRecording, setting: DraftSetting) -> Outcomes:
    """One setting of the fixed rule, played in every text."""
    played = {"n_max": setting.n_max, "p_min": setting.p_min}
    return simulate(recording.rounds, recording.costs, FIXED, [played])
