"""`draftscope export`: an exported trace in other tools' formats, or as a page to share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.cli.output import tell
from engine.errors import OptionError, TraceFileError
from engine.files import write_text
from engine.plain_text import counted

if TYPE_CHECKING:
    from engine.trace.run_ref import RunRef
    from engine.trace.store import TraceStore


def run(args: argparse.Namespace) -> int:
    from engine.report.session_data import chosen_runs
    from engine.trace.reopen import open_trace

    if all(getattr(args, name) is None for name in ("html", "perfetto", "aiperf")):
        raise OptionError(
            "No format is given.", "Give --html FILE, --perfetto FILE or --aiperf FILE."
        )
    store = open_trace(args.trace)
    runs = list(chosen_runs(store, args.runs))
    if args.html is not None:
        from app.trace_models.session_page import write_session_page

        write_session_page(runs, args.trace.absolute().name, args.html)
        tell(f"page with {counted(len(runs), 'run')} written to {args.html}")
    if args.perfetto is not None:
        from engine.trace.perfetto import write_perfetto

        n = write_perfetto(runs, args.perfetto)
        tell(f"{counted(n, 'event')} written to {args.perfetto}")
    if args.aiperf is not None:
        _write_aiperf(store, runs, args)
    return 0


def _write_aiperf(store: TraceStore, runs: Sequence[RunRef], args: argparse.Namespace) -> None:
    from engine.observe.files.records.aiperf import acceptance_records

    chosen = {one.run_id for one in runs}
    n_left_out = 0
    lines = []
    for run_id, _, record in acceptance_records(store):
        if run_id not in chosen:
            continue
        if record is None:
            n_left_out += 1
        else:
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False))
    if not lines:
        raise TraceFileError(
            f"{args.trace} has no sequence with counted drafts.",
            "Name the trace of a run with a drafter.",
        )
    write_text(args.aiperf, "\n".join(lines) + "\n")
    tell(f"{counted(len(lines), 'record')} written to {args.aiperf}")
    if n_left_out:
        tell(
            f"{counted(n_left_out, 'sequence')} left out: no drafts, or an unknown number of steps"
        )
