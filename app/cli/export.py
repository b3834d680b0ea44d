"""`draftscope export`: an exported trace in the formats of other tools."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from app.cli.common import check_output, output_file
from app.cli.output import tell
from engine.errors import TraceFileError
from engine.files import written_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace and what to write of it."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="folder of an exported trace, of any engine's run"
    )
    parser.add_argument(
        "--aiperf",
        metavar="FILE",
        type=output_file,
        required=True,
        help="acceptance records as AIPerf has them: a line of JSON for each sequence of each run",
    )


def run(args: argparse.Namespace) -> int:
    """Write the records, tell how many."""
    from engine.observe.files.records.aiperf import acceptance_records
    from engine.trace.reopen import open_trace

    check_output(args.aiperf, "--aiperf")
    store = open_trace(args.trace)
    n_left_out = 0
    lines = []
    for _, _, record in acceptance_records(store):
        if record is None:
            n_left_out += 1
        else:
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False))
    if not lines:
        raise TraceFileError(
            f"{args.trace} has no sequence whose drafts were counted.",
            "Name the trace of a run with a drafter.",
        )
    with written_whole(args.aiperf) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tell(f"{len(lines)} records written to {args.aiperf}")
    if n_left_out:
        tell(
            f"{n_left_out} sequences left out: nothing was drafted, or the number of their steps "
            "is not known"
        )
    return 0
