"""`draftscope import`: files of other engines as a trace."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from app.cli.output import print_json, print_line, tell
from engine.errors import OptionError
from engine.plain_text import counted

if TYPE_CHECKING:
    from engine.trace.store import TraceStore


_MOST_SHOWN = 1000
"""Most requests of a run listed by --json."""


def run(args: argparse.Namespace) -> int:
    """Import all files into one trace and print a summary. 1 if a finding is an error."""
    from app.cli.recorded import check_trace_folder, export, finding_lines, findings_json
    from engine.analysis.findings.check import recorded
    from engine.observe.files.importing import before_and_after, import_file
    from engine.trace.store import TraceStore

    if args.log is not None and len(args.files) != 1:
        raise OptionError("--log can be used with only one capture.", "Name one FILE.")
    if args.trace is not None:
        check_trace_folder(args.trace)
    vocabulary = None
    if args.model is not None:  # imported on demand: a quarter of the start-up time
        from engine.gguf.file import GgufFile
        from engine.gguf.tokenizer import Tokenizer

        with GgufFile.open(args.model) as file:
            vocabulary = Tokenizer.from_gguf(file)
    store = TraceStore()
    for path, later in before_and_after(args.files):
        runs = import_file(
            store, path, name=args.name, log=args.log, later=later, vocabulary=vocabulary
        )
        if not args.json:
            for run_id in runs:
                record = store.runs[run_id].record
                print_line(f"{record.file if record else path.name}: {_line(store, run_id)}")
    if args.json:
        found = {
            "runs": [_figures(store, run_id) for run_id in store.runs],
            "findings": findings_json(store),
        }
        print_json(found)
    else:
        for line in finding_lines(store):
            tell(line, "")
    if args.trace is not None:
        export(store, args.trace)
    return int(any(finding.severity == "error" for finding in recorded(store)))


def _figures(store: TraceStore, run_id: int) -> dict[str, Any]:
    n = int((store.rounds.column("run_id") == run_id).sum())
    names = ("source", "attachment", "model", "server", "speculative_types", "stops", "summary")
    facts = store.runs[run_id]
    found = {"run": run_id, "rounds": n} | facts.pick(*names, "unknown_keys")
    return found | (facts.pick("requests") if len(facts.stops or ()) <= _MOST_SHOWN else {})


def _line(store: TraceStore, run_id: int) -> str:
    """One line: the server if there are several, sequences, rounds, tokens, acceptance."""
    from app.trace_models.run_facts import counts_of
    from engine.observe.files.line_logs import UNITS

    figures, facts = _figures(store, run_id), store.runs[run_id]
    summary = figures["summary"]
    tokens, drafted = summary.get("predicted_n"), summary.get("draft_n")
    unit = UNITS.get(facts.record.shape if facts.record else "", "requests")
    n, n_rounds = len(figures["stops"]), figures["rounds"]
    is_log = "log" in (facts.attachment or "")
    parts = [
        *filter(None, [facts.server.address if facts.server and is_log else ""]),
        counted(n, unit.removesuffix("s")),
        counted(n_rounds, "round") if n_rounds else "rounds not observed",
        "tokens not known" if tokens is None else counted(tokens, "token"),
    ]
    if drafted:
        parts.append(f"{summary['draft_n_accepted']:,} of {drafted:,} drafted accepted")
    elif drafted is None:
        counts = [*counts_of(facts.requests or [])]
        parts += counts or ["drafted tokens not known (the server's log or /metrics may have them)"]
    if unread := figures["unknown_keys"]:
        parts.append(f"{counted(len(unread), 'key')} kept but not used")
    return ", ".join(parts)
