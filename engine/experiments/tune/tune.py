"""From a model, its drafters and prompts to settings: record, simulate, confirm, advise.

    plan = TunePlan(prompts, base, drafters, pairs=6)
    data = tune(session, plan, texts, report)

The result is plain data, as it is written to a file; engine.experiments.tune.report shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.analysis.what_if.rules import FIXED
from engine.environment import environment
from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import PLAIN, Configuration, round_costs
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
    pareto,
    to_confirm,
    undo_bytes,
    verdict,
)
from engine.experiments.tune.confirm import Confirmed, confirm
from engine.experiments.tune.lengths import DraftSetting, drafting
from engine.experiments.tune.record import TuneRecording, record
from engine.machine.device import device_name
from engine.machine.host_memory import wait_for_huge_pages
from engine.options import Prompt, RunOptions
from engine.trace.typed_json import strict_json

if TYPE_CHECKING:
    from engine.session import Session

N_CONFIRMED = 3
LEAST_PAIRS, MOST_PAIRS = 6, 200


@dataclass(frozen=True, slots=True)
class TunePlan:
    """base: options but for speculation; its n_predict is for every prompt. drafters: names.
    rates: of synthetic acceptance, empty while the target decides. files: names of the files that
    draft, by drafter."""

    prompts: Sequence[NamedPrompt]
    base: RunOptions
    drafters: Sequence[str]
    pairs: int = 6
    rates: tuple[float, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise OptionError("There is no prompt to tune for.", "Give at least one.")
        if not LEAST_PAIRS <= self.pairs <= MOST_PAIRS:
            raise OptionError(
                f"--pairs is outside {LEAST_PAIRS}..{MOST_PAIRS}.",
                "Fewer cannot show a difference, however large it is.",
            )
        if not self.drafters:
            raise OptionError(
                "There is no drafter to tune.",
                "Give a file with -md, or name one with --spec-type.",
            )


def chosen(data: Mapping[str, Any]) -> DraftSetting | None:
    """The setting to use, None for plain decoding."""
    return DraftSetting(**data["setting"]) if data["setting"] else None


def tune(
    session: Session,
    plan: TunePlan,
    texts: Sequence[Prompt],
    report: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Do all of it. texts: the plan's prompts as the model reads them. report: called with what
    is done now. Raises what Session.start raises, and OptionError where no drafter drafts."""
    wait_for_huge_pages()
    start = perf_counter()
    recordings = record(session, texts, plan.base, plan.drafters, rates=plan.rates, report=report)
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
        *(
            Configuration(one.draft.name, drafting(plan.base, one.draft, rates=plan.rates))
            for one in best
        ),
    ]
    begun = perf_counter()
    simulated_s = begun - start - recorded_s

    def told(done: int, total: int) -> None:
        if done % max(1, total // 10) == 0:
            report(f"real runs: {done} of {total}")

    confirmed = confirm(session, texts, configurations, plan.pairs, told)
    times = {"record_s": recorded_s, "simulate_s": simulated_s, "confirm_s": perf_counter() - begun}
    return _data(session, plan, recordings, found, best, confirmed, times)


def write_results(data: Mapping[str, Any], folder: Path) -> Path:
    """Write what `tune` returns as a results file; returns where it is. Raises OptionError where
    it cannot be written, TraceFileError where the folder has something else of that name."""
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
    costs = of_drafter[shown.drafter].costs
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
        "flags": [asdict(one) for one in engine_flags(recommended, plan.files)],
        "confirmed": [
            _confirmed(one, plain, estimated.get(one.name), session, plan) for one in confirmed
        ],
        "plain_estimate": _plain_estimate(recordings),
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


def _plain_estimate(recordings: Sequence[TuneRecording]) -> float | None:
    """Tokens per second of plain decoding as it was recorded."""
    known = (one.costs.plain_speed for one in recordings if one.costs and one.costs.plain_ms)
    return next(known, None)
