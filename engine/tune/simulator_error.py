"""How far the simulator is from real runs: the same settings simulated from one recording and run.

The settings are run in turns, the order changing from round to round, so what else the machine
does hits them alike; several rounds of them, and their median counts. The recording comes before
them and knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.bench.request import Configuration
from engine.options import Prompt, RunOptions
from engine.tune.candidates import outcome
from engine.tune.confirm import confirm
from engine.tune.lengths import DraftSetting, drafting
from engine.tune.record import record

if TYPE_CHECKING:
    from engine.session import Session

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
FLOORS = ((3, 0.3), (3, 0.6), (6, 0.3), (6, 0.6))
"""n_max and p_min of the settings that are compared: eight lengths without a floor, four with."""
MORE_LENGTHS = (7, 9, 10, 16)
"""Instead of them where acceptance is synthetic, which no confidence tells."""


@dataclass(frozen=True, slots=True)
class SettingError:
    """One setting. real, simulated: tokens per second; *_per_round: tokens per round."""

    setting: DraftSetting
    real: float
    simulated: float
    real_per_round: float
    simulated_per_round: float

    @property
    def error(self) -> float:
        """Simulated over real speed, less 1."""
        return self.simulated / self.real - 1

    @property
    def error_per_round(self) -> float:
        """The same of tokens per round."""
        return self.simulated_per_round / self.real_per_round - 1


def simulator_error(
    session: Session,
    prompts: Sequence[tuple[str, Prompt]],
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
    texts = [prompt for _, prompt in prompts]
    (recorded,) = record(session, texts, base, [drafter], rates=rates, report=report)
    configurations = [
        Configuration.plain(base),
        *(Configuration(one.name, drafting(base, one, rates=rates)) for one in settings),
    ]
    report("real runs")
    ran = confirm(session, texts, configurations, repeats)
    found = []
    for setting, real in zip(settings, ran[1:], strict=True):
        played = outcome(recorded, setting)
        rounds = sum(run.n_rounds for run in real.runs)
        tokens = sum(run.n_tokens for run in real.runs)
        found.append(
            SettingError(
                setting,
                real.median,
                float(played.tokens_per_second()[0]),
                tokens / rounds,
                float(played.tokens_per_round()[0]),
            )
        )
    return found
