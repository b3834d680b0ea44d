"""Log lines with sums of other engines: vLLM's periodic lines, SGLang's of decode batches and
finished requests, per-request lines of oMLX, koboldcpp, TabbyAPI and xinfer, and the table of the
script mtp-bench.

vLLM: `vllm/v1/spec_decode/metrics.py` and, of the first generation, `vllm/engine/metrics.py`, whose
counts are cumulative. SGLang: `scheduler_metrics_mixin.py`; its lengths and rates are averages of a
batch, so no counts follow from them. koboldcpp: `gpttype_adapter.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from engine.analysis.acceptance.accept_rules import rule_said
from engine.foreign import COUNT, MOST_TOKENS, OutOfRangeError, whole
from engine.observe.files.intervals import LineRun, made
from engine.observe.files.line_words import (
    BATCH,
    KEY,
    KOBOLD_DRAFTS,
    METRICS,
    PAIR,
    REQUESTS,
    ROW_END,
    SPEED,
    TOTAL,
    batch_saying,
    printed_request,
    source_of,
    speed_saying,
    vllm_saying,
)
from engine.observe.files.records.column_names import NAMES, kind_of, names_of
from engine.observe.files.records.document import Node
from engine.observe.files.records.readers import SGLANG
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.tables import ALL, row_of
from engine.observe.files.records.writing import write_requests
from engine.observe.rounds.log_lines import OfShape
from engine.observe.rounds.log_words import Saying, values_of
from engine.trace.store import TraceStore

VLLM, SGLANG_LOG, ATOM, BENCH = "vllm-log", "sglang-log", "atom-log", "mtp-bench"
KOBOLD = "koboldcpp-log"
UNITS = {VLLM: "intervals", SGLANG_LOG: "intervals", ATOM: "intervals", BENCH: "prompts"}
"""What a sequence is in a run of this shape."""
_MOST_RUNS = 256
_LONGEST = 1 << 14
_TABLE_END = 40
"""Lines of the object after a table."""
_SHAPES = {"vllm": VLLM, "speed": VLLM, "batch": SGLANG_LOG}
_SAYING = (
    ("metrics: ", METRICS, VLLM, vllm_saying),
    ("throughput:", SPEED, VLLM, speed_saying),
    ("Decode batch", BATCH, SGLANG_LOG, batch_saying),
)
"""Lines meaningful by themselves: pattern, run and meaning."""
_OF_ENGINE = {
    "omlx": "mtp-log",
    "koboldcpp": KOBOLD,
    "tabbyapi": "tabbyapi-log",
    "xinfer": "mtp-log",
    "atom": ATOM,
}
"""Run of lines about whole requests."""
_WORDS = (
    *("metrics: ", "Decode batch", "spec_verify_ct", "pred=", "throughput:", "Aggregate", "Draft"),
    *(word for word, *_ in REQUESTS),
)
"""Every line that is read has one of these words."""
_ALONE = "there is no other line of its request next to it"


class LineLogs:
    """Reads lines of such engines from a log, each with its run."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], LineRun] = {}
        self._tables: list[LineRun] = []
        self._n_left_of_table = 0
        self._rules: set[str] = set()
        """Acceptance rules named by lines that repeat arguments."""
        self.last_read: tuple[Saying, str, str] | None = None
        """For the newest line, if others of its shape mean the same: its meaning, its text, and its
        server."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next line belongs to a table."""
        return self._n_left_of_table > 0

    def takes(self, number: int, stream: str, said: str) -> bool:
        """Read a line if it is one of these; returns whether it was. stream: its server, if known
        from more than its text."""
        self.last_read = None
        if self._n_left_of_table:
            self._n_left_of_table -= 1
            self._total(number, TOTAL.findall(said), is_last="}" in said)
            return True
        if any(map(said.__contains__, _WORDS)):
            return self._takes(number, stream, said[:_LONGEST])
        if "speculative" in said and (rule := rule_said(said[:_LONGEST])) is not None:
            self._rules.add(rule.text)
        return False

    def say_all(self, parts: Sequence[tuple[str, OfShape]]) -> list[int]:
        """Read all such lines of a block, by server and shape; returns those not taken."""
        runs: dict[int, tuple[LineRun, list[OfShape]]] = {}
        for source, part in sorted(parts, key=lambda one: int(one[1][2][0])):
            run = self._run(_SHAPES[part[0]], source)
            runs.setdefault(id(run), (run, []))[1].append(part)
        return [line for run, mine in runs.values() for line in run.take(mine)]

    @staticmethod
    def source(prefix: str) -> str:
        """The server identified by a prefix."""
        return source_of(prefix, "")

    def write(self, store: TraceStore, file: str) -> list[int]:
        """Write runs from everything read; returns their ids. Raises TraceFileError for more than a
        trace can hold."""
        found = []
        for run in (*self._runs.values(), *self._tables):
            run.opens(None)
            for label in list(run.waiting):
                run.close(label)
            if (held := run.last.get("held")) is not None:
                run.has_unread(held[0], _ALONE)
            if run.n_unread:
                evidence = f"{run.n_unread:,} of them; the first is {run.first_unread}"
                message = f"Lines that look like totals of an engine could not be read: {evidence}."
                finding = {"rule": "log-unread", "message": message, "evidence": evidence}
                run.findings.append(finding)
            if not run.requests:
                continue
            run.findings += run.slower()
            facts: dict[str, Any] = {"attachment": "log", "observed_findings": run.findings}
            facts |= {"server": {"address": run.name}} if run.name else {}
            # with several servers, later lines do not say whose arguments these are
            facts |= {"accept_rule": min(self._rules)} if len(self._rules) == 1 else {}
            requests = list(map(made, run.requests))
            about = [{"prompt": one.place} if run.shape == BENCH else {} for one in requests]
            found.append(
                write_requests(store, requests, run.shape, file, {}, facts=facts, about=about)
            )
        return found

    @property
    def unread(self) -> tuple[int, str]:
        """Number of unreadable lines, and the first of them with its reason."""
        runs = [*self._runs.values(), *self._tables]
        first = next((run.first_unread for run in runs if run.n_unread), "")
        return sum(run.n_unread for run in runs), first

    def _takes(self, number: int, stream: str, said: str) -> bool:
        """Whether a line was accepted."""
        for word, pattern, shape, saying_of in _SAYING:
            if word in said and (found := pattern.search(said)) is not None:
                run = self._run(shape, source_of(said[: found.start()], stream))
                self._says(run, number, said, saying_of(said, found), found.end())
                return True
        if "'spec_verify_ct'" in said:
            at = said.find("Finish")
            run = self._run(SGLANG_LOG, source_of(said[: max(at, 0)], stream))
            part = said[max(said.find("meta_info"), 0) :]
            self._read(run, number, part, self._finished)
        elif "pred=" in said and "acc=" in said:
            at = 0
            for end in (found.end() for found in ROW_END.finditer(said)):
                self._row(number, said[at:end])
                at = end
            if not at or "pred=" in said[at:]:
                self._row(number, said[at:])
        elif (whose := next((one for one in REQUESTS if one[0] in said), None)) is not None:
            run = self._run(_OF_ENGINE[whose[1]], stream)
            last = made(run.requests[-1]) if run.requests else None
            read = partial(printed_request, word=whose[0], engine=whose[1], before=last)
            self._read(run, number, said, read, last)
        elif (found := KOBOLD_DRAFTS.search(said)) is not None:
            self._on_kobold_drafts(self._run(KOBOLD, stream), number, found)
        elif said.lstrip().startswith("Aggregate") and "{" in said and self._tables:
            self._n_left_of_table = 0 if "}" in said else _TABLE_END
            self._total(number, TOTAL.findall(said), is_last="}" in said)
        else:
            return False
        return True

    def _says(self, run: LineRun, number: int, said: str, saying: Saying, at: int) -> None:
        """Apply a line. at: start of its text."""
        try:
            why = repr(said[at:][:100])
            name, kind, places = saying
            is_taken = run.says(name, kind, *values_of(said, places))
        except OutOfRangeError as error:
            is_taken, why = False, str(error)
        if is_taken:
            self.last_read = saying, said, run.name
        else:
            run.has_unread(number, why)

    def _run(self, shape: str, name: str) -> LineRun:
        run = self._runs.get((shape, name))
        if run is None:
            key = shape, name if len(self._runs) < _MOST_RUNS else ""
            run = self._runs.setdefault(key, LineRun(*key))
        return run

    @staticmethod
    def _read(
        run: LineRun,
        number: int,
        said: str,
        read: Callable[[str], RecordedRequest | None],
        before: RecordedRequest | None = None,
    ) -> None:
        """before: the request that a line may add to."""
        try:
            found, why = read(said), repr(said[:100])
        except OutOfRangeError as error:
            found, why = None, str(error)
        if found is None:
            run.has_unread(number, why)
        elif found is before:
            return
        elif run.shape == KOBOLD:
            found.place = f"line {number}"
            run.opens(found)
            if (held := run.last.pop("held", None)) is not None:
                if _fits(found, held[1:]):
                    _take_drafts(found, held[1:])
                    run.last["before"] = held
                else:
                    run.has_unread(held[0], _ALONE)
        else:
            run.add("", None, partial(made, found))

    @staticmethod
    def _on_kobold_drafts(run: LineRun, number: int, found: re.Match[str]) -> None:
        """A draft of koboldcpp, or the outcome of all drafts of the previous request."""
        drafts = run.last.setdefault("drafts", [0, 0])
        try:
            n, accepted, failed = (whole(one or "0", MOST_TOKENS) for one in found.groups())
        except OutOfRangeError as error:
            run.has_unread(number, str(error))
            return
        if found[1]:
            drafts[:] = drafts[0] + 1, drafts[1] + n
            return
        of, became = run.open, [*run.last.pop("drafts"), accepted, failed]
        is_told = of is None or of.num_accepted_draft_tokens is not None
        if of is None or is_told or ("before" in run.last and not _fits(of, became)):
            if (held := run.last.get("held")) is not None:
                run.has_unread(held[0], _ALONE)
            run.last["held"] = [number, *became]  # of the next request, if it fits
        else:
            _take_drafts(of, became)

    @staticmethod
    def _finished(said: str) -> RecordedRequest | None:
        pairs = PAIR.findall(said)
        values = {name: whole(one) if one.isdigit() else float(one) for name, one in pairs}
        if "spec_verify_ct" not in values:
            return None
        name = re.search(r"'id': '([^']{1,100})'", said)
        stop = re.search(r"'finish_reason': \{'type': '(\w{1,40})'", said)
        found = SGLANG.read(Node(values, "the log", "", (), (), {}))
        found.place, found.stop = name[1] if name else "", stop[1] if stop else ""
        return found

    # -- mtp-bench -----------------------------------------------------------------------------

    def _row(self, number: int, said: str) -> None:
        values = {key.lower(): value for key, value in KEY.findall(said)}
        name = KEY.split(said, 1)[0].strip(" |*`\t:-")
        if "}" in name:  # the end of the previous table, if a page has joined its lines
            name = name.rpartition("}")[2].strip()
            if self._tables:
                self._tables[-1].engine = "closed"
        name = re.split(r"\s{2,}|[\]:|] ", name[-100:])[-1]
        if self._tables and ALL.fullmatch(name) is not None:
            self._total(number, values.items(), is_last=True)
            return
        known = {one.place for one in map(made, self._tables[-1].requests)} if self._tables else ()
        if not self._tables or self._tables[-1].engine == "closed" or name in known:
            if len(self._tables) >= _MOST_RUNS:
                return
            self._tables.append(LineRun(BENCH, ""))
        table = self._tables[-1]
        found = row_of(names_of(list(values)), list(values.values()), name, "")
        if found is not None and values.get("pred", "").isdigit():
            found.engine, found.place = "llama-server", name
            table.requests.append(found)
        else:
            table.has_unread(number, repr(said[:100]))

    def _total(self, number: int, said: Iterable[tuple[str, str]], *, is_last: bool) -> None:
        table = self._tables[-1]
        for name, value in said:
            field_name = NAMES["fields"].get(kind_of(names_of([name])[0]))
            if field_name is None or not value.isdigit():
                continue
            known: list[Any] = [made(one).figures().get(field_name) for one in table.requests]
            if (total := int(value)) > COUNT:
                table.has_unread(number, f"{name} is {total:,}")
            elif None not in known and sum(known) != total:
                table.findings.append(
                    {
                        "rule": "log-lines-missing",
                        "message": "The lines of the table do not add up to its aggregate: a "
                        "line may be missing.",
                        "evidence": f"{name} is {total:,}, but the lines add up to {sum(known):,}",
                    }
                )
        if is_last:
            self._n_left_of_table, table.engine = 0, "closed"


def _fits(request: RecordedRequest, became: Sequence[int]) -> bool:
    """Whether koboldcpp's drafts belong to a request logged after them: each token is an accepted
    one, or replaces a wrong one."""
    *_, accepted, failed = became
    return abs(request.timings["predicted_n"] - accepted - failed) <= 1


def _take_drafts(request: RecordedRequest, became: Sequence[int]) -> None:
    """became: drafts, their tokens, accepted ones, and drafts ended by a wrong one."""
    steps, drafted, accepted, failed = became
    request.num_accepted_draft_tokens = accepted
    # each draft but the last ends with a wrong token or is fully accepted
    if failed <= steps and (steps - failed - 1) * drafted <= accepted * steps <= drafted * steps:
        request.num_spec_steps, request.num_draft_tokens = steps, drafted
