"""`draftscope compare`: rollback policies side by side, as a table and an exit status."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.common import draft_paths, open_session, target_path
from app.cli.option_lines import declare, refuse_given
from app.cli.output import in_columns, print_json, print_lines, print_report, tell
from app.cli.recorded import (
    check_report,
    check_trace_folder,
    deliver_report,
    finding_lines,
    findings_json,
    record,
)
from app.cli.run import draft_files, make_prompt
from app.cli.run_arguments import options_from, run_options
from engine.analysis.findings.check import recorded
from engine.analysis.run_cost import COST_HEADS, COST_NOTE, RunCost, cost_cells, cost_notes
from engine.analysis.verdict import LaneVerdict, state_drift
from engine.compare.lane_spec import DEFAULT_LANES, NOISE_LANE, LaneSpec
from engine.compare.scenario import Scenario, find_scenario, scenarios
from engine.environment import environment
from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.model.tensors import DRAFT_MTP, has_mtp_block
from engine.options import Prompt, RunOptions
from engine.options.faults import notes_on
from engine.options.llama_cpp import LlamaSettings
from engine.plain_text import counted
from engine.report.run import (
    LANE_HEADS,
    LANE_NOTE,
    compare_report,
    headline,
    lane_cells,
    lane_notes,
    noise_notes,
    run_report,
)
from engine.trace.records import PEER
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import SCENARIOS

if TYPE_CHECKING:
    from engine.compare.comparison import Comparison
    from engine.session import Session

_LINE = "{:<{width}}  {:<9} {:<10} {:>9} {:>9} {:>9} {:>4} {:>6} {:>6} {:>6} {:>6} {:>6}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, counts=_counts)


def _has_mtp_block(path: Path) -> bool:
    with GgufFile.open(path) as file:
        return has_mtp_block(file)


def run(args: argparse.Namespace) -> int:
    """Compare; what was recorded is exported, also after an error or a signal."""
    if args.list_scenarios:
        known = [(one.name, one.title) for one in scenarios(SCENARIOS)]
        print_report(args, dict(known), in_columns(known, (False, False)))
        return 0
    check_trace_folder(args.trace)
    target = target_path(args)
    if args.parallel is None:
        args.parallel = max(1, len(args.sources))
    scenario = chosen_scenario(args, run_options(args))
    if scenario is None and not args.sources:
        raise OptionError("There is no prompt.", "Give one with -p, -f or --tokens.")
    if args.spec_type is None and not args.spec_default and args.draft_accept is None:
        args.spec_type = tuple(draft_paths(args)) if args.spec_draft_model else (DRAFT_MTP,)
        if not (args.spec_draft_model or scenario or _has_mtp_block(target)):
            raise OptionError(
                f"{target.name} has no MTP block, which drafts unless something else does.",
                "Choose a drafter with --spec-type, or --draft-accept 0,3,1 to draft by script.",
            )
    options = scenario.options if scenario else run_options(args)
    drafts = draft_files(args, options)
    lanes: tuple[LaneSpec, ...] = DEFAULT_LANES
    if args.lanes:
        lanes = (NOISE_LANE, *map(LaneSpec.parse, args.lanes))
    n_draft = None if options.spec.types else options.spec.n_max
    lanes = scenario.lanes if scenario else lanes
    if not any(lane.llama or lane.kind == PEER for lane in lanes):
        refuse_given(args, "a lane of llama.cpp", "+llama-library")
    for lane in lanes:
        for note in notes_on(lane.options(options), n_draft, is_led=not lane.free):
            tell(f"note: {lane.name}: {note}")
    if args.bound is not None and args.bound < 0:
        raise OptionError("--bound is negative.", "Use 0 to accept only equal logits.")
    check_report(args)
    session = open_session(args, target, drafts)
    from engine.compare.comparison import Comparison

    if scenario:
        prompts = [session.prompt(text) for text in scenario.prompts]
        accepted = scenario.draft_accept or None
    else:
        prompts = [make_prompt(session, args, source) for source in args.sources]
        accepted = args.draft_accept
    if scenario and not lanes:
        return _run_scenario(args, session, scenario, prompts)
    job = Comparison(
        session,
        prompts,
        options,
        lanes,
        bound=args.bound,
        draft_accept=accepted,
        llama_library=args.llama_cpp_lib,
        llama_settings=options_from(args, LlamaSettings),
    )
    record(job, job.step, args.trace, session.content)
    verdicts = job.results()
    lanes_shown = [RunRef(job.trace, verdict.run_id) for verdict in verdicts]
    costs = [RunCost.of(lane) for lane in lanes_shown]
    if deliver_report(
        args, lambda words: compare_report(lanes_shown, environment(), words, verdicts)
    ):
        return int(any(verdict.is_beyond for verdict in verdicts))
    if args.json:
        print_json(
            {
                "lanes": [asdict(verdict) for verdict in verdicts],
                "bound": job.bound,
                "cost": {cost.name: cost.figures() for cost in costs},
                "noise_checks": {
                    verdict.lane: check
                    for verdict in verdicts
                    for check in job.trace.runs[verdict.run_id].pick("noise_check").values()
                    if check
                },
                "states": {
                    verdict.lane: state_drift(job.trace, verdict.run_id)
                    for verdict in verdicts
                    if verdict.state_error is not None
                },
                "sequences": [
                    {"prompt_tokens": list(prompt.tokens), "tokens": tokens, "text": text}
                    for prompt, tokens, text in zip(prompts, job.emitted, job.texts, strict=True)
                ],
                "options": {**asdict(options), **_loaded(session), "model": str(target)},
                "findings": findings_json(job.trace),
            }
        )
    else:
        print_lines((*(heading(scenario) if scenario else ()), *_lines(job, verdicts, costs)))
        print_lines(outcome(scenario, job.trace) if scenario else ())
    return int(any(verdict.is_beyond for verdict in verdicts))


def _run_scenario(
    args: argparse.Namespace, session: Session, scenario: Scenario, prompts: list[Prompt]
) -> int:
    """A scenario without lanes: its sequences and findings."""
    job = session.start(prompts, scenario.options)
    record(job, job.step, args.trace, session.content)
    run = RunRef(job.trace, job.run_id)
    if deliver_report(args, lambda words: run_report(run, environment(), words)):
        return 0
    if args.json:
        print_json(
            {
                "sequences": [asdict(result) for result in job.results()],
                "options": {**asdict(scenario.options), **_loaded(session)},
                "totals": job.summary(),
                "findings": findings_json(job.trace),
            }
        )
        return 0
    print_lines((*heading(scenario), headline(job.summary()), "", *finding_lines(job.trace)))
    print_lines(outcome(scenario, job.trace))
    return 0


def _lines(job: Comparison, verdicts: list[LaneVerdict], costs: Sequence[RunCost]) -> Iterator[str]:
    """The tables of errors and costs, and a sentence for every lane that needs one."""
    n = sum(map(len, job.emitted))
    yield f"{counted(n, 'token')}, bound on the NMSE of the logits {job.bound:.1e}"
    yield ""
    width = max(len(verdict.lane) for verdict in verdicts)
    yield _LINE.format(*LANE_HEADS, width=width)
    for verdict in verdicts:
        yield _LINE.format(*lane_cells(verdict), width=width)
    yield ""
    yield LANE_NOTE
    yield from lane_notes(verdicts, job.bound)
    yield from noise_notes(job.trace, verdicts)
    yield ""
    at_right = [bool(i) for i in range(len(COST_HEADS))]
    yield from in_columns([COST_HEADS, *map(cost_cells, costs)], at_right)
    yield ""
    yield COST_NOTE
    yield from cost_notes(costs)
    if found := list(finding_lines(job.trace)):
        yield from ("", *found)


def _counts(text: str) -> tuple[int, ...]:
    """Integers separated by commas, as an argparse type."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers")
    return tuple(map(int, words))


def _loaded(session: Session) -> dict[str, str]:
    """The effective values of load-time options."""
    return {"compute": session.compute, "device": str(session.device)}


def chosen_scenario(args: argparse.Namespace, options: RunOptions) -> Scenario | None:
    """The scenario of --scenario, None without it. options: those that the arguments give.

    Lanes of llama.cpp may be added to those of a scenario. Raises OptionError for an unknown name
    and for settings that conflict with it.
    """
    if args.scenario is None:
        return None
    scenario = find_scenario(SCENARIOS, args.scenario)
    more = tuple(map(LaneSpec.parse, args.lanes))
    joins = all(lane.llama or lane.kind == PEER for lane in more) and (scenario.lanes or not more)
    if args.sources or not joins or args.chat or options != RunOptions():
        raise OptionError(
            f"Scenario {scenario.name!r} has its own prompts, options and lanes.",
            "Give only a model, lanes of llama.cpp, --compute, --threads, --bound, --json and "
            "--trace with it.",
        )
    return replace(scenario, lanes=(*scenario.lanes, *more))


def heading(scenario: Scenario) -> Iterator[str]:
    yield scenario.title
    yield scenario.about
    yield ""


def outcome(scenario: Scenario, trace: TraceStore) -> Iterator[str]:
    """Whether the scenario's findings were found."""
    found = {finding.rule for finding in recorded(trace)}
    for rule in scenario.expects:
        yield f"expected {rule}: {'found' if rule in found else 'NOT found'}"
