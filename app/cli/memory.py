"""`draftscope memory`: memory scripts under rollback policies, as a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from app.cli.common import open_session, target_path
from app.cli.option_lines import declare, names_of, refuse_given
from app.cli.output import in_columns, print_line, print_report, signals_wait
from app.cli.recorded import check_trace_folder, export
from app.cli.run_arguments import options_from
from engine.compare.lane_spec import LLAMA, LLAMA_POLICIES
from engine.compare.memory_script import MemoryScript
from engine.compare.memory_script_parser import FORMAT, memory_scripts, read_script
from engine.errors import OptionError, RollbackRefusedError
from engine.options import ROLLBACK_POLICIES
from engine.options.llama_cpp import LlamaSettings
from engine.trace.store import TraceStore
from resources import MEMORY_SCRIPTS, ROLLBACK_SCRIPTS

if TYPE_CHECKING:
    from engine.compare.memory_player import MemoryPlay, StatementOutcome
    from engine.session import Session

OURS = "draftscope"
_FILLS = ("00", "3E", "nan")
_LINE = "{:<{width}}  {:<10}  {:<7}  {:>6}  {:>9}  {:>7}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        __name__,
        policies=names_of(ROLLBACK_POLICIES, or_all=True),
        all_policies=tuple(ROLLBACK_POLICIES),
        format=FORMAT,
    )
    parser.set_defaults(rollback=tuple(ROLLBACK_POLICIES), compute="f32")


def run(args: argparse.Namespace) -> int:
    """Play scripts; what was recorded is exported, also after an error or Ctrl-C."""
    if args.list:
        known = [(one.name, one.title) for one in memory_scripts(MEMORY_SCRIPTS)]
        print_report(args, dict(known), in_columns(known, (False, False)))
        return 0
    names = args.scripts
    if names and names[-1].endswith(".gguf") and args.model is None:
        *names, model = names
        args.model = Path(model)
    scripts = memory_scripts(MEMORY_SCRIPTS) if args.all else ()
    scripts += tuple(_script(name) for name in names)
    if not scripts:
        raise OptionError("No script is given.", "Name one, or run all bundled ones with --all.")
    target = target_path(args)
    if args.engine == LLAMA:
        args.rollback = tuple(each for each in args.rollback if each in LLAMA_POLICIES)
        if not args.rollback or args.trace is not None or args.fill != _FILLS[-1]:
            raise OptionError(
                "llama.cpp does not have that policy, or does not support --trace or --fill.",
                f"Leave out --trace and --fill, and choose from {', '.join(LLAMA_POLICIES)}.",
            )
    else:
        refuse_given(args, f"--engine {LLAMA}", "+llama-library")
    check_trace_folder(args.trace)
    session = open_session(args, target)
    trace = TraceStore()
    rows: list[dict[str, Any]] = []
    try:
        if not args.json:
            width = max(len(script.name) for script in scripts)
            heads = ("script", "policy", "verdict", "checks", "max NMSE", "ms")
            print_line(_LINE.format(*heads, width=width))
        for script in scripts:
            for policy in args.rollback:
                rows.append(_played(args, session, script, policy, trace))
                session.files.check()
                if not args.json:
                    print_line(_line(rows[-1], width))
    finally:
        if args.trace is not None:
            with signals_wait():
                export(trace, args.trace)
    print_report(args, {"compute": session.compute, "scripts": rows}, _failures(rows))
    return int(any(row["verdict"] == "failed" for row in rows))


def _script(name: str) -> MemoryScript:
    """A bundled script by name, else a file."""
    for folder in (MEMORY_SCRIPTS, ROLLBACK_SCRIPTS):
        bundled = folder / f"{name}.toml"
        if bundled.parent == folder and bundled.is_file():
            return read_script(bundled)
    if not Path(name).exists():
        known = [one.name for one in memory_scripts(MEMORY_SCRIPTS)]
        near = next((one for one in known if name in one), "") or ", ".join(known)
        raise OptionError(f"There is no script {name[:80]!r}.", f"Name a file, or one of {near}.")
    return read_script(Path(name))


def _played(
    args: argparse.Namespace, session: Session, script: MemoryScript, policy: str, trace: TraceStore
) -> dict[str, Any]:
    from engine.compare.memory_engine import FILLS, play_script

    if policy not in script.policies:
        return _not_played(script, policy)
    if args.engine == LLAMA:
        return _played_by_llama(args, session, script, policy)
    start = perf_counter()
    play = play_script(session, script, policy, trace, fill=FILLS[args.fill])
    return _to_its_end(play, start)


def _played_by_llama(
    args: argparse.Namespace, session: Session, script: MemoryScript, policy: str
) -> dict[str, Any]:
    from engine.compare import peer_lane
    from engine.compare.llama_memory import LlamaScriptEngine
    from engine.compare.memory_player import MemoryPlay

    assert session.path is not None  # it was opened from a file
    start = perf_counter()
    engine = peer_lane.open_llama(
        session.path, args.llama_cpp_lib, options_from(args, LlamaSettings)
    )
    try:
        play = MemoryPlay(script, policy, LlamaScriptEngine(session, engine))
        return _to_its_end(play, start)
    except (OptionError, RollbackRefusedError) as error:
        return _not_played(script, policy, why_not=str(error))
    finally:
        engine.close()


def _not_played(script: MemoryScript, policy: str, **why_not: str) -> dict[str, Any]:
    verdict = "not for this policy"
    return {"script": script.name, "policy": policy, "verdict": verdict, **why_not}


def _to_its_end(play: MemoryPlay, start: float) -> dict[str, Any]:
    try:
        while play.step():
            pass
    finally:
        play.stop()
    return {
        "script": play.script.name,
        "policy": play.policy,
        "verdict": "failed" if play.failures else "passed",
        "ms": 1e3 * (perf_counter() - start),
        "max_nmse": None if math.isnan(play.worst_nmse) else play.worst_nmse,
        "outcomes": [_outcome(outcome) for outcome in play.outcomes],
    }


def _line(row: dict[str, Any], width: int) -> str:
    cells = "-", "-", "-", "-"
    if "outcomes" in row:
        verdict = row["verdict"].replace("failed", "FAILED")
        nmse = "-" if row["max_nmse"] is None else f"{row['max_nmse']:.1e}"
        cells = verdict, str(len(row["outcomes"])), nmse, f"{row['ms']:.0f}"
    return _LINE.format(row["script"], row["policy"], *cells, width=width)


def _failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How many passed, and a line for every deviation from its script."""
    played = [row for row in rows if "outcomes" in row]
    n_passed = sum(row["verdict"] == "passed" for row in played)
    yield ""
    yield f"{n_passed} of {len(played)} passed"
    for row in rows:
        if "why_not" in row:
            yield f"{row['script']}, {row['policy']}: {row['why_not']}"
    for row in played:
        for at in row["outcomes"]:
            if at["message"]:
                place = f"{row['script']}, {row['policy']}, line {at['line']}"
                yield f"{place}: {at['statement']}: {at['message']}"


def _outcome(outcome: StatementOutcome) -> dict[str, Any]:
    return {
        "line": outcome.statement.line,
        "statement": outcome.statement.text,
        "value": outcome.value if math.isfinite(outcome.value) else None,
        "message": outcome.message,
    }
