"""What slots side by side gain: the same requests in one slot and in several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from engine.experiments.bench.request import Configuration, run_to_end
from engine.trace.timings import summary

if TYPE_CHECKING:
    from engine.options import Prompt
    from engine.session import Session


@dataclass(frozen=True, slots=True)
class SlotRow:
    """Runs with `n_slots` slots, one request each.

    predicted_n: tokens emitted by all of them. tokens_per_second: aggregate, from the first token
    on (medians over the repetitions, as wall_s, which counts the prompts too). ratio: of
    tokens_per_second over that of the configuration's first row. acceptance: accepted share of
    the drafted tokens, None without drafts.
    """

    configuration: str
    n_slots: int
    predicted_n: int
    tokens_per_second: float
    wall_s: float
    acceptance: float | None
    ratio: float


def bench_slots(
    session: Session,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    counts: Sequence[int],
    *,
    repeats: int = 1,
) -> Iterator[SlotRow]:
    """Every configuration with each number of slots; slot i decodes prompt i, from the
    start again where there are fewer. The counts of a configuration take turns in each repetition.

    Raises what Session.start raises.
    """
    for configuration in configurations:
        runs: dict[int, list[_Run]] = {n: [] for n in counts}
        for _ in range(repeats):
            for n, done in runs.items():
                mine = [prompts[i % len(prompts)] for i in range(n)]
                done.append(_run(session, mine, configuration))
        first = 0.0
        for n, done in runs.items():
            speed = median(run.speed for run in done)
            first = first or speed
            yield SlotRow(
                configuration.name,
                n,
                done[0].predicted_n,
                speed,
                median(run.wall_s for run in done),
                done[0].acceptance,
                speed / first,
            )


@dataclass(frozen=True, slots=True)
class _Run:
    predicted_n: int
    speed: float
    wall_s: float
    acceptance: float | None


def _run(session: Session, prompts: Sequence[Prompt], configuration: Configuration) -> _Run:
    run = session.start(prompts, replace(configuration.options, parallel=len(prompts)))
    wall_s = run_to_end(run)
    figures = summary(run.trace, run.run_id)
    return _Run(
        figures["predicted_n"],
        figures["predicted_per_second"],
        wall_s,
        figures["draft_acceptance_rate"] if figures.get("draft_n") else None,
    )
