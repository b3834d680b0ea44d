"""One recording per drafter: long drafts at every place of every text, and what rounds cost.

The texts are decoded with long drafts that are not verified, so that the drafter is asked at every
place; whether it was right follows from the text (engine.analysis.what_if). The cost of rounds of
each length is measured by short runs on a few prompts that verify whole drafts. Every such run is
done twice and the second one counts, because what a run does for the first time takes longer, and
the next run of the session reuses it (engine.memory.hybrid). With synthetic acceptance, drafts must
be verified to be judged at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from engine.analysis.what_if.recorded import CostCurve, RecordedRounds, RoundCosts
from engine.decode.acceptance import accepted_by_chance
from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import Configuration, run_to_end, shorter
from engine.experiments.tune.lengths import DraftSetting, drafting, has_floor, has_length
from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.run_ref import RunRef

LONGEST = 16
"""Length of recorded drafts, in tokens."""
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
_COST_PROMPTS = 2
_COST_TOKENS = 64
_COST_PASSES = 4
_COST_S = 4.0
"""Seconds after which no further pass begins."""
_LEAST_FLOOR = 1e-6
"""No token is below it, but with it the drafter checks every step."""
_MIXED = ((8, 0.3), (8, 0.7))
"""n_max and p_min of rounds whose widths vary as with a floor, including width 1."""
_FEW = 4

LEAST_PAIRS, MOST_PAIRS = 6, 200

Report = Callable[[str], None]
"""Takes what is being done."""


@dataclass(frozen=True, slots=True)
class TunePlan:
    """base: options other than speculation; its n_predict applies to every prompt. drafters: names.
    rates: of synthetic acceptance, empty if the target decides. files: names of drafter files, by
    drafter."""

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
                "Fewer cannot show a significant difference.",
            )
        if not self.drafters:
            raise OptionError(
                "There is no drafter to tune.",
                "Give a file with -md, or name one with --spec-type.",
            )

    def drafting(self, setting: DraftSetting, verify_max: int | None = None) -> RunOptions:
        """The base options with this drafter alone. Raises OptionError for a length out of
        range."""
        return drafting(self.base, setting, verify_max=verify_max, rates=self.rates)


@dataclass(frozen=True, slots=True)
class TuneRecording:
    """What one drafter did. rounds: with long drafts. costs: None if nothing was timed."""

    drafter: str
    rounds: RecordedRounds
    costs: RoundCosts | None


def record(
    session: Session, texts: Sequence[Prompt], plan: TunePlan, report: Report = lambda what: None
) -> list[TuneRecording]:
    """Record each drafter. texts: the plan's prompts as the model reads them. Raises what
    Session.start raises."""
    rates = plan.rates
    report("plain decoding, to time its step")
    plain_rounds = _repeated(session, texts, Configuration.plain(plan.base).options)
    longest = min(LONGEST, len(rates) or LONGEST)
    parts: dict[str, tuple[RecordedRounds, RecordedRounds, RecordedRounds | None]] = {}
    for drafter in filter(has_length, plan.drafters):
        report(f"{drafter}: drafts of {longest} tokens at every position")
        judged = None if rates else 0
        wanted = plan.drafting(DraftSetting(drafter, longest), judged)
        rounds = _rounds(session, texts, wanted)
        if rates:
            n = int(rounds.emitted.sum())  # at least the rounds of any text
            chance = accepted_by_chance(rates[:longest], plan.base.sampler.seed, n)
            rounds = replace(rounds, chance=chance)
        report(f"{drafter}: times of rounds of each length")
        lengths = [n for n in _LENGTHS if n <= longest]
        tried = [DraftSetting(drafter, n) for n in lengths]
        cost, floored = _cost_rounds(session, texts, plan, tried), None
        if has_floor(drafter) and not rates:
            tried = [DraftSetting(drafter, n, _LEAST_FLOOR) for n in lengths]
            tried += [DraftSetting(drafter, *one) for one in _MIXED]
            floored = _cost_rounds(session, texts, plan, tried)
        parts[drafter] = rounds, cost, floored
    everything = [*(_passes(cost, floored) for _, cost, floored in parts.values()), plain_rounds]
    shared = RoundCosts.measured(RecordedRounds.joined(everything))
    return [
        TuneRecording(drafter, rounds, _costs(cost, floored, plain_rounds, shared))
        for drafter, (rounds, cost, floored) in parts.items()
    ]


def _passes(cost: RecordedRounds, floored: RecordedRounds | None) -> RecordedRounds:
    """The rounds whose passes are as in real runs."""
    return RecordedRounds.joined([cost, *([floored] if floored else [])])


def _costs(
    cost: RecordedRounds,
    floored: RecordedRounds | None,
    plain: RecordedRounds,
    shared: RoundCosts | None,
) -> RoundCosts | None:
    """cost: short runs without a floor; floored: with one, None if the drafter has none. shared:
    costs of all drafters together."""
    costs = RoundCosts.measured(_passes(cost, floored), plain)
    at_once = RoundCosts.measured(cost)
    by_step = RoundCosts.measured(floored) if floored else None
    if costs is None or at_once is None or shared is None:
        return None
    return replace(
        costs,
        draft=at_once.draft.trusted(_FEW),
        draft_by_step=by_step.draft.trusted(_FEW) if by_step else None,
        draft_0=at_once.draft_0,
        reading_ms=(by_step or at_once).reading_ms,
        verify=completed(costs.verify, shared.verify).trusted(_FEW),
        sample=costs.sample.trusted(_FEW),
    )


def completed(own: CostCurve, others: CostCurve) -> CostCurve:
    """A curve whose points that were measured only a few times are taken from another one."""
    kept = (own.n >= _FEW) | ~np.isin(own.at, others.at)
    more = ~np.isin(others.at, own.at[kept])
    order = np.argsort([*own.at[kept], *others.at[more]])
    parts = (own.at, others.at), (own.ms, others.ms), (own.n, others.n)
    return CostCurve(*(np.append(mine[kept], theirs[more])[order] for mine, theirs in parts))


def _cost_rounds(
    session: Session, texts: Sequence[Prompt], plan: TunePlan, settings: Sequence[DraftSetting]
) -> RecordedRounds:
    """Rounds of every setting. The settings alternate, so that other load affects them alike;
    several passes if they are short."""
    options = [shorter(plan.drafting(one), _COST_TOKENS) for one in settings]
    n, parts, began = min(_COST_PROMPTS, len(texts)), [], perf_counter()
    for again in range(_COST_PASSES):
        for i, one in enumerate(options):
            first = (again * len(options) + i) * n
            chosen = [texts[(first + j) % len(texts)] for j in range(n)]
            parts.append(_repeated(session, chosen, one))
        if perf_counter() - began > _COST_S:
            break
    return RecordedRounds.joined(parts)


def _repeated(session: Session, prompts: Sequence[Prompt], options: RunOptions) -> RecordedRounds:
    """The rounds of the second of two equal runs."""
    _rounds(session, prompts, options)
    return _rounds(session, prompts, options).repeated()


def _rounds(session: Session, prompts: Sequence[Prompt], options: RunOptions) -> RecordedRounds:
    """Every prompt alone, one after another in one slot, as a server gets them."""
    run = session.start(prompts, options)
    run_to_end(run)
    return RecordedRounds.of(RunRef(run.trace, run.run_id))
