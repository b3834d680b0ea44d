"""Checks of tune by real runs: of its recommendation (a grid) and of its simulator.

A grid: every setting is run once, the faster half of them a second time, and the fastest of those,
the recommended one and plain decoding in pairs: the fastest of a hundred noisy times is mostly a
lucky one, and only the pairs are compared.

The simulator: a recording is made, knowing nothing of the runs, and every setting is run after it,
twice, and the second run counts, as in `confirm`; all that several times over, the order changing,
and medians count. So a machine that is faster at one time than at another is not taken for an error
of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from engine.analysis.what_if.surface import Outcomes
from engine.experiments.bench.request import PLAIN, Configuration, TimedRun, timed_run
from engine.experiments.tune.advice import outcome
from engine.experiments.tune.confirm import Confirmed, SpeedComparison, compare, confirm
from engine.experiments.tune.lengths import DraftSetting, drafting, has_floor, has_length
from engine.experiments.tune.record import LONGEST, record
from engine.options import Prompt, RunOptions

if TYPE_CHECKING:
    from engine.session import Session

GRID_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
GRID_FLOORS = (0.0, 0.3, 0.6)
_FINALISTS = 5


@dataclass(frozen=True, slots=True)
class GridCheck:
    """settings: of the whole grid, by name. grid: one run or two of each, plain decoding first.
    finalists: of the fastest and the recommended one, in pairs, plain decoding first. chosen: the
    name of what was recommended."""

    settings: dict[str, DraftSetting]
    grid: Sequence[Confirmed]
    finalists: Sequence[Confirmed]
    chosen: str

    @property
    def recommended(self) -> Confirmed:
        """What was recommended, among the finalists."""
        return next(one for one in self.finalists if one.name == self.chosen)

    @property
    def fastest(self) -> Confirmed:
        """The fastest of the finalists; of equal ones the recommended."""
        return max(self.finalists, key=lambda one: (one.median, one.name == self.chosen))

    @property
    def share(self) -> float:
        """Speed of the recommended one over that of the fastest."""
        return self.recommended.median / self.fastest.median

    @property
    def against_fastest(self) -> SpeedComparison | None:
        """The recommended one against the fastest, pair by pair; None where they are the same."""
        if self.fastest is self.recommended:
            return None
        return compare(self.recommended, self.fastest)


def grid_settings(drafters: Sequence[str], rates: Sequence[float] = ()) -> list[DraftSetting]:
    """Every length and floor of every drafter. rates: of synthetic acceptance, which no floor
    knows; as many as the longest draft has tokens."""
    longest = len(rates) or LONGEST
    return [
        DraftSetting(drafter, n, p)
        for drafter in filter(has_length, drafters)
        for n in GRID_LENGTHS
        for p in (GRID_FLOORS if has_floor(drafter) and not rates else GRID_FLOORS[:1])
        if n <= longest
    ]


def check_grid(
    session: Session,
    prompts: Sequence[Prompt],
    base: RunOptions,
    drafters: Sequence[str],
    chosen: DraftSetting | None,
    *,
    pairs: int,
    rates: Sequence[float] = (),
    report: Callable[[str], None] = lambda what: None,
) -> GridCheck:
    """Run the grid, then its fastest and the recommended setting. base: options but for
    speculation. chosen: None for plain decoding. Raises what Session.start raises."""
    settings = {one.name: one for one in grid_settings(drafters, rates)}
    if chosen is not None:
        settings.setdefault(chosen.name, chosen)

    def configurations(names: Sequence[str]) -> list[Configuration]:
        drafted = (Configuration(n, drafting(base, settings[n], rates=rates)) for n in names)
        return [Configuration.plain(base), *drafted]

    report(f"a grid of {len(settings)} settings, a real run of each")
    grid = confirm(session, prompts, configurations(list(settings)), 1)
    half = [one.name for one in _fastest_first(grid[1:])[: (len(grid) + 1) // 2]]
    report(f"the faster {len(half)} once more")
    grid = _joined(grid, confirm(session, prompts, configurations(half), 1))
    drafted = _fastest_first([one for one in grid[1:] if one.name in half])
    names = [one.name for one in drafted[:_FINALISTS]]
    if chosen is not None and chosen.name not in names:
        names.append(chosen.name)
    report(f"the fastest {len(names)}, {pairs} real runs each")
    finalists = confirm(session, prompts, configurations(names), pairs)
    return GridCheck(settings, grid, finalists, chosen.name if chosen else PLAIN)


def _fastest_first(measured: Sequence[Confirmed]) -> list[Confirmed]:
    """By the better of their runs."""
    return sorted(measured, key=lambda one: -max(one.speeds))


def _joined(first: Sequence[Confirmed], again: Sequence[Confirmed]) -> list[Confirmed]:
    """The first runs with those of the ones that were run again."""
    more = {one.name: one for one in again}
    return [
        replace(
            one,
            speeds=(*one.speeds, *more[one.name].speeds),
            runs=(*one.runs, *more[one.name].runs),
        )
        if one.name in more
        else one
        for one in first
    ]


LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
FLOORS = ((3, 0.3), (3, 0.6), (6, 0.3), (6, 0.6))
"""n_max and p_min of the settings that are compared: eight lengths without a floor, four with."""
MORE_LENGTHS = (7, 9, 10, 16)
"""Instead of them where acceptance is synthetic, which no confidence tells."""


@dataclass(frozen=True, slots=True)
class SettingError:
    """One setting. real, simulated: tokens per second, of each recording and the run after it;
    *_per_round: tokens per round."""

    setting: DraftSetting
    real: tuple[float, ...]
    simulated: tuple[float, ...]
    real_per_round: float
    simulated_per_round: float

    @property
    def error(self) -> float:
        """Simulated over real speed, less 1: the median."""
        return median(s / r for s, r in zip(self.simulated, self.real, strict=True)) - 1

    @property
    def error_per_round(self) -> float:
        """The same of tokens per round."""
        return self.simulated_per_round / self.real_per_round - 1


def simulator_error(
    session: Session,
    texts: Sequence[Prompt],
    base: RunOptions,
    drafter: str,
    *,
    repeats: int = 3,
    rates: Sequence[float] = (),
    report: Callable[[str], None] = lambda what: None,
) -> list[SettingError]:
    """Simulate and run settings of one drafter. base: options but for speculation. rates: of
    synthetic acceptance, 16 of them. Raises what Session.start raises."""
    settings = [DraftSetting(drafter, n) for n in LENGTHS]
    floors = FLOORS if not rates else [(n, 0.0) for n in MORE_LENGTHS]
    settings += [DraftSetting(drafter, n, p) for n, p in floors]
    ran: dict[DraftSetting, list[TimedRun]] = {one: [] for one in settings}
    played: dict[DraftSetting, list[Outcomes]] = {one: [] for one in settings}
    for number in range(repeats):
        (recorded,) = record(session, texts, base, [drafter], rates=rates, report=report)
        report(f"{drafter}: real runs, {number + 1} of {repeats}")
        first = number * len(settings) // repeats
        for one in [*settings[first:], *settings[:first]]:
            options = drafting(base, one, rates=rates)
            timed_run(session, texts, options)
            ran[one].append(timed_run(session, texts, options))
            played[one].append(outcome(recorded, one))
    return [
        SettingError(
            one,
            tuple(run.speed for run in ran[one]),
            tuple(float(found.tokens_per_second()[0]) for found in played[one]),
            sum(run.n_timed for run in ran[one]) / sum(run.num_rounds for run in ran[one]),
            float(played[one][0].tokens_per_round()[0]),
        )
        for one in settings
    ]
