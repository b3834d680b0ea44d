"""`draftscope check-rollback`: llama.cpp's own rollback, every depth and policy; a gate for CI."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import check_files, target_path
from app.cli.option_lines import declare
from app.cli.output import print_json, print_line, print_lines, signals_wait
from app.cli.recorded import check_trace_folder, export
from app.cli.run_arguments import options_from
from engine.files import write_text
from engine.option_fields import grouped, words_of
from engine.options.llama_cpp import GateOptions
from engine.trace.store import TraceStore
from resources import ROLLBACK_SCRIPTS

if TYPE_CHECKING:
    from engine.compare.rollback_check import CheckedLane

_LINE = "{:<24} {:<18} {:>5} {:>6} {:>6} {:>6} {:>9} {:>9} {:>8} {:>5}  {}"
_HEADS = (
    "scenario                 policy             draft planes undone tokens  max NMSE     bound"
    "        S round  outcome"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_test = {one.field: one for one in grouped(GateOptions, "gate")}
    of_model = [of_test.pop(name) for name in ("n_batch", "n_ubatch", "n_slots", "mtp")]
    declare(parser, __name__, of_model=of_model, of_test=of_test.values())


def run(args: argparse.Namespace) -> int:
    """Check; the exit status is the verdict."""
    target = target_path(args)
    check_trace_folder(args.trace)
    check_files(target)
    options = options_from(args, GateOptions)
    from engine.compare.memory_script_parser import memory_scripts
    from engine.compare.rollback_check import check_rollback
    from engine.compare.rollback_outcomes import KNOWN, read_baseline
    from engine.report.rollback_gate import Gate, junit, markdown
    from engine.session import Session
    from engine.threads import use_threads

    baseline = read_baseline(Path(options.baseline)) if options.baseline else None
    session = Session.open(target, compute="f32", device="cpu")
    use_threads(args.threads, session.info)
    trace = TraceStore()
    checked: list[CheckedLane] = []
    try:
        for lane in check_rollback(
            session,
            memory_scripts(ROLLBACK_SCRIPTS),
            args.llama_cpp_lib,
            options,
            trace,
            only=args.only,
        ):
            checked.append(lane)
            if not args.json and len(checked) == 1:
                print_line(_HEADS)
            if not args.json:
                print_line(_line(lane))
    finally:
        if args.trace is not None:
            with signals_wait():
                export(trace, args.trace)
    n_wrong = sum(lane.is_wrong for lane in checked)
    n_known = sum(lane.outcome == KNOWN for lane in checked)
    versions = (facts.compute for facts in trace.runs.values() if facts.lane == "llama.cpp")
    version = next(versions, "") or ""
    words = " ".join(words_of(replace(options, baseline=None))) or "defaults"
    gate = Gate(checked, baseline, version, target.name, words, args.strict)
    for path, text in ((args.junit, junit), (args.markdown, markdown)):
        if path is not None:
            write_text(path, text(gate))
    if args.json:
        print_json(
            {
                "library": version,
                "model": target.name,
                "settings": words,
                "wrong": n_wrong,
                "known": n_known,
                "new": [lane.name for lane in gate.failures],
                "lanes": [_facts(lane) for lane in checked],
            }
        )
    else:
        print_line()
        print_lines(dict.fromkeys(_about(lane) for lane in checked if lane.about))
        print_line(
            f"{version}: {len(checked)} lanes, {n_wrong} wrong, {n_known} with known defects"
        )
        if baseline is not None:
            print_line(f"{len(gate.failures)} new failures, {len(gate.fixed)} fixed")
    return int(bool(gate.failures))


def _line(lane: CheckedLane) -> str:
    verdict = lane.verdict
    measured, n_positions = ("-", "-", "-"), 0 if verdict is None else verdict.n_positions
    if verdict and n_positions:
        state = verdict.state_error
        measured = (
            f"{verdict.worst_nmse:.1e}",
            f"{verdict.bound:.1e}",
            "-" if state is None else f"{state:.1e}",
        )
    numbers = (lane.n_draft, lane.n_rs_seq, lane.n_undone, n_positions)
    where = "-" if lane.round is None else lane.round
    return _LINE.format(lane.scenario, lane.policy, *numbers, *measured, where, lane.outcome)


def _about(lane: CheckedLane) -> str:
    planes = f", {lane.n_rs_seq} planes" if lane.verdict else ""
    return f"{lane.scenario}, {lane.policy}{planes}: {lane.about}"


def _facts(lane: CheckedLane) -> dict[str, Any]:
    facts = {"name": lane.name} | asdict(lane)
    verdict = facts.pop("verdict")
    if verdict is None:
        return facts
    measured = {
        name: value if value is None or math.isfinite(value) else None
        for name in ("worst_nmse", "max_abs", "bound", "state_error", "conv_error")
        for value in (verdict[name],)
    }
    return facts | {"n_positions": verdict["n_positions"]} | measured
