"""How far the simulator is from real runs: the same settings simulated from a recording and run.

A recording is made, knowing nothing of the runs, and every setting is run behind it, twice, and the
second run counts, as in `confirm`; all that several times over, the order changing, and medians
count. So a machine that is faster at one time than at another is not taken for an error of the
simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from engine.analysis.what_if.simulation import Outcomes
from engine.experiments.tune.candidates import outcome
from engine.experiments.tune.confirm import TimedRun, timed_run
from engine.experiments.tune.lengths import DraftSetting, drafting
from engine.experiments.tune.record import record
from engine.options import Prompt, RunOptions

if TYPE_CHECKING:
    from engine.session import Session

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
FLOORS = ((3, 0.3), (3, 0.6), (6, 0.3), (6, 0.6))
"""n_max and p_min of the settings that are compared: eight lengths without a floor, four with."""
MORE_LENGTHS = (7, 9, 10, 16)
"""Instead of them where acceptance is synthetic, which no confidence tells."""


@dataclass(frozen=True, slots=True)
class SettingError:
    """One setting. real, simulated: tokens per second, of each recording and the run behind it;
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
            sum(run.n_tokens for run in ran[one]) / sum(run.n_rounds for run in ran[one]),
            float(played[one][0].tokens_per_round()[0]),
        )
        for one in settings
    ]
