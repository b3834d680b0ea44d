"""From a model, its drafters and prompts to settings: record, simulate, confirm, advise.

   plan = TunePlan(prompts, base, drafters, pairs=6)
   data = tune(session, plan, texts, report)

The result is plain data, as it is written to a file; engine.experiments.tune.report shows it.

`check_grid` checks the recommendation by a grid of real runs. Every setting is run once, the faster
half a second time; then the fastest, the recommended one and plain decoding run in pairs. Only the
pairs are compared, because the fastest of a hundred noisy times is mostly luck.

`simulator_error` checks the simulator: a recording is made before any of the runs that it predicts,
then every setting is run twice, and the second run counts. This is repeated in changing order and
medians are taken, so that a machine whose speed changes is not mistaken for an error of the
simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from engine.analysis.what_if.rules import FIXED
from engine.analysis.what_if.surface import Outcomes
from engine.environment import environment
from engine.errors import OptionError
from engine.experiments.bench.request import PLAIN, Configuration, TimedRun, round_costs, timed_run
from engine.experiments.results.reader import JSON_VERSION, key_of, title, tune_rows
from engine.experiments.results.table import TUNE
from engine.experiments.results.writer import JobResult, ResultsWriter
from engine.experiments.tune.advice import (
    Estimate,
    best_of_rules,
    by_category,
    by_position,
    engine_flags,
    estimates,
    outcome,
    pareto,
    to_confirm,
    undo_bytes,
    verdict,
)
from engine.experiments.tune.confirm import Confirmed, SpeedComparison, compare, confirm
from engine.experiments.tune.lengths import DraftSetting, drafting, has_floor, has_length
from engine.experiments.tune.record import LONGEST, Report, TunePlan, TuneRecording, record
from engine.machine.device import device_name
from engine.machine.host_memory import wait_for_huge_pages
from engine.options import Prompt
from engine.session import Session
from engine.trace.typed_json import strict_json

N_CONFIRMED = 3


def chosen(data: Mapping[str, Any]) -> DraftSetting | None:
    """The setting to use, None for plain decoding."""
    return DraftSetting(**data["setting"]) if data["setting"] else None


def tune(
    session: Session, plan: TunePlan, texts: Sequence[Prompt], report: Report = lambda what: None
) -> dict[str, Any]:
    """Record, simulate and confirm. texts: the plan's prompts as the model reads them. report:
    called with what is being done. Raises what Session.start raises, and OptionError if no drafter
    drafts."""
    wait_for_huge_pages()
    start = perf_counter()
    recordings = record(session, texts, plan, report)
    recorded_s = perf_counter() - start
    found = estimates(recordings)
    if not found:
        raise OptionError(
            "None of the drafters drafted anything in these texts.",
            "Raise -n, give other prompts, or name other drafters with --spec-type.",
        )
    best = to_confirm(found, N_CONFIRMED)
    configurations = [
        Configuration.plain(plan.base),
        *(Configuration(one.draft.name, plan.drafting(one.draft)) for one in best),
    ]
    since = perf_counter()
    simulated_s = since - start - recorded_s

    def told(done: int, total: int) -> None:
        if done % max(1, total // 10) == 0:
            report(f"real runs: {done} of {total}")

    confirmed = confirm(session, texts, configurations, plan.pairs, told)
    times = {"record_s": recorded_s, "simulate_s": simulated_s, "confirm_s": perf_counter() - since}
    return _data(session, plan, recordings, found, best, confirmed, times)


def write_results(data: Mapping[str, Any], folder: Path) -> Path:
    """Write what `tune` returns as a results file; returns its path. Raises OptionError if it
    cannot be written, TraceFileError if the folder has another file of that name."""
    machine = {**data["environment"], "device": data["device"]}
    del machine["date"]
    rows = tune_rows(data)
    name = title(TUNE, str(data["model"].get("name")))
    with ResultsWriter(folder, TUNE, name, len(rows)) as writer:
        for number, (settings, figures) in enumerate(rows, 1):
            result = JobResult(figures=figures, machine=machine, model=data["model"])
            writer.add(key_of(settings), number, settings, result)
        return writer.path


def _data(
    session: Session,
    plan: TunePlan,
    recordings: Sequence[TuneRecording],
    found: Sequence[Estimate],
    best: Sequence[Estimate],
    confirmed: Sequence[Confirmed],
    times: Mapping[str, float],
) -> dict[str, Any]:
    plain = next(one for one in confirmed if one.name == PLAIN)
    estimated = {one.draft.name: one for one in best}
    judged = verdict(confirmed)
    shown = estimated[judged.fastest].draft
    of_drafter = {one.drafter: one for one in recordings}
    costs, every_cost = of_drafter[shown.drafter].costs, [one.costs for one in recordings]
    recommended = shown if judged.chosen == shown.name else None
    return {
        "kind": "draftscope tune",
        "version": JSON_VERSION,
        "model": session.identity,
        "compute": session.compute,
        "device": device_name(session.device),
        "environment": environment(),
        "options": asdict(plan.base),
        "synthetic": bool(plan.rates),
        "prompts": [{"name": one.name, "category": one.category} for one in plan.prompts],
        "pairs": plan.pairs,
        "times": dict(times),
        "verdict": {
            "chosen": judged.chosen,
            "fastest": judged.fastest,
            "lines": judged.lines,
            "p": judged.against_plain.p if judged.against_plain else None,
        },
        "setting": asdict(recommended) if recommended else None,
        "flags": [
            dict(zip(("engine", "flags", "missing"), one, strict=True))
            for one in engine_flags(recommended, plan.files)
        ],
        "confirmed": [
            _confirmed(one, plain, estimated.get(one.name), session, plan) for one in confirmed
        ],
        "plain_estimate": next((x.plain_speed for x in every_cost if x and x.plain_ms), None),
        "estimates": [
            strict_json(
                {
                    "setting": asdict(one.draft),
                    "tokens_per_second": one.tokens_per_second,
                    "acceptance": one.acceptance,
                }
            )
            for one in found
            if one.rule == FIXED.name
        ],
        "rules": [strict_json(asdict(one)) for one in best_of_rules(found)],
        "by_position": by_position(of_drafter[shown.drafter], shown.n_max),
        "by_category": strict_json(by_category(of_drafter[shown.drafter], shown, plan.prompts)),
        "pareto": pareto(found, session.info, plan.base),
        "unmeasured_widths": list(costs.unmeasured(range(1, shown.n_max + 2))) if costs else [],
    }


def _confirmed(
    one: Confirmed, plain: Confirmed, estimate: Estimate | None, session: Session, plan: TunePlan
) -> dict[str, Any]:
    options = plan.base if estimate is None else drafting(plan.base, estimate.draft)
    return {
        "name": one.name,
        "setting": None if estimate is None else asdict(estimate.draft),
        "tokens_per_second": one.median,
        "low": min(one.speeds),
        "high": max(one.speeds),
        "speeds": list(one.speeds),
        "speed_up": one.median / plain.median if plain.median else None,
        "estimate": None if estimate is None else estimate.tokens_per_second,
        "same": one.same,
        "n_prompts": one.n_prompts,
        "undo_bytes": 0 if estimate is None else undo_bytes(session.info, options),
        "costs": None if estimate is None else strict_json(round_costs(one.runs, plain.runs)),
    }


GRID_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
GRID_FLOORS = (0.0, 0.3, 0.6)
_FINALISTS = 5


@dataclass(frozen=True, slots=True)
class GridCheck:
    """settings: the whole grid, by name. grid: one or two runs of each, plain decoding first.
    finalists: the fastest and the recommended one, run in pairs, plain decoding first. chosen: name
    of the recommended configuration."""

    settings: dict[str, DraftSetting]
    grid: Sequence[Confirmed]
    finalists: Sequence[Confirmed]
    chosen: str

    @property
    def recommended(self) -> Confirmed:
        """The recommended one among the finalists."""
        return next(one for one in self.finalists if one.name == self.chosen)

    @property
    def fastest(self) -> Confirmed:
        """The fastest finalist; the recommended one if it is as fast."""
        return max(self.finalists, key=lambda one: (one.median, one.name == self.chosen))

    @property
    def share(self) -> float:
        """Speed of the recommended one over that of the fastest."""
        return self.recommended.median / self.fastest.median

    @property
    def against_fastest(self) -> SpeedComparison | None:
        """The recommended one against the fastest, pair by pair; None if they are the same."""
        if self.fastest is self.recommended:
            return None
        return compare(self.recommended, self.fastest)


def grid_settings(drafters: Sequence[str], rates: Sequence[float] = ()) -> list[DraftSetting]:
    """Every length and floor of every drafter. rates: of synthetic acceptance, to which floors do
    not apply; their number is the greatest length."""
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
    texts: Sequence[Prompt],
    plan: TunePlan,
    chosen: DraftSetting | None,
    report: Report = lambda what: None,
) -> GridCheck:
    """Run the grid, then its fastest and the recommended setting. chosen: None for plain decoding.
    Raises what Session.start raises."""
    settings = {one.name: one for one in grid_settings(plan.drafters, plan.rates)}
    if chosen is not None:
        settings.setdefault(chosen.name, chosen)

    def configurations(names: Sequence[str]) -> list[Configuration]:
        drafted = (Configuration(n, plan.drafting(settings[n])) for n in names)
        return [Configuration.plain(plan.base), *drafted]

    report(f"a grid of {len(settings)} settings, one run of each")
    grid = confirm(session, texts, configurations(list(settings)), 1)
    half = [one.name for one in _fastest_first(grid[1:])[: (len(grid) + 1) // 2]]
    report(f"the faster {len(half)} once more")
    grid = _joined(grid, confirm(session, texts, configurations(half), 1))
    drafted = _fastest_first([one for one in grid[1:] if one.name in half])
    names = [one.name for one in drafted[:_FINALISTS]]
    if chosen is not None and chosen.name not in names:
        names.append(chosen.name)
    report(f"the fastest {len(names)}, {plan.pairs} real runs each")
    finalists = confirm(session, texts, configurations(names), plan.pairs)
    return GridCheck(settings, grid, finalists, chosen.name if chosen else PLAIN)


def _fastest_first(measured: Sequence[Confirmed]) -> list[Confirmed]:
    """Sorted by the better of their runs."""
    return sorted(measured, key=lambda one: -max(one.speeds))


def _joined(first: Sequence[Confirmed], again: Sequence[Confirmed]) -> list[Confirmed]:
    """The first runs, with the second ones appended."""
    more = {one.name: one for one in again}
    both = [(one, more.get(one.name, Confirmed("", (), 0, 0, ()))) for one in first]
    return [replace(a, speeds=a.speeds + b.speeds, runs=a.runs + b.runs) for a, b in both]


LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
FLOORS = ((3, 0.3), (3, 0.6), (6, 0.3), (6, 0.6))
"""n_max and p_min of the compared settings: eight lengths without a floor, four with one."""
MORE_LENGTHS = (7, 9, 10, 16)
"""Replace FLOORS if acceptance is synthetic, because confidence does not predict it."""


@dataclass(frozen=True, slots=True)
class SettingError:
    """One setting. real, simulated: tokens per second of each run, and as simulated from the
    recording before it; *_per_round: tokens per round."""

    setting: DraftSetting
    real: tuple[float, ...]
    simulated: tuple[float, ...]
    real_per_round: float
    simulated_per_round: float

    @property
    def error(self) -> float:
        """Median of simulated over real speed, minus 1."""
        return median(s / r for s, r in zip(self.simulated, self.real, strict=True)) - 1

    @property
    def error_per_round(self) -> float:
        """The same for tokens per round."""
        return self.simulated_per_round / self.real_per_round - 1


def simulator_error(
    session: Session,
    texts: Sequence[Prompt],
    plan: TunePlan,
    repeats: int = 3,
    report: Report = lambda what: None,
) -> list[SettingError]:
    """Simulate and run settings of a plan with one drafter; if it has rates, they must be 16.
    Raises what Session.start raises."""
    (drafter,) = plan.drafters
    settings = [DraftSetting(drafter, n) for n in LENGTHS]
    floors = FLOORS if not plan.rates else [(n, 0.0) for n in MORE_LENGTHS]
    settings += [DraftSetting(drafter, n, p) for n, p in floors]
    ran: dict[DraftSetting, list[TimedRun]] = {one: [] for one in settings}
    played: dict[DraftSetting, list[Outcomes]] = {one: [] for one in settings}
    for number in range(repeats):
        (recorded,) = record(session, texts, plan, report)
        report(f"{drafter}: real runs, {number + 1} of {repeats}")
        first = number * len(settings) // repeats
        for one in [*settings[first:], *settings[:first]]:
            options = plan.drafting(one)
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
