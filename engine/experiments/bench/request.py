"""Requests, decoded alone and measured, which every suite is made of; and the same requests in one
slot and in several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from engine.options import Prompt, RunOptions
from engine.trace.records import MISSING
from engine.trace.timings import summary

if TYPE_CHECKING:
    from engine.decode.held_sequences import PromptCache
    from engine.run import Run
    from engine.session import Session


PLAIN = "plain"
"""The configuration without speculation, which the others are compared with."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Options under the name that tables show."""

    name: str
    options: RunOptions

    @classmethod
    def plain(cls, options: RunOptions) -> Configuration:
        """The same request without speculation, faults and snapshots."""
        spec = replace(options.spec, types=(), tree=(), synth_rates=(), synth_len=None)
        policy = RunOptions().rollback
        return cls(PLAIN, replace(options, spec=spec, faults=(), rollback=policy, n_rs_seq=None))


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One finished request; counts and times are those of engine.trace.timings.

    prompt, configuration: names. cache_n: prompt tokens that a cache made unnecessary to process.
    num_rounds: rounds after the prompt, with or without a draft. draft_ms, verify_ms: drafting,
    and forward passes of the target, of predicted_ms. num_restores: checkpoints put back.
    duplicate_cells: most attention cells beyond one per position that were found after a round.
    wall_s: from the first round to the last, seconds.
    """

    prompt: str
    configuration: str
    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    num_spec_steps: int
    num_rounds: int
    draft_ms: float
    verify_ms: float
    num_restores: int
    duplicate_cells: int
    wall_s: float
    stop: str
    tokens: tuple[int, ...]
    text: str


def measure_request(
    session: Session,
    prompt: Prompt,
    name: str,
    configuration: Configuration,
    cache: PromptCache | None = None,
) -> RequestResult:
    """Decode a prompt in one slot. Raises what Session.start raises."""
    run = session.start([prompt], replace(configuration.options, parallel=1), cache=cache)
    wall_s = run_to_end(run)
    (result,) = run.results()
    figures = summary(run.trace, run.run_id)
    rounds = run.trace.rounds
    return RequestResult(
        prompt=name,
        configuration=configuration.name,
        cache_n=figures["cache_n"],
        prompt_n=figures["prompt_n"],
        prompt_ms=figures["prompt_ms"],
        predicted_n=figures["predicted_n"],
        predicted_ms=figures["predicted_ms"],
        predicted_per_second=figures["predicted_per_second"],
        draft_n=figures.get("draft_n", 0),
        draft_n_accepted=figures.get("draft_n_accepted", 0),
        num_spec_steps=figures["num_spec_steps"],
        num_rounds=int((rounds.column("num_draft_tokens") != MISSING).sum()),
        draft_ms=figures["phase_ms"]["draft"] or 0.0,
        verify_ms=figures["phase_ms"]["verify"] or 0.0,
        num_restores=int(rounds.column("replay_index").sum()),
        duplicate_cells=int(rounds.column("kv_cells_duplicate").max()),
        wall_s=wall_s,
        stop=result.stop,
        tokens=tuple(result.tokens),
        text=result.text,
    )


def run_to_end(run: Run) -> float:
    """Do all rounds and stop the run, after an error too; returns seconds of wall time.

    Raises ModelFileError where a file that weights are mapped from was written to in the run.
    """
    start = perf_counter()
    try:
        while run.advance():
            pass
    finally:
        run.stop()
    wall_s = perf_counter() - start
    run.files.check()
    return wall_s


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
        runs: dict[int, list[SlotRow]] = {n: [] for n in counts}
        for _ in range(repeats):
            for n, done in runs.items():
                mine = [prompts[i % len(prompts)] for i in range(n)]
                done.append(_run(session, mine, configuration))
        first = 0.0
        for done in runs.values():
            speed = median(run.tokens_per_second for run in done)
            first = first or speed
            wall_s = median(run.wall_s for run in done)
            yield replace(done[0], tokens_per_second=speed, wall_s=wall_s, ratio=speed / first)


def _run(session: Session, prompts: Sequence[Prompt], configuration: Configuration) -> SlotRow:
    """One run, its ratio not known yet."""
    run = session.start(prompts, replace(configuration.options, parallel=len(prompts)))
    wall_s = run_to_end(run)
    figures = summary(run.trace, run.run_id)
    return SlotRow(
        configuration.name,
        len(prompts),
        figures["predicted_n"],
        figures["predicted_per_second"],
        wall_s,
        figures["draft_acceptance_rate"] if figures.get("draft_n") else None,
        0.0,
    )
