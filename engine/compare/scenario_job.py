"""Playing a scenario: a comparison of its lanes, or a run of its prompts."""

from __future__ import annotations

from pathlib import Path

from engine.compare.comparison import Comparison
from engine.compare.scenario import Scenario
from engine.run import Run
from engine.session import Session
from engine.trace.store import TraceStore


def start_comparison(
    session: Session,
    scenario: Scenario,
    trace: TraceStore | None = None,
    *,
    bound: float | None = None,
    llama_library: Path | None = None,
) -> Comparison:
    """The comparison of a scenario with lanes. Raises OptionError and what Comparison raises."""
    prompts = [session.prompt(text) for text in scenario.prompts]
    return Comparison(
        session,
        prompts,
        scenario.options,
        scenario.lanes,
        trace,
        bound=bound,
        draft_accept=scenario.draft_accept or None,
        llama_library=llama_library,
    )


def start_run(session: Session, scenario: Scenario, trace: TraceStore | None = None) -> Run:
    """The run of a scenario without lanes. Raises OptionError and what Session.start raises."""
    prompts = [session.prompt(text) for text in scenario.prompts]
    return session.start(prompts, scenario.options, trace)
