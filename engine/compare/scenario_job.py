"""Playing a scenario: a comparison of its lanes, or a run of its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.compare.comparison import Comparison
from engine.compare.scenario import Scenario
from engine.draft.scripted import ScriptedDrafter
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Run, Session
from engine.trace.store import TraceStore


def start_comparison(
    session: Session,
    scenario: Scenario,
    trace: TraceStore | None = None,
    *,
    bound: float | None = None,
) -> Comparison:
    """The comparison of a scenario with lanes. Raises OptionError and what Comparison raises."""
    options = scenario.options
    drafter = None
    if scenario.draft_accept:
        drafter = ScriptedDrafter(
            scenario.draft_accept, session.config.n_vocab,
            lambda tokens: _continuation(session, tokens, options),
        )  # fmt: skip
    return Comparison(
        session, session.prompt(scenario.prompts[0]), options, scenario.lanes, trace,
        drafter=drafter, bound=bound,
    )  # fmt: skip


def start_run(session: Session, scenario: Scenario, trace: TraceStore | None = None) -> Run:
    """The run of a scenario without lanes. Raises OptionError and what Session.start raises."""
    prompts = [session.prompt(text) for text in scenario.prompts]
    return session.start(prompts, scenario.options, trace)


def _continuation(session: Session, tokens: Sequence[int], options: RunOptions) -> Iterator[int]:
    """Tokens of plain decoding behind a prompt, decoded as they are asked for."""
    plain = replace(options, parallel=1, spec=SpecOptions(), rollback="checkpoint", n_rs_seq=None)
    run, n = session.start([Prompt(tuple(tokens))], plain), 0
    while not run.done:
        run.step()
        new = run.results()[0].tokens[n:]
        n += len(new)
        yield from new
