"""A server's log alone as runs of a trace, one for each server and start: rounds if it has them,
else the sums at the end of requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from engine.analysis.acceptance.accept_rules import AcceptRule
from engine.analysis.findings.check import record_findings
from engine.errors import TraceFileError
from engine.observe.files.line_logs import LineLogs
from engine.observe.files.records.column_names import SUM_DIGITS, mean_of
from engine.observe.files.records.request import ALL_TIMINGS, RecordedRequest, merged, sum_figures
from engine.observe.files.records.writing import write_requests
from engine.observe.rounds.log_prompts import note_prompts
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.log_rounds import UNKNOWN_TOKEN, Counts, LogRequest, LogRound
from engine.observe.rounds.log_text import utf8_of
from engine.observe.rounds.server_log import ServerLog
from engine.observe.rounds.stream_and_log import path_of
from engine.observe.rounds.stream_rounds import ObservedRound, StreamedToken
from engine.observe.rounds.trace_rows import LOG_COLUMNS, PromptPart, ReadyRow, RowWriter, path_name
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.facts import RunFacts, SourceFacts
from engine.trace.records import MISSING
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

SHAPE = "llama-server-log"
ENGINE = "llama-server"
_PIECE = 1 << 22
_AT_ONCE = 1 << 16
"""Rows prepared at a time."""
_DECIMAL = re.compile(r"\d{1,9}\.\d{1,20}")


def fill_log(store: TraceStore, text: str | bytes | Iterable[bytes], file: str) -> list[int]:
    """Write a log as runs of a trace, with a sequence for each request; returns their ids.

    text: may come in pieces. file: its name. Raises TraceFileError for a text that is not an
    engine's log, or has neither rounds nor sums.
    """
    if isinstance(text, bytes):
        data = text
        text = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
    others = LineLogs()
    earlier: dict[ServerLog, RecordedRequest] = {}
    reader = LogReader(others, lambda server: _fold(server, earlier), has_batches=True)
    try:
        for piece in [text] if isinstance(text, str) else utf8_of(text):
            reader.feed(piece)
        reader.end()
        found = _write_servers(store, reader, earlier, file) + others.write(store, file)
        if not found:
            raise _nothing(file, reader, others)
    finally:
        reader.let_go()
    return found


def _nothing(file: str, reader: LogReader, others: LineLogs) -> TraceFileError:
    """An error for a log that has neither rounds nor sums."""
    unread = [(one.n_unread, one.first_unread) for one in reader.servers] + [others.unread]
    n, first = sum(n for n, _ in unread), next((where for n, where in unread if n), "")
    what = f": {n:,} lines cannot be read, the first is {first}" if n else ""
    if seen := sum(one.n_candidates for one in reader.servers):
        what += f"; it has {seen:,} candidates of drafters, but not which were accepted"
    if n := sum(one.n_undrafted for one in reader.servers):
        what += f"; it has {n:,} rounds with 0 drafted tokens, as builds of late 2025 always print"
    return TraceFileError(
        f"{file} has neither a round nor the end of a request{what}.",
        "Use a log in which at least one request was completed. To log rounds, start "
        "llama-server with -lv 5 and LLAMA_TRACE=1 in its environment.",
    )


def _fold(server: ServerLog, earlier: dict[ServerLog, RecordedRequest]) -> int:
    """Merge the first half of a server's requests if they exceed a trace; returns how many. None if
    the log has their rounds."""
    n = len(server.requests) // 2
    if any(one.has_rows or not one.is_over for one in server.requests[:n]):
        return 0
    parts = [sums_of(one, server, is_alone=False) for one in server.requests[:n] if _has_sums(one)]
    if server in earlier:
        parts.insert(0, earlier[server])
    if parts:
        n_all = sum(one.n_merged for one in parts)
        earlier[server] = merged(parts, f"the first {n_all:,} requests together")
    del server.requests[:n]
    return n


def _write_servers(
    store: TraceStore, reader: LogReader, earlier: Mapping[ServerLog, RecordedRequest], file: str
) -> list[int]:
    """Write runs, one for each server with rounds or sums."""
    found = []
    for server in reader.servers:
        if any(request.has_rows for request in server.requests):
            found.append(_write_rounds(store, server, file))
        else:
            sums = [one for one in server.requests if _has_sums(one)]
            before = [earlier[server]] if server in earlier else []
            if not before and all(one.drafted is None for one in sums):
                drafts = ((k, v) for k, v in server.totals.items() if v[1] or not sums)
                before = [_total(name, counts) for name, counts in drafts]
            if sums or before:
                found.append(_write_sums(store, server, before, sums, file))
    return found


def _total(drafter: str, counts: Counts) -> RecordedRequest:
    """A drafter's totals over all requests, if the log has no others about drafts."""
    found = RecordedRequest(ENGINE, f"{drafter}, all requests together")
    found.num_spec_steps, found.num_draft_tokens, found.num_accepted_draft_tokens = counts[:3]
    found.set_rates(LogRequest(-1, -1, statistics={drafter: (counts, None)}).told_shares)
    names = {"num_draft_tokens": "#gen tokens", "num_accepted_draft_tokens": "#acc tokens"}
    found.check_counts(names)
    return found


def _has_sums(request: LogRequest) -> bool:
    has_counts = request.predicted is not None or request.drafted is not None
    return has_counts or request.prompt_ms is not None or bool(request.speeds)


# -- sums --------------------------------------------------------------------------------------


def sums_of(request: LogRequest, server: ServerLog, *, is_alone: bool = True) -> RecordedRequest:
    """The sums that a server logged for a request, and what follows from them; unless it stays
    alone, without figures that have no meaning in a sum."""
    place = f"slot {request.slot}, task {request.task}" if request.task >= 0 else ""
    found = RecordedRequest(ENGINE, place, stop="end" if request.is_over else "lost")
    n_cached, processed = request.n_cached, request.n_processed
    if processed is None and request.n_prompt is not None and n_cached is not None:
        processed = max(request.n_prompt - n_cached, 0)
    n = request.predicted
    timed: tuple[float | None, ...] = n_cached, processed, n
    if is_alone:
        timed += (
            request.prompt_ms,
            *_rates(request.prompt_ms, processed),
            request.predicted_ms,
            *_rates(request.predicted_ms, request.n_timed),
            *_rates(request.predicted_ms, n),
        )
        found.record = {"speeds": request.speeds} if request.speeds else {}
    found.timings = {k: v for k, v in zip(ALL_TIMINGS, timed, strict=False) if v is not None}
    found.num_draft_tokens, found.num_accepted_draft_tokens = request.drafted, request.accepted
    if request.drafted is None and request.is_released and n is not None and server.says_drafts:
        found.num_draft_tokens = found.num_accepted_draft_tokens = (
            0  # otherwise there would be a line
        )
        found.num_spec_steps = 0
    if request.drafted and request.accepted is not None:
        if _DECIMAL.fullmatch(request.ratio):
            said = "draft acceptance", float(request.ratio), request.accepted, request.drafted
            found.check_ratio(*said, "accepted", "generated", within=SUM_DIGITS)
        found.num_spec_steps = _steps(found, request, server, request.accepted)
        if rates := request.rates or (request.told_shares if found.num_spec_steps else []):
            found.set_rates(rates)
    return found


def _rates(ms: float | None, n: int | None) -> tuple[float | None, float | None]:
    """Milliseconds per token of n tokens, and tokens per second."""
    if ms is None or n is None:
        return None, None
    return ms / n if n else None, 1e3 * n / ms if ms else None


def _steps(
    found: RecordedRequest, request: LogRequest, server: ServerLog, accepted: int
) -> int | None:
    """Verifications with a draft: the drafters' count, if it is of this request alone, else the
    number that gives the mean length, if any."""
    steps = None
    is_first = server.is_whole and request is server.requests[0]
    if request.statistics:
        drafts = tokens = confirmed = 0
        for now, before in request.statistics.values():
            n, m, k, _ = before or (0, 0, 0, "")
            drafts, tokens = drafts + now[0] - n, tokens + now[1] - m
            confirmed += now[2] - k
        if is_first and len(server.requests) == 1:  # drafters may draft tokens dropped later
            found.check(
                confirmed == accepted and tokens >= (request.drafted or 0),
                ("draft acceptance", "statistics"),
                f"draft acceptance is {accepted:,} of {request.drafted:,}, but in the statistics "
                f"of the drafters {confirmed:,} of {tokens:,}",
            )
        if (tokens, confirmed) == (request.drafted, accepted):
            steps = drafts
    if request.mean_length:
        mean, half = mean_of(request.mean_length)
        if steps:
            keys = "mean acceptance length", "accepted", "drafts of the statistics"
            whole, within = accepted + steps, half + SUM_DIGITS
            found.check_ratio(keys[0], mean, whole, steps, *keys[1:], within=within)
        elif (steps := found.steps_of(mean, half, request.rates or ())) is None:
            found.given["mean_acceptance_length"] = mean
    return steps


def _write_sums(
    store: TraceStore,
    server: ServerLog,
    before: Sequence[RecordedRequest],
    requests: Sequence[LogRequest],
    file: str,
) -> int:
    facts = RunFacts(_facts(server, file) | {"attachment": "log"})
    note_prompts(facts, enumerate((one.prompt for one in requests), len(before)))
    return write_requests(
        store,
        [*before, *(sums_of(request, server) for request in requests)],
        SHAPE,
        file,
        {},
        version=server.build,
        facts=facts,
        about=[*({} for _ in before), *map(_about, requests)],
    )


def _facts(server: ServerLog, file: str) -> dict[str, Any]:
    named = chain(server.totals, *(one.statistics for one in server.requests))
    drafters = server.drafters or list(dict.fromkeys(named))
    return {
        "record": {"file": file},
        "model": {"name": server.model} if server.model else None,
        "speculative_types": drafters,
        "synthetic": server.is_synthetic,
        "accept_rule": rule.text if (rule := server.rule) else None,
        "observed_findings": server.unread,
        "server": server.said,
    }


def _about(request: LogRequest) -> dict[str, Any]:
    whose = {"slot": request.slot, "task": request.task} if request.task >= 0 else {}
    return {**whose, "complete": request.is_over}


# -- rounds ------------------------------------------------------------------------------------


def _write_rounds(store: TraceStore, server: ServerLog, file: str) -> int:
    reach = PlaneReach()
    if server.n_rs_seq is not None:
        reach.tell(server.n_rs_seq)
    facts = _facts(server, file) | {
        "attachment": "light-log" if server.is_light else "log",
        "requests": [],
    }
    source = SourceFacts(ENGINE, server.build)
    writer = TraceWriter.begin(store, source, facts, columns=LOG_COLUMNS)
    sums = [sums_of(one, server) for one in server.requests]
    note_prompts(writer.facts, enumerate(one.prompt for one in server.requests))
    for seq_id, (request, told) in enumerate(zip(server.requests, sums, strict=True)):
        figures = told.figures()
        if request.has_rows:  # the rows give the others
            figures = {name: value for name, value in figures.items() if value is not None}
        about = {"seq_ids": [seq_id], **_about(request), "told": figures}
        about |= {"record": told.record} if told.record else {}
        writer.facts.add_to("requests", about)
        if (lost := _lost_rounds(request)) is not None:
            writer.facts.add_to("observed_findings", lost | {"seq_id": seq_id})
    rows = RowWriter(writer, reach)
    rows.drafters, rows.log_pieces = server.drafters, server.pieces
    rows.rule = rule = server.rule or AcceptRule()
    if server.is_light:
        _write_light(writer, server, rows.drafters, reach, rule.name)
    else:
        ready = [
            row
            for seq_id, request in enumerate(server.requests)
            for row in _full(seq_id, request, server.has_times)
        ]
        start = min((row.t_ms for row in ready if row.t_ms is not None), default=0.0)
        for row in sorted(ready, key=lambda one: one.t_ms or 0.0):
            rows.write(row, start)
        rows.flush()
    if all(one.predicted is not None for one in server.requests):
        together = {name: v for name, v in sum_figures(sums).items() if v is not None}
        writer.set_facts(told=together)
    writer.end(["end" if request.is_over else "lost" for request in server.requests])
    record_findings(store, [writer.run_id])
    return writer.run_id


def _lost_rounds(request: LogRequest) -> dict[str, Any] | None:
    """A finding on rounds missing from the log, by its sums; gaps between tokens have shown it
    already."""
    if request.drafted is None or request.is_broken or request.n_missing or not request.rounds:
        return None
    complete = [(one.accepted, one.drafted) for one in request.rounds if one.is_complete]
    parts = [np.array(complete, np.int64).reshape(-1, 2)]
    parts += [batch[:, :2] for _, batch in request.batches]
    logged = tuple(np.concatenate(parts).sum(0).tolist())
    if logged == (request.accepted, request.drafted):
        return None
    sums = (
        f"the log lines have {logged[0]:,} accepted of {logged[1]:,} drafted tokens, the server's "
        f"totals {request.accepted:,} of {request.drafted:,}"
    )
    rule, message = "log-lines-missing", "The log does not have all rounds of a request: lines "
    message += "are missing, or it starts in the middle. Totals are the server's."
    if request.first is not None and request.predicted is not None and not request.batches:
        left = request.predicted - 1 - sum(n + 1 for n, _ in complete[:-1])
        if len(complete) == len(request.rounds) and 1 <= left <= complete[-1][0] + 1:
            rule, message = "counters-contradict", "The server's totals of a request are not those "
            message += "of its rounds, none of which is missing."
    return {"rule": rule, "message": message, "evidence": sums}


def _full(seq_id: int, request: LogRequest, has_times: bool) -> Iterator[ReadyRow]:
    """The prompt and the rounds of a request."""
    n_prompt, n_cached = request.n_prompt or 0, request.n_cached or 0
    begun_ms = (request.first_us or 0) / 1e3
    if request.first is not None:
        part = PromptPart(n_cached, max(n_prompt - n_cached, 0), request.prompt_ms, 0.0)
        first = ObservedRound(0.0, 0.0, 0, 0, 1, _tokens([request.first]), "")
        yield ReadyRow(begun_ms if has_times else None, seq_id, n_prompt, first, part)
    rounds, n = request.rounds, request.predicted or 0
    is_part = request.n_missing > 0 or 0 < request.last_n < n
    # tokens without a numbered line are numbered by the rounds around them
    for later, one in pairwise(reversed(rounds)) if is_part else ():
        if one.first_n is None and later.first_n is not None:
            one.first_n = later.first_n - one.accepted - 1 - one.restored
    for one, later in pairwise(rounds) if is_part else ():
        if later.first_n is None and one.first_n is not None:
            later.first_n = one.first_n + one.accepted + 1 + one.restored
    number, before = 2, 0.0
    for i, one in enumerate(rounds):
        end_ms = one.end_us / 1e3 - begun_ms if one.end_us is not None else before
        is_cut = not request.is_closed(i)
        path = "" if is_cut and not one.is_complete else path_of(one)
        after = rounds[i + 1].first_n if i + 1 < len(rounds) else n + 1 if n else None
        tokens = _whole_tokens(one, after if is_part and not is_cut else None)
        row = ObservedRound(
            max(end_ms, before),
            before,
            one.drafted,
            one.accepted,
            one.first_n or number,
            tokens,
            path,
            is_cut=is_cut or len(tokens) < one.accepted + 1,
            log=one,
        )
        yield ReadyRow(begun_ms + row.name_ms if has_times else None, seq_id, n_prompt, row)
        number, before = row.first + row.emitted, row.name_ms


def _whole_tokens(one: LogRound, after: int | None) -> tuple[StreamedToken, ...]:
    """The tokens of a round, including those without lines. after: number of the first token of the
    next round, if lines are missing."""
    found = _tokens(one.tokens)
    if after is None or one.first_n is None or not one.is_complete or len(found) > one.accepted:
        return found
    n = min(after - one.first_n, one.accepted + 1 + one.restored)
    return found + (StreamedToken(),) * (n - len(found))


def _write_light(
    writer: TraceWriter, server: ServerLog, drafters: Sequence[str], reach: PlaneReach, rule: str
) -> None:
    """Write the rounds with a draft, in columns: there are millions of them. Rounds without a draft
    are not logged, nor are tokens."""
    n_each, table, single = _light_rounds(server.requests)
    seq_id = np.repeat(np.arange(len(n_each), dtype=np.int32), n_each)
    accepted, drafted = (table[:, i].astype(np.int32) for i in (0, 1))
    us, restored = table[:, 2].copy(), np.zeros(len(table), np.int32)
    del table
    sizes, n_max = np.full(len(us), MISSING), np.full(len(us), MISSING, np.int32)
    for one, values in zip((restored, sizes, n_max), single[:, 1:].T, strict=True):
        one[single[:, 0]] = values
    whole = accepted + 1 + restored
    ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(whole, dtype=np.int64)])
    before = ahead[:-1] - np.repeat(ahead[np.cumsum(n_each) - n_each], n_each)
    most = [2**40 if r.predicted is None else max(r.predicted - 1, 0) for r in server.requests]
    left = np.maximum(np.repeat(most, n_each) - before, 0)
    emitted = np.minimum(whole, left).astype(np.int32)
    code = writer.store.text_pool.code
    kinds = np.array([code(one) for one in ("end", "target", "bonus", "replacement")], np.int32)
    kind = np.where(accepted == drafted, 2, 3).astype(np.int8)
    kind = np.where((emitted == accepted + 2) | (drafted == 0), 1, kind)
    kind = np.where((whole > left) & (emitted <= accepted) & (drafted > 0), 0, kind)
    del ahead, before, left, whole
    path = np.where(restored > 0, 2, np.where(drafted > accepted, 1, 0)).astype(np.int8)
    names = "none", "seq_rm", "restore"
    paths = np.array([code(path_name(one, reach)) for one in names], np.int32)
    drafter = code(drafters[0]) if len(drafters) == 1 else 0
    times = np.where(us < 0, 0.0, us / 1e3)
    # before each request's first row a row for its prompt, which ended at some earlier time
    firsts = np.flatnonzero(np.diff(seq_id, prepend=-1))
    order = np.insert(np.arange(len(firsts), len(firsts) + len(us)), firsts, np.arange(len(firsts)))
    order = order[np.argsort(np.concatenate([times[firsts], times])[order], kind="stable")]
    start = times[us >= 0].min(initial=np.inf)
    writer.store.tables["rounds"].reserve(len(order))
    for at in range(0, len(order), _AT_ONCE):
        mine = order[at : at + _AT_ONCE]
        is_first = mine < len(firsts)
        rows = np.where(is_first, firsts[mine * is_first], mine - len(firsts))
        drafts, undone, again = drafted[rows], drafted[rows] - accepted[rows], restored[rows]
        columns: dict[str, np.ndarray] = {
            "t_ms": np.where(us[rows] < 0, np.nan, np.maximum(times[rows] - start, 0.0)),
            "drafter": np.where(drafts > 0, drafter, 0).astype(np.int32),
            "accept_rule": np.where(drafts > 0, code(rule), 0).astype(np.int32),
            "num_draft_tokens": drafts,
            "num_accepted_draft_tokens": accepted[rows],
            "num_target_tokens": 1 + again,
            "stop_kind": kinds[kind[rows]],
            "rollback_depth": undone,
            "memory_rollback": undone,
            "rollback_path": paths[path[rows]],
            "replay_index": again,
            "verify_width": drafts + 1,
            "checkpoint_bytes": sizes[rows],
            "draft_n_max": n_max[rows],
            "n_rs_seq": np.full_like(drafts, MISSING if reach.n_rs_seq is None else reach.n_rs_seq),
        }
        for name, values in columns.items():
            is_text = name in ("drafter", "accept_rule", "stop_kind", "rollback_path")
            values[is_first] = np.nan if values.dtype == float else 0 if is_text else MISSING
        columns |= {
            "seq_id": seq_id[rows],
            "num_emitted": np.where(is_first, 1, emitted[rows]),
            "round": np.arange(at, at + len(rows)),
        }
        writer.extend("rounds", columns)
        if drafter:
            with_draft = np.flatnonzero(columns["num_draft_tokens"] > 0)
            writer.extend("drafts", {name: columns[name][with_draft] for name in _OF_DRAFTS})


def _light_rounds(requests: Sequence[LogRequest]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The complete rounds of requests: how many each has; int64 [n, 3] tokens accepted and drafted,
    and the time in microseconds, -1 without; and for those in no batch int64 [m, 4] their number,
    whether a checkpoint was restored, its bytes and the longest draft."""
    n_each, parts, single, n = [], [], [], 0
    for request in requests:
        at, before = 0, n
        for end, batch in [*request.batches, (len(request.rounds), np.zeros((0, 3), np.int64))]:
            mine = [one for one in request.rounds[at:end] if one.is_complete]
            more = [(one.restored, one.checkpoint_bytes, one.n_max) for one in mine]
            rows = [(r.accepted, r.drafted, -1 if r.end_us is None else r.end_us) for r in mine]
            single += [
                (i, *(MISSING if v is None else v for v in one)) for i, one in enumerate(more, n)
            ]
            parts += [np.array(rows, np.int64).reshape(-1, 3), batch]
            n, at = n + len(mine) + len(batch), end
        request.batches = []
        n_each.append(n - before)
    return n_each, np.concatenate(parts), np.array(single, np.int64).reshape(-1, 4)


_OF_DRAFTS = ("round", "seq_id", "drafter", "num_draft_tokens")


def _tokens(logged: list[tuple[int, str]]) -> tuple[StreamedToken, ...]:
    return tuple(
        StreamedToken()
        if one == UNKNOWN_TOKEN
        else StreamedToken(one[0], one[1], "\ufffd" not in one[1])
        for one in logged
    )
