"""`draftscope observe URL --listen HOST:PORT`: other programs talk to the server through us."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING, Any

from app.cli.option_lines import OptionLines
from app.cli.output import (
    Interrupted,
    note,
    print_json,
    print_line,
    print_lines,
    signals_wait,
    tell,
)
from app.cli.recorded import finding_lines, findings_json, keep_capture, record
from engine.report.run import headline
from engine.trace.store import TraceStore
from engine.trace.timings import summary

if TYPE_CHECKING:
    from engine.observe.proxy.proxy_run import ProxyRun
    from engine.observe.rounds.observed_request import ObservedRequest
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.rounds.stream import Timings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of listening."""
    OptionLines(parser).add("""
        listening
          --listen HOST:PORT  let other programs talk to the server through this address, and record
              what they ask until Ctrl-C; port 0 is any free one, without HOST only this machine can
          --pass-unchanged  do not ask for timings per token where a client does not: then only
              clients that ask for them show rounds
    """)


def listen(args: argparse.Namespace, server: ServerFacts) -> int:
    """Pass on and record until a signal comes, which is how this ends."""
    from engine.observe.proxy.proxy import listening_address
    from engine.observe.proxy.proxy_run import ProxyRun

    host, port = listening_address(args.listen)
    run = ProxyRun(
        server, TraceStore(), host, port, adds_fields=not args.pass_unchanged, log=args.log
    )
    tell(f"what comes to {run.url} goes to {server.address}; Ctrl-C ends it")
    if not run.is_local:
        tell("warning: other machines can use the server through this port.")
    counts = _Told(run)
    try:
        record(run, run.advance, args.trace, show=lambda: None if args.json else counts.show())
    except Interrupted as ending:
        if ending.status != 128 + signal.SIGINT:
            raise
    finally:
        if args.capture is not None:
            with signals_wait():
                keep_capture(run.observed, args.capture)
        if args.json:
            print_json(_report(run))
        else:
            counts.show()
            _print_summary(run)
        if run.unread_log:
            note(run.unread_log)
    return 0


class _Told:
    """Prints a line for each request that is over."""

    def __init__(self, run: ProxyRun) -> None:
        self._run, self._seen = run, 0
        self._open: list[ObservedRequest] = []

    def show(self) -> None:
        """Print what has ended since the last time."""
        self._open += self._run.requests[self._seen :]
        self._seen = len(self._run.requests)
        for request in [one for one in self._open if one.is_over]:
            self._open.remove(request)
            for seq_id, counts in zip(request.seq_ids, request.told, strict=True):
                where = " ".join(
                    str(request.known[name]) for name in ("path", "model") if name in request.known
                )
                print_line(f"{seq_id} {where}: {_fared(counts, request.known)}")


def _fared(counts: Timings | None, request: dict[str, Any]) -> str:
    """What the server itself reported last of a request: rounds may still wait for its log."""
    if counts is None:
        line = "no figures"
    else:
        line = f"{counts.predicted_n} tokens"
        if counts.predicted_n > 1 and counts.predicted_ms > 0:
            line += f", {1e3 * (counts.predicted_n - 1) / counts.predicted_ms:.1f} tokens/s"
        if counts.draft_n:
            rate = counts.draft_n_accepted / counts.draft_n
            line += f"; {counts.draft_n_accepted} of {counts.draft_n} drafted tokens accepted"
            line += f" ({rate:.3f})"
    return line + (f"; {request['error']}" if "error" in request else "")


def _print_summary(run: ProxyRun) -> None:
    print_lines(finding_lines(run.trace))
    totals = summary(run.trace, run.run_id)
    print_line(headline(totals))
    print_json(totals)


def _report(run: ProxyRun) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        **run.trace.runs[run.run_id].pick("server", "model"),
        "listens_at": run.url,
        **run.trace.runs[run.run_id].pick("requests"),
        "sequences": [
            {"seq_id": seq_id, "totals": summary(run.trace, run.run_id, seq_id)}
            for request in run.requests
            for seq_id in request.seq_ids
        ],
        "totals": summary(run.trace, run.run_id),
        "findings": findings_json(run.trace),
    }
