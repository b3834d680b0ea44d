"""`draftscope compare --scenario NAME`: ready-made settings instead of one's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from engine.analysis.findings.check import recorded
from engine.compare.lane_spec import LaneSpec
from engine.compare.scenario import Scenario, find_scenario, scenarios
from engine.errors import OptionError
from engine.options import RunOptions
from engine.trace.records import PEER
from engine.trace.store import TraceStore
from resources import SCENARIOS


def add_scenarios(parser: argparse.ArgumentParser) -> None:
    """--scenario and --list-scenarios."""
    group = parser.add_argument_group("scenarios")
    group.add_argument(
        "--scenario",
        metavar="NAME",
        help="prompt, options and lanes that provoke a known failure on the demo model; lanes of "
        "llama.cpp (--lane) may join",
    )
    group.add_argument("--list-scenarios", action="store_true", help="name them and leave")


def list_scenarios() -> Iterator[str]:
    """A line per scenario: its name and title."""
    known = scenarios(SCENARIOS)
    width = max(len(scenario.name) for scenario in known)
    for scenario in known:
        yield f"{scenario.name:<{width}}  {scenario.title}"


def chosen_scenario(args: argparse.Namespace, options: RunOptions) -> Scenario | None:
    """What --scenario names, None without it. `options`: of the arguments.

    Lanes of llama.cpp may join those of a scenario. Raises OptionError for an unknown name and for
    other settings of one's own beside it.
    """
    if args.scenario is None:
        return None
    scenario = find_scenario(SCENARIOS, args.scenario)
    more = tuple(map(LaneSpec.parse, args.lanes))
    joins = all(lane.llama or lane.kind == PEER for lane in more) and (scenario.lanes or not more)
    if args.sources or not joins or args.chat or options != RunOptions():
        raise OptionError(
            f"Scenario {scenario.name!r} has prompts, options and lanes of its own.",
            "Give only a model, lanes of llama.cpp beside its lanes, --compute, --threads, "
            "--bound, --json and --trace with it.",
        )
    return replace(scenario, lanes=(*scenario.lanes, *more))


def heading(scenario: Scenario) -> Iterator[str]:
    """Title and what to look at."""
    yield scenario.title
    yield scenario.about
    yield ""


def outcome(scenario: Scenario, trace: TraceStore) -> Iterator[str]:
    """Whether the findings that the scenario is for were found."""
    found = {finding.rule for finding in recorded(trace)}
    for rule in scenario.expects:
        yield f"expected {rule}: {'found' if rule in found else 'NOT found'}"
