"""Recorded work: rounds whose trace is exported at the end, whatever happens, and its output:
findings, --report and --markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.output import Interrupted, on_signal, print_lines, tell
from engine.analysis.findings.check import recorded, with_consequences
from engine.errors import OptionError, TraceFileError
from engine.files import unwritable
from engine.gguf.content import ContentHash
from engine.report.page import write_report
from engine.report.parts import Report
from engine.report.text import markdown
from engine.trace.export import check_export, export_csv
from engine.trace.facts import Finding
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.compare.comparison import Comparison
    from engine.conversation.conversation import TurnRun
    from engine.observe.proxy.proxy_run import ProxyRun
    from engine.observe.rounds.observed_run import ObservedRun
    from engine.observe.server.server_run import ServerRun
    from engine.run import Run


_CONTENT_S = 1.0
"""Longest wait of an export for the tensor hash, seconds."""
_LATE = ", without the hash of the tensors, which was not ready yet"


def check_trace_folder(folder: Path | None) -> None:
    """Refuse a --trace folder that cannot be written, before any work is done.

    Raises OptionError for a folder with other contents too.
    """
    check_folder(folder, "--trace", check_export)


def check_folder(folder: Path | None, option: str, check: Callable[[Path], None]) -> None:
    """The same for the folder of any option; check raises OSError or TraceFileError for it."""
    if folder is None:
        return
    try:
        check(folder)
    except (OSError, ValueError) as error:
        shown = f"{option} {str(folder)[:80]}"
        raise unwritable(shown, error, "Name another folder.") from error
    except TraceFileError as error:  # an invalid argument, like any other
        raise OptionError(error.message, error.remedy) from error


def record(
    job: Run | TurnRun | Comparison | ServerRun | ProxyRun,
    advance: Callable[[], bool],
    folder: Path | None,
    content: ContentHash | None = None,
    show: Callable[[], None] = lambda: None,
) -> None:
    """Call `advance` until it returns False, and `show` after each call; then stop and export.

    The trace is also exported after an error. A signal ends the work between two rounds; the trace
    is exported and Interrupted raised. content: the model's tensor hash for the export, started
    with the first token.
    """
    if folder is not None and content is not None:
        content.start(lambda: job.done or any(getattr(job, "emitted", ())))
    came: list[int] = []
    with on_signal(came.append):
        try:
            more = True
            while more and not came:
                more = advance()
                show()
        finally:
            job.stop()
            if folder is not None:
                export(job.trace, folder, content)
    if came:
        raise Interrupted(came[0])


def keep_capture(run: ObservedRun, path: Path) -> None:
    """Write the requests to a server and its replies, and print the path. Raises TraceFileError."""
    from engine.observe.files.capture import capture_of, write_capture

    write_capture(path, capture_of(run, path.name.split(".")[0]))
    whole = "" if run.raw is None or run.raw.is_whole else (", cut at the size limit")
    tell(f"capture written to {path}{whole}")


def export(trace: TraceStore, folder: Path, content: ContentHash | None = None) -> None:
    is_known = content is None or content.wait(_CONTENT_S)
    export_csv(trace, folder)
    tell(f"trace written to {folder}{'' if is_known else _LATE}")


def finding_lines(trace: TraceStore, run_id: int | None = None) -> Iterator[str]:
    """A line per finding: severity, rule, place, message; for a root cause also the suggestion.
    Consequences are indented below. run_id: of that run alone."""
    for cause, following in with_consequences(_recorded(trace, run_id)):
        yield f"{_line(trace, cause)} {cause.suggestion}"
        for finding in following:
            yield f"  follows: {_line(trace, finding)}"


def _recorded(trace: TraceStore, run_id: int | None) -> list[Finding]:
    return [one for one in recorded(trace) if run_id is None or one.run_id == run_id]


def findings_json(trace: TraceStore, run_id: int | None = None) -> list[dict[str, Any]]:
    """The findings as JSON objects, with the lane's name, null outside comparisons, and the rule of
    the root cause, null for a root cause. run_id: as above."""
    found = _recorded(trace, run_id)
    cause_of = {
        id(one): cause.rule for cause, following in with_consequences(found) for one in following
    }
    return [
        {
            "lane": trace.runs[finding.run_id].lane,
            **asdict(finding),
            "cause": cause_of.get(id(finding)),
        }
        for finding in found
    ]


def _line(trace: TraceStore, finding: Finding) -> str:
    where = f" ({place})" if (place := ", ".join(_place(trace, finding))) else ""
    return f"{finding.severity}: {finding.rule}{where}: {finding.message}"


def _place(trace: TraceStore, finding: Finding) -> Iterator[str]:
    if lane := trace.runs[finding.run_id].lane:
        yield lane
    if finding.round is not None:
        yield f"round {finding.round}"
    if finding.seq_id:
        yield f"sequence {finding.seq_id}"


def check_report(args: argparse.Namespace) -> None:
    """Refuse two output formats. Raises OptionError."""
    if args.markdown and args.json:
        raise OptionError("--markdown and --json are both given.", "Leave one of them out.")


def deliver_report(args: argparse.Namespace, make: Callable[[list[str]], Report]) -> bool:
    """Write and print the report if requested; returns whether it was printed.

    make: makes the report from the words of the command line.
    """
    if args.report is None and not args.markdown:
        return False
    report = make(["draftscope", *getattr(args, "words", ())])
    if args.report is not None:
        write_report(report, args.report)
        tell(f"report written to {args.report}")
    if args.markdown:
        print_lines(markdown(report).removesuffix("\n").split("\n"))
    return bool(args.markdown)
