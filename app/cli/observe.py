"""`draftscope observe`: prompts sent to a llama-server, or its clients' requests, and their
rounds."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from app.cli.common import check_files, connect, loading_line
from app.cli.option_lines import declare, refuse_given
from app.cli.output import (
    Interrupted,
    end_text,
    interrupt,
    is_coloured,
    is_terminal,
    note,
    print_json,
    print_line,
    print_lines,
    print_text,
    print_texts,
    signals_wait,
    tell,
)
from app.cli.recorded import (
    check_trace_folder,
    export,
    finding_lines,
    findings_json,
    keep_capture,
    record,
)
from app.cli.rescore import lines
from app.cli.run_arguments import options_from, styled
from engine.errors import ApiKeyError, DraftscopeError, OptionError, ServerError, ServerModelError
from engine.observe.server.reply import TimeLimits
from engine.observe.server.request_options import PER_REQUEST, RequestOptions, why_not_sent
from engine.option_fields import PlacedOption, options_in
from engine.options import RunOptions
from engine.plain_text import counted
from engine.report.run import figure_lines, headline
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.store import TraceStore
from engine.trace.timings import summary

if TYPE_CHECKING:
    from engine.observe.proxy.proxy_run import ProxyRun
    from engine.observe.rescoring.rescore import Rescored
    from engine.observe.rounds.observed_request import ObservedRequest
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.rounds.stream import Timings
    from engine.observe.server.client import ServerClient
    from engine.observe.server.server_run import ServerRun
    from engine.session import Session


_MOST_PAINTED = 2000
"""Most tokens printed to a terminal at once, and characters of one; the rest is only recorded."""
_PATH_WORDS = {"none": "nothing to roll back", "": "path unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, per_request=_per_request())
    parser.set_defaults(model_name="")
    for one in options_in(RunOptions):  # set, so that a note can say that it has no effect
        if why_not_sent(one):
            parser.add_argument(
                *one.option.flags,
                action="store_true" if one.kind is bool else "store",
                default=None,
                dest=f"unsent_{one.option.dest}",
                help=argparse.SUPPRESS,
            )


def _per_request() -> list[PlacedOption]:
    return [one for one in options_in(RunOptions) if one.path in PER_REQUEST]


def run(args: argparse.Namespace) -> int:
    """Send the prompts; what arrived is exported, also after an error or a signal."""
    options = options_from(args, RunOptions)
    more = options_from(args, RequestOptions)
    check_trace_folder(args.trace)
    if args.rescore is not None:
        check_files(args.rescore)
    else:
        refuse_given(args, "--rescore", "--assume-same")
    if args.listen is None and not args.sources:
        raise OptionError("There is no prompt.", "Give one with -p, -f or --tokens.")
    for one in options_in(RunOptions):
        if getattr(args, f"unsent_{one.option.dest}", None):
            why = why_not_sent(one)
            note(f"{one.option.name} is not sent: {why[:1].lower()}{why[1:]}")
    if args.listen is not None:
        words = "@per_request", "@--parallel", f"@{RequestOptions.__module__}.RequestOptions"
        refuse_given(args, "prompts", *words, per_request=_per_request())
        return listen(args, _facts_for_listening(args))
    refuse_given(args, "--listen", "--pass-unchanged")
    model = args.model_name or dict(more.fields).get("model", "")
    client, facts = connect(
        args.url, args.api_key_env, options_from(args, TimeLimits), str(model)[:1000]
    )
    with client:
        return _ask(args, client, facts, options, more)


def _facts_for_listening(args: argparse.Namespace) -> ServerFacts:
    """The server's description of itself; clients bring their own keys, so ours may be missing."""
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.server.address import server_address

    if args.sources:
        raise OptionError("Prompts and --listen cannot be combined.", "Leave out one.")
    if args.rescore is not None:
        raise OptionError(
            "--rescore cannot be combined with --listen.",
            "Re-score the trace afterwards with `draftscope rescore`.",
        )
    try:
        client, facts = connect(
            args.url, args.api_key_env, options_from(args, TimeLimits), args.model_name
        )
    except ServerModelError:  # each client names its model
        return ServerFacts(server_address(args.url), props={"role": "router"})
    except ApiKeyError:
        if args.api_key_env is not None:
            raise
        note("the server names its model only with an API key (--api-key-env)")
        return ServerFacts(server_address(args.url))
    client.close()
    return facts


def _ask(
    args: argparse.Namespace,
    client: ServerClient,
    facts: ServerFacts,
    options: RunOptions,
    more: RequestOptions,
) -> int:
    from engine.observe.server.request_options import request_for
    from engine.observe.server.server_run import ServerRun

    session = None if args.rescore is None else _session(args.rescore)
    _tell_server(client, facts)
    chat = args.chat_template_kwargs if args.chat else None
    requests = [request_for(client, facts, source, options, more, chat) for source in args.sources]
    trace = TraceStore()
    job = ServerRun(client, facts, requests, trace, parallel=options.parallel, log=args.log)
    streaming = not args.json and len(requests) == 1
    ending: DraftscopeError | Interrupted | None = None
    rescored = None
    show = _ContinuationPrinter(job, "" if args.chat else requests[0].text) if streaming else None
    try:
        try:
            record(job, job.advance, None, show=show.show if show else lambda: None)
        except (ServerError, Interrupted) as error:
            ending = error  # what arrived is shown anyway
        if show is not None:
            show.end()
        if session is not None and len(trace.tokens) and not isinstance(ending, Interrupted):
            try:
                rescored = _rescore(args, session, client, job)
            except DraftscopeError as error:
                ending = ending or error
    finally:
        with signals_wait():
            if args.trace is not None:
                export(trace, args.trace)
            if args.capture is not None:
                keep_capture(job.observed, args.capture)
    if args.json:
        print_json(_report(job, client, rescored))
    else:
        for one in job.sequences[1 if show else 0 :]:
            print_line(f"--- sequence {one['seq_id']}")
            print_text(("" if args.chat else one["prompt"]) + one["text"] + "\n\n")
        _print_summary(job, rescored)
    if ending is not None:
        for other in job.errors[1:]:
            note(str(other))
        raise ending
    return int(rescored is not None and rescored.n_changed > 0)


def _tell_server(client: ServerClient, facts: ServerFacts) -> None:
    """Print what is observed: build, model, slots."""
    props, slots = facts.props, _slots(client)
    said = [str(props.get("build_info") or "unknown build")]
    path = props.get("model_path") or facts.model
    if isinstance(path, str) and path:
        said.append(PureWindowsPath(path).name)
    if facts.model and facts.is_llama_server:
        said.append(f"{facts.model} of a router")
    if slots:
        said.append(counted(len(slots), "slot"))
        if isinstance(n_ctx := slots[0].get("n_ctx"), int):
            said.append(f"{n_ctx:,} tokens each")
    tell(f"{facts.engine} {', '.join(said)}"[:200])
    if facts.about:
        tell(facts.about)


def _session(model: Path) -> Session:
    """The server's model, decoded by our engine in f32."""
    from engine.session import Session

    return Session.open(model, compute="f32", progress=loading_line())


def _rescore(
    args: argparse.Namespace, session: Session, client: ServerClient, job: ServerRun
) -> Rescored:
    from engine.observe.rescoring.identity import identify
    from engine.observe.rescoring.rescore import rescore

    facts = job.trace.runs[job.run_id]
    try:
        identity = identify(session, facts, client)
    except ServerError:  # it adds nothing
        identity = identify(session, facts)
    return rescore(
        session,
        job.trace,
        job.run_id,
        loading_line(),
        identity=identity,
        assume_same=args.assume_same,
    )


class _ContinuationPrinter:
    """Prints the prompt, and its continuation as it arrives: on a terminal coloured by kind of
    token, round by round, elsewhere as plain text."""

    def __init__(self, job: ServerRun, prompt: str) -> None:
        self._job, self._tokens = job, job.trace.tokens
        self._is_terminal, self._is_coloured = is_terminal(sys.stdout), is_coloured()
        self._seen = 0
        print_text(prompt)

    def show(self) -> None:
        """Print what has arrived since the last call; a terminal shows the end of long texts."""
        texts = self._job.first_texts
        n = len(self._tokens if self._is_coloured else texts)
        start = max(self._seen, n - _MOST_PAINTED) if self._is_terminal else self._seen
        if start > self._seen:
            print_text(f"\n[{start - self._seen} tokens arrived too fast to be shown] ")
        if self._is_coloured:
            print_texts(_coloured(self._job.trace, start, n))
        else:
            print_text("".join(texts[start:n]))
        self._seen = n

    def end(self) -> None:
        """Print the rest, and an empty line."""
        self.show()
        end_text()


def _coloured(trace: TraceStore, start: int, stop: int) -> Iterator[tuple[str, str]]:
    """Text and colour of each emitted token of the first sequence in rows of `tokens`; empty for
    one whose text is part of a later one."""
    tokens = trace.tokens
    ids = tokens.column("token_id", start, stop).tolist()
    own, kinds = tokens.texts("text", start, stop), tokens.texts("kind", start, stop)
    sequences = tokens.column("seq_id", start, stop).tolist()
    for seq_id, token, text, kind in zip(sequences, ids, own, kinds, strict=True):
        if seq_id == 0 and kind in EMITTED_KINDS:
            known = b"" if text or token == MISSING else trace.pieces.get(token, b"")
            yield styled((text or known.decode("utf-8", "replace"))[:_MOST_PAINTED], kind)


def _print_summary(job: ServerRun, rescored: Rescored | None) -> None:
    if rescored is not None:
        print_lines(lines(rescored))
    print_lines(finding_lines(job.trace))
    print_lines(figure_lines(summary(job.trace, job.run_id)))
    if len(job.trace.rounds):
        print_line(", ".join(f"{n} {name}" for name, n in _paths(job).items()))
    if job.counted.moved:
        print_line(f"{'':<16} {'server':>8} {'here':>8}")
        for name, server, here in _counts(job):
            print_line(f"{name:<16} {server:>8.0f} {'-' if here is None else here:>8}")
    for sentence in filter(None, (job.uncounted, job.unread_log)):
        note(sentence)


def _counts(job: ServerRun) -> Iterator[tuple[str, float, int | None]]:
    """The server's counters and our counts, if it has counters; None is not observed."""
    from engine.observe.rounds.counters import COUNTED, NAMES, counted

    here: Mapping[str, int | None] = counted(job.trace, job.run_id)
    if not len(job.trace.rounds):  # only sums are known, and only of requests
        reported = [one.known.get("told", {}) for one in job.observed.requests]
        here = {
            name: _sum([figures.get(figure) for figures in reported])
            for name, figure in COUNTED.items()
        }
    for name, count in here.items():
        if name in job.counted.moved:
            yield NAMES[name], job.counted.moved[name], count


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _paths(job: ServerRun) -> dict[str, int]:
    """Rounds whose draft length is known, and those with a draft by rollback path."""
    rounds = job.trace.rounds
    found = Counter(rounds=0)
    drafted = rounds.column("num_draft_tokens").tolist()
    for path, n in zip(rounds.texts("rollback_path", 0, len(drafted)), drafted, strict=True):
        if n != MISSING:
            found["rounds"] += 1
        if n > 0:
            found[_PATH_WORDS.get(path, path)] += 1
    return found


def _report(job: ServerRun, client: ServerClient, rescored: Rescored | None) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        **_common_report(job.trace, job.run_id),
        "sequences": job.sequences,
        "counters": {
            name.replace(" ", "_"): {"server": server, "here": here}
            for name, server, here in _counts(job)
        },
        "slots": _slots(client),
        "rescored": asdict(rescored) if rescored else None,
    }


def _common_report(trace: TraceStore, run_id: int) -> dict[str, Any]:
    facts = trace.runs[run_id].pick("server", "model", "requests")
    return {**facts, "totals": summary(trace, run_id), "findings": findings_json(trace)}


def _slots(client: ServerClient) -> list[dict[str, Any]] | None:
    """The server's slots, if it still reports them."""
    try:
        return client.slots()
    except ServerError:
        return None


def listen(args: argparse.Namespace, server: ServerFacts) -> int:
    """Proxy and record until a signal ends it."""
    from engine.observe.proxy.proxy import listening_address
    from engine.observe.proxy.proxy_run import ProxyRun

    host, port = listening_address(args.listen)
    run = ProxyRun(
        server, TraceStore(), host, port, adds_fields=not args.pass_unchanged, log=args.log
    )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # shells ignore SIGINT in background jobs of scripts, but nothing else ends this
        signal.signal(signal.SIGINT, lambda number, _: interrupt(number))
    tell(f"requests to {run.url} are forwarded to {server.address}; Ctrl-C ends it")
    if not run.is_local:
        tell("warning: other machines can use the server through this port.")
    counts = _RequestLines(run)
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
            print_json(_listening_report(run))
        else:
            counts.show()
            print_lines(finding_lines(run.trace))
            print_lines(figure_lines(summary(run.trace, run.run_id)))
        if run.unread_log:
            note(run.unread_log)
    return 0


class _RequestLines:
    """Prints a line for each finished request."""

    def __init__(self, run: ProxyRun) -> None:
        self._run, self._seen = run, 0
        self._open: list[ObservedRequest] = []

    def show(self) -> None:
        """Print what has ended since the last call."""
        self._open += self._run.requests[self._seen :]
        self._seen = len(self._run.requests)
        for request in [one for one in self._open if one.is_over]:
            self._open.remove(request)
            for seq_id, counts in zip(request.seq_ids, request.told, strict=True):
                where = " ".join(
                    str(request.known[name]) for name in ("path", "model") if name in request.known
                )
                totals = summary(self._run.trace, self._run.run_id, seq_id)
                print_line(f"{seq_id} {where}: {_fared(counts, totals, request.known)}")


def _fared(counts: Timings | None, totals: dict[str, Any], request: dict[str, Any]) -> str:
    """The server's own last report on a request, because rounds may still wait for its log. totals:
    the summary of its sequence, used for a reply without timings."""
    if counts is not None:
        totals = {"predicted_n": counts.predicted_n, "mean_acceptance_length": None}
        took, drafted, accepted = counts.predicted_ms, counts.draft_n, counts.draft_n_accepted
        totals["predicted_per_second"] = took and 1e3 * (counts.predicted_n - 1) / took
        totals |= {"draft_n": drafted, "draft_n_accepted": accepted}
        totals["draft_acceptance_rate"] = accepted / max(drafted, 1)
    line = "no figures" if totals["predicted_n"] is None else headline(totals)
    return line + (f"; {request['error']}" if "error" in request else "")


def _listening_report(run: ProxyRun) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        **_common_report(run.trace, run.run_id),
        "listens_at": run.url,
        "sequences": [
            {"seq_id": seq_id, "totals": summary(run.trace, run.run_id, seq_id)}
            for request in run.requests
            for seq_id in request.seq_ids
        ],
    }
