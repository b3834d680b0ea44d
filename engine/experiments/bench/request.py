"""Measured requests, decoded alone, in sequence or in parallel, and the cost of their rounds.

W1 is the workload of llama.cpp #19493: four turns of one conversation, with counters per turn.
Every turn's prompt repeats all previous text, so positions, cells and checkpoints are reused; the
counters are those that reveal damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from engine.experiments.bench.prompts import NamedPrompt
from engine.foreign import LARGEST, Size
from engine.options import Prompt, RunOptions
from engine.trace.records import MISSING
from engine.trace.timings import summary

if TYPE_CHECKING:
    from engine.decode.held_sequences import PromptCache
    from engine.run import Run
    from engine.session import Session


Figure = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A measured value in its valid range."""
PLAIN = "plain"
"""The configuration without speculation, the baseline of the others."""


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

    prompt, configuration: names. cache_n: prompt tokens reused from a cache. num_rounds: rounds
    after the prompt, with or without a draft. draft_ms, verify_ms: parts of predicted_ms spent
    drafting, and in the target's forward passes. num_restores: checkpoints restored.
    duplicate_cells: most attention cells beyond one per position after any round. wall_s: from the
    first round to the last, seconds.
    """

    prompt: str
    configuration: str
    cache_n: Size
    prompt_n: Size
    prompt_ms: Figure
    predicted_n: Size
    predicted_ms: Figure
    predicted_per_second: Figure
    draft_n: Size
    draft_n_accepted: Size
    num_spec_steps: Size
    num_rounds: Size
    draft_ms: Figure
    verify_ms: Figure
    num_restores: Size
    duplicate_cells: Size
    wall_s: Figure
    stop: str
    tokens: tuple[Size, ...]
    text: str

    @property
    def n_timed(self) -> int:
        """Tokens after the first one, which is free."""
        return self.predicted_n - 1


def measure_request(
    session: Session,
    prompt: Prompt,
    name: str,
    configuration: Configuration,
    cache: PromptCache | None = None,
) -> RequestResult:
    """Decode a prompt in one slot. Raises what Session.start raises."""
    run, known = measured(session, [prompt], replace(configuration.options, parallel=1), cache)
    (result,) = run.results()
    known |= {"prompt": name, "configuration": configuration.name}
    known |= {"stop": result.stop, "tokens": tuple(result.tokens), "text": result.text}
    return RequestResult(**{field.name: known[field.name] for field in fields(RequestResult)})


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Several requests decoded one after another. tokens: of each. n_timed: total, without the free
    first ones. Other fields as in RequestResult."""

    tokens: tuple[tuple[int, ...], ...]
    n_timed: int
    predicted_ms: float
    draft_ms: float
    verify_ms: float
    num_rounds: int
    draft_n: int
    draft_n_accepted: int

    @property
    def speed(self) -> float:
        """Tokens per second, 0 if untimed."""
        return 1e3 * self.n_timed / self.predicted_ms if self.predicted_ms else 0.0


def timed_run(session: Session, prompts: Sequence[Prompt], options: RunOptions) -> TimedRun:
    """Decode prompts one after another in one slot. Raises what Session.start raises."""
    run, known = measured(session, prompts, replace(options, parallel=1))
    tokens = tuple(tuple(result.tokens) for result in run.results())
    known |= {"tokens": tokens, "n_timed": sum(max(len(one) - 1, 0) for one in tokens)}
    return TimedRun(**{field.name: known[field.name] for field in fields(TimedRun)})


def measured(
    session: Session,
    prompts: Sequence[Prompt],
    options: RunOptions,
    cache: PromptCache | None = None,
) -> tuple[Run, dict[str, Any]]:
    """A finished run and its figures: those of engine.trace.timings.summary and those that
    RequestResult adds. Raises what Session.start raises."""
    run = session.start(prompts, options, cache=cache)
    wall_s = run_to_end(run)
    figures, rounds = summary(run.trace, run.run_id), run.trace.rounds
    return run, {
        "draft_n": 0,
        "draft_n_accepted": 0,
        **figures,
        "num_rounds": int((rounds.column("num_draft_tokens") != MISSING).sum()),
        "draft_ms": figures["phase_ms"]["draft"] or 0.0,
        "verify_ms": figures["phase_ms"]["verify"] or 0.0,
        "num_restores": int(rounds.column("replay_index").sum()),
        "duplicate_cells": int(rounds.column("kv_cells_duplicate").max()),
        "wall_s": wall_s,
    }


def shorter(options: RunOptions, most: int) -> RunOptions:
    """The same with at most this many tokens."""
    n = options.n_predict
    return replace(options, n_predict=min(n, most) if n > 0 else most)


def round_costs(
    runs: Sequence[RequestResult | TimedRun], plain: Sequence[RequestResult | TimedRun]
) -> dict[str, Any] | None:
    """Why a configuration is faster or slower than plain decoding; None without times.

    Means over the rounds of all runs: tokens_per_round (emitted), drafted_per_round, and the
    milliseconds of drafting, verifying and the rest of a round. plain_step_ms: a token of plain
    decoding. A round pays if it emits more than break_even_tokens = round_ms / plain_step_ms, which
    requires an acceptance of break_even_acceptance = (break_even_tokens - 1) / drafted_per_round at
    the measured cost, against its actual `acceptance`; above 1 it cannot pay. These two are None
    without drafts.
    """
    names = ("num_rounds", "n_timed", "predicted_ms", "draft_ms", "verify_ms")
    rounds, n_tokens, ms, draft_ms, verify_ms = (_sum(runs, name) for name in names)
    plain_step_ms = ms_per_token(plain)
    if not rounds or not plain_step_ms:
        return None
    drafted = _sum(runs, "draft_n")
    break_even = ms / rounds / plain_step_ms
    return {
        "num_rounds": rounds,
        "tokens_per_round": n_tokens / rounds,
        "drafted_per_round": drafted / rounds,
        "round_ms": ms / rounds,
        "draft_ms": draft_ms / rounds,
        "verify_ms": verify_ms / rounds,
        "rest_ms": (ms - draft_ms - verify_ms) / rounds,
        "plain_step_ms": plain_step_ms,
        "break_even_tokens": break_even,
        "break_even_acceptance": (break_even - 1) * rounds / drafted if drafted else None,
        "acceptance": _sum(runs, "draft_n_accepted") / drafted if drafted else None,
    }


def ms_per_token(runs: Sequence[RequestResult | TimedRun]) -> float | None:
    """The first token of a request is free; None if there are no others."""
    n = _sum(runs, "n_timed")
    return _sum(runs, "predicted_ms") / n if n else None


def _sum(runs: Sequence[RequestResult | TimedRun], name: str) -> Any:
    return sum(getattr(run, name) for run in runs)


def run_to_end(run: Run) -> float:
    """Do all rounds and stop the run, also after an error; returns wall seconds.

    Raises ModelFileError if a mapped weight file was modified during the run.
    """
    start = perf_counter()
    try:
        while run.advance(1.0):  # long, because no one reads the trace meanwhile
            pass
    finally:
        run.stop()
    wall_s = perf_counter() - start
    run.files.check()
    return wall_s


def bench_slots(
    session: Session,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    counts: Sequence[int],
    *,
    repeats: int = 1,
) -> Iterator[dict[str, Any]]:
    """Every configuration with each number of slots; slot i decodes prompt i, cyclically. The slot
    counts of a configuration alternate in each repetition.

    Raises what Session.start raises.

    Per row: configuration; n_slots, one request each; predicted_n, tokens emitted by all;
    tokens_per_second: aggregate, from the first token on (medians over the repetitions, as for
    wall_s, which includes prompts); acceptance: accepted share of drafted tokens, None without
    drafts; ratio: of tokens_per_second to the configuration's first row.
    """
    for configuration in configurations:
        runs: dict[int, list[dict[str, Any]]] = {n: [] for n in counts}
        for _ in range(repeats):
            for n, done in runs.items():
                mine = [prompts[i % len(prompts)] for i in range(n)]
                done.append(_run(session, mine, configuration))
        first = 0.0
        for done in runs.values():
            speed = median(run["tokens_per_second"] for run in done)
            first = first or speed
            wall_s = median(run["wall_s"] for run in done)
            yield done[0] | {"tokens_per_second": speed, "wall_s": wall_s, "ratio": speed / first}


def _run(
    session: Session, prompts: Sequence[Prompt], configuration: Configuration
) -> dict[str, Any]:
    """One run, without its ratio."""
    _, figures = measured(session, prompts, replace(configuration.options, parallel=len(prompts)))
    return {
        "configuration": configuration.name,
        "n_slots": len(prompts),
        "predicted_n": figures["predicted_n"],
        "tokens_per_second": figures["predicted_per_second"],
        "wall_s": figures["wall_s"],
        "acceptance": figures["draft_acceptance_rate"] if figures["draft_n"] else None,
    }


class Workload:
    """One conversation in one configuration; `done` holds the finished turns.

    messages: the user's, in order. chat: apply the model's template instead of joining messages and
    answers. cache: of this conversation alone; None = every turn is processed from its first token.
    """

    def __init__(
        self,
        session: Session,
        messages: Sequence[NamedPrompt],
        configuration: Configuration,
        *,
        chat: bool = False,
        template_values: dict[str, Any] | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        from engine.conversation.conversation import Rendering  # here, because it loads torch

        self._session, self._messages = session, list(messages)
        self._rendering = Rendering(session, is_chat=chat, template_values=template_values)
        self.configuration = configuration
        self._cache = cache
        self._message_starts: tuple[int, ...] = ()
        self.done: list[RequestResult] = []

    def turns(self) -> Iterator[RequestResult]:
        """Decode turn after turn; each is in `done` before it is yielded.

        Raises what Session.start and ChatTemplate.render raise.
        """
        history: list[dict[str, str]] = []
        for message in self._messages:
            history.append({"role": "user", "content": message.text})
            measured = measure_request(
                self._session, self._prompt(history), message.name, self.configuration, self._cache
            )
            history.append({"role": "assistant", "content": measured.text})
            self.done.append(measured)
            yield self.done[-1]

    def _prompt(self, history: Sequence[dict[str, str]]) -> Prompt:
        """The prompt of a turn; its last message starts where it departs from the previous text."""
        if not self._cache or not self.done:
            return self._rendering.prompt(history)
        prompt = self._rendering.behind(history[:-1], history[-1:], self._message_starts)
        self._message_starts = prompt.message_starts
        return prompt


def turn_counters(turn: RequestResult) -> dict[str, Any]:
    """A turn's counters by the names of `bench w1`.

    prompt_tokens = cache_n (reused) + prompt_n (processed). tokens: emitted. drafts: verification
    steps. drafted = accepted + rejected. restores: checkpoints restored. duplicate_cells: most
    attention cells beyond one per position, checked after every round.
    """
    return {
        "turn": turn.prompt,
        "prompt_tokens": turn.cache_n + turn.prompt_n,
        "cache_n": turn.cache_n,
        "prompt_n": turn.prompt_n,
        "tokens": turn.predicted_n,
        "drafts": turn.num_spec_steps,
        "drafted": turn.draft_n,
        "accepted": turn.draft_n_accepted,
        "rejected": turn.draft_n - turn.draft_n_accepted,
        "restores": turn.num_restores,
        "duplicate_cells": turn.duplicate_cells,
        "tokens_per_second": turn.predicted_per_second,
        "text": turn.text,
    }


def turn_totals(turns: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Sums of the counters over the turns; the maximum of duplicate_cells."""
    names = "prompt_tokens cache_n prompt_n tokens drafts drafted accepted rejected restores"
    sums = {name: sum(turn[name] for turn in turns) for name in names.split()}
    return sums | {"duplicate_cells": max((turn["duplicate_cells"] for turn in turns), default=0)}
