"""Lines in which other engines tell sums: vLLM's of every ten seconds, SGLang's of its decode
batches and finished requests, oMLX's of requests, and the table of the script mtp-bench.

vLLM: `vllm/v1/spec_decode/metrics.py` and, of the first generation, `vllm/engine/metrics.py`, whose
counts go on from line to line. SGLang: `scheduler_metrics_mixin.py`; its lengths and rates are
averages of a batch, so no counts follow from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import zip_longest
from operator import ge
from typing import Any, TypeAlias

from engine.analysis.acceptance.accept_rules import rule_said
from engine.foreign_numbers import (
    COUNT,
    LONGEST_DRAFT,
    LONGEST_PART_MS,
    OutOfRangeError,
    real,
    whole,
)
from engine.observe.files.records.document import Node
from engine.observe.files.records.readers import SGLANG
from engine.observe.files.records.request import RecordedRequest, merged
from engine.observe.files.records.writing import write_requests
from engine.observe.rounds.log_lines import name_of, time_of
from engine.observe.rounds.log_words import NOTHING, Saying, Value, values_of
from engine.trace.store import TraceStore

VLLM, SGLANG_LOG, BENCH, MTP_LOG = "vllm-log", "sglang-log", "mtp-bench", "mtp-log"
UNITS = {VLLM: "intervals", SGLANG_LOG: "intervals", BENCH: "prompts"}
"""What a sequence is in a run of this shape."""
_MOST_RUNS = 256
MOST_INTERVALS = 8192
"""Of a run; neighbours of more are taken together, so that a log of months is a run too."""
_LONGEST = 1 << 14
_TABLE_END = 40
"""Lines that the object after a table may have."""
_SUM_DIGITS = 0.01
SIGNS = re.compile(
    r"Spec(?:Decoding|ulative) metrics: |Decode batch[.,][^\n]{0,300}accept (?:len|rate):"
    r"|Decode batch\.[^\n]{0,300}avg_accept_len: |Finish: [^\n]{0,8000}'spec_verify_ct':"
    r"|\bpred=\s{0,9}\d[^\n]{0,40} acc=\s{0,9}\d|\bMTP\[[^\]\s]{1,100}\] finish="
)
"""What a text has in which there are such lines."""
_METRICS = re.compile(r"Spec(?:Decoding|ulative) metrics: ?")
_PROCESSES = re.compile(
    r"\((?:APIServer|EngineCore\w{0,20}|Worker\w{0,20})[^)]{0,40}\)"
    r"|(?:\[|(?<!\S))[\w.]{1,60}\.py:\d{1,6}\]|Engine \d{1,6}:|\b[DTPE]P\d{1,4}\b"
)
_COUNTED = re.compile(
    r"^((?:[^\s:\[]{1,200}:)?)(?:\d{1,9}:(?!\d\d\b)(?=\S)|\s*\d{1,9}\t|\s+\d{1,9} )"
)
"""Numbers that `grep -n`, `cat -n` and `less -N` count lines by."""
_ENGINE = re.compile(r"\bEngine (\d{1,6})\b|EngineCore_(?:DP)?(\d{1,6})\b")
_SPEED = re.compile(
    r"Avg prompt throughput:\s{0,9}([\d.]{1,20})\s{0,9}tokens/s.{0,40}?"
    r"Avg generation throughput:\s{0,9}([\d.]{1,20})"
)
_COUNTS = (
    re.compile(r"\b(?:Accepted|Number of accepted tokens(?: tokens)?):\s{0,9}(\d{1,20})\b(?! ?\.)"),
    re.compile(r"\b(?:Drafted|Number of draft tokens(?: tokens)?):\s{0,9}(\d{1,20})\b(?! ?\.)"),
    re.compile(r"\bNumber of emitted tokens(?: tokens)?:\s{0,9}(\d{1,20})\b"),
    re.compile(r"\bNumber of speculative tokens:\s{0,9}(\d{1,20})\b"),
)
"""Accepted, drafted and emitted tokens, and those of one draft."""
_MEAN = re.compile(r"Mean acceptance length:\s{0,9}(\d{1,9}\.\d{1,9})")
_RATE = re.compile(r"Draft acceptance rate:\s{0,9}(\d{1,9}\.\d{1,9})(%?)")
_THROUGHPUTS = re.compile(r"(Accepted|Drafted) throughput:\s{0,9}([\d.]{1,20})")
_RATES = re.compile(r"Per-position acceptance rate:\s{0,9}")
_ITEM = re.compile(r"\s{0,9}([\d.]{1,20})\s{0,9}(?:,|$|(?=[^\d.\s]))")
_BATCH = re.compile(r"Decode batch[.,:]? ?")
_OF_BATCH = re.compile(
    r"(accept len|accept rate|avg_accept_len|accept_rate|gen throughput \(token/s\)|#running-req)"
    r":\s{0,9}([\d.]{1,20})"
)
_RANK = re.compile(r"\bDP(\d{1,4})\b")
_PAIR = re.compile(r"'(\w{1,60})': (\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,3})?)(?=[,}\s])")
_KEY = re.compile(r"\b([A-Za-z/]{2,12})=\s{0,12}([-\w.%/]{1,24})")
_TOTAL = re.compile(r'"(\w{1,40})":\s{0,9}([\d.]{1,20})')
_MTP = re.compile(
    r"MTP\[([^\]\s]{1,100})\] finish=(\w{1,40}) tokens=(\d{1,20}) .{0,100}?"
    r"accept=(\d{1,20})/(\d{1,20})\b(?:.{0,60}?depth\[([^\]]{1,2000})\])?"
)
"""Of oMLX, when a request ends: by index in the draft the tokens accepted and drafted."""
_TOTALS = {
    "total_draft": "num_draft_tokens",
    "total_draft_accepted": "num_accepted_draft_tokens",
    "total_predicted": "predicted_n",
}


_Line: TypeAlias = RecordedRequest | tuple[Any, ...]
"""Of an engine: an interval by itself, or what comes before its text with its averages, or with
tokens accepted and drafted, and accepted by position."""
_Waiting: TypeAlias = tuple[str, tuple[Any, ...] | None, Callable[[], RecordedRequest]]
"""A line that becomes an interval only if the log is short: its engine, what is enough of it where
it is taken together with others (None if nothing is), and what makes the interval."""


@dataclass(slots=True)
class _Run:
    """Requests, or intervals, that become a run. last: of counts that go on, the ones before.
    speeds: of the engine's last line about them. per: lines that become one interval; waiting:
    those of the next one, by engine: counts, or averages, with where they are from."""

    shape: str
    name: str
    requests: list[RecordedRequest | _Waiting] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, list[int]] = field(default_factory=dict)
    per: int = 1
    waiting: dict[str, list[_Line]] = field(default_factory=dict)
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)
    engine: str = ""
    n_unread: int = 0
    first_unread: str = ""

    def add(
        self, label: str, part: tuple[Any, ...] | None, make: Callable[[], RecordedRequest]
    ) -> None:
        """Another line of an engine, see _Waiting."""
        if self.per == 1:
            self._keep((label, part, make))
            return
        waiting = self.waiting.setdefault(label, [])
        waiting.append(make() if part is None else part)
        if len(waiting) >= self.per:
            self.close(label)

    def _keep(self, one: RecordedRequest | _Waiting) -> None:
        self.requests.append(one)
        if len(self.requests) >= MOST_INTERVALS:
            self.requests = _thinned(self.requests)
            self.per *= 2

    def has_unread(self, number: int, why: str) -> None:
        """A line cannot be read."""
        self.n_unread += 1
        self.first_unread = self.first_unread or f"line {number}: {why}"

    def close(self, label: str) -> None:
        """Make the waiting lines of an engine an interval."""
        lines = self.waiting.pop(label, [])
        if not lines:
            return
        self._keep(_interval(label, lines))


class LineLogs:
    """Takes the lines of such engines out of a log, each with the run that it is of."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _Run] = {}
        self._tables: list[_Run] = []
        self._n_left_of_table = 0
        self._on: dict[str, Callable[..., bool]] = {
            "speed": self._on_speed,
            "vllm": self._on_vllm,
            "batch": self._on_batch,
        }
        self._rules: set[str] = set()
        """Of acceptance, as lines that repeat arguments name them."""
        self.last_read: tuple[Saying, str, str] | None = None
        """Of the newest line, where others of its shape say the same: what it says, its text, and
        the server that it is of."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next line is of a table."""
        return self._n_left_of_table > 0

    def takes(self, number: int, stream: str, said: str) -> bool:
        """Whether a line is one of these, and then taken. stream: the server that it is of, where
        more than its text says so."""
        self.last_read = None
        if self._n_left_of_table:
            self._n_left_of_table -= 1
            self._total(number, said)
        elif (
            "metrics: " in said
            or "Decode batch" in said
            or "spec_verify_ct" in said
            or "pred=" in said
            or "throughput:" in said
            or "Aggregate" in said
            or "MTP[" in said
        ):
            return self._takes(number, stream, said[:_LONGEST])
        elif "speculative" in said and (rule := rule_said(said[:_LONGEST])) is not None:
            self._rules.add(rule.text)
            return False
        else:
            return False
        return True

    def say(self, name: str, number: int, source: str, kind: str, *values: Any) -> bool:
        """A line of a known shape: what it says, its number, its server and its values; False for
        one that has to be looked at as a whole. Raises OutOfRangeError."""
        run = self._run(SGLANG_LOG if name == "batch" else VLLM, source)
        said: bool = self._on[name](run, kind, *values)
        return said

    @staticmethod
    def source(prefix: str) -> str:
        """The server that a prefix names."""
        return source_of(prefix, "")

    def write(self, store: TraceStore, file: str) -> list[int]:
        """Write what was read as runs; returns their ids. Raises TraceFileError for more than a
        trace can hold."""
        found = []
        for run in (*self._runs.values(), *self._tables):
            for label in list(run.waiting):
                run.close(label)
            if run.n_unread:
                evidence = f"{run.n_unread:,} of them; the first is {run.first_unread}"
                message = "Lines look like those of the engine's sums and are not read."
                finding = {"rule": "log-unread", "message": message, "evidence": evidence}
                run.findings.append(finding)
            if not run.requests:
                continue
            facts: dict[str, Any] = {"attachment": "log", "observed_findings": run.findings}
            facts |= {"server": {"address": run.name}} if run.name else {}
            # of several servers, the lines below do not say whose arguments these were
            facts |= {"accept_rule": min(self._rules)} if len(self._rules) == 1 else {}
            requests = list(map(_made, run.requests))
            about = [{"prompt": one.place} if run.shape == BENCH else {} for one in requests]
            found.append(
                write_requests(store, requests, run.shape, file, {}, facts=facts, about=about)
            )
        return found

    @property
    def unread(self) -> tuple[int, str]:
        """How many lines could not be read, and where the first of them is and why."""
        runs = [*self._runs.values(), *self._tables]
        first = next((run.first_unread for run in runs if run.n_unread), "")
        return sum(run.n_unread for run in runs), first

    def _takes(self, number: int, stream: str, said: str) -> bool:
        """Whether a line was taken."""
        saying: Saying | None
        if "metrics: " in said and (found := _METRICS.search(said)) is not None:
            run = self._run(VLLM, source_of(said[: found.start()], stream))
            saying = _vllm_saying(said, found)
        elif "throughput:" in said and (found := _SPEED.search(said)) is not None:
            head = max(said.find("Engine"), 0)
            run = self._run(VLLM, source_of(said[:head], stream))
            engine = _engine(said)
            places = (0, head, None), engine, *((*found.span(i), 1e9) for i in (1, 2))
            saying = "speed", "", places
        elif "Decode batch" in said and "accept" in said:
            found = _BATCH.search(said)
            if found is None:
                return False
            run = self._run(SGLANG_LOG, source_of(said[: found.start()], stream))
            saying = _batch_saying(said, found)
        elif "'spec_verify_ct'" in said:
            at = said.find("Finish")
            run = self._run(SGLANG_LOG, source_of(said[: max(at, 0)], stream))
            part = said[max(said.find("meta_info"), 0) :]
            self._read(run, number, part, self._finished)
            return True
        elif "pred=" in said and "acc=" in said:
            self._row(number, said)
            return True
        elif "MTP[" in said and "finish=" in said:
            self._read(self._run(MTP_LOG, stream), number, said, _mtp_request)
            return True
        elif said.lstrip().startswith("Aggregate") and "{" in said and self._tables:
            self._n_left_of_table = 0 if "}" in said else _TABLE_END
            self._total(number, said)
            return True
        else:
            return False
        try:
            why = repr(said[found.end() :][:100])
            name, kind, places = saying
            is_taken = self.say(name, number, run.name, kind, *values_of(said, places))
        except OutOfRangeError as error:
            is_taken, why = False, str(error)
        if is_taken:
            self.last_read = saying, said, run.name
        else:
            run.has_unread(number, why)
        return True

    def _run(self, shape: str, name: str) -> _Run:
        run = self._runs.get((shape, name))
        if run is None:
            key = shape, name if len(self._runs) < _MOST_RUNS else ""
            run = self._runs.setdefault(key, _Run(*key))
        return run

    @staticmethod
    def _read(
        run: _Run, number: int, said: str, read: Callable[[str], RecordedRequest | None]
    ) -> None:
        try:
            found, why = read(said), repr(said[:100])
        except OutOfRangeError as error:
            found, why = None, str(error)
        if found is None:
            run.has_unread(number, why)
        elif run.shape == BENCH:
            run.requests.append(found)
        else:
            run.add("", None, partial(_made, found))

    # -- vLLM ----------------------------------------------------------------------------------

    @staticmethod
    def _on_speed(
        run: _Run, _kind: str, _prefix: str, engine: str | None, prompt: float, predicted: float
    ) -> bool:
        """What an engine's other line of the same seconds says."""
        run.engine = engine or run.engine
        run.speeds[run.engine] = prompt, predicted
        return True

    @staticmethod
    def _on_vllm(
        run: _Run,
        kind: str,
        prefix: str,
        engine: str | None,
        accepted: int | None,
        drafted: int | None,
        emitted: int | None,
        length: int | None,
        mean: str | None,
        rate: float | None,
        accepted_speed: float | None,
        drafted_speed: float | None,
        *rates: float,
    ) -> bool:
        """Sums of an interval. kind: "%" of a rate in percent, "since" of counts since the
        engine's start."""
        if drafted is None or accepted is None:
            return False
        if accepted > drafted:
            raise OutOfRangeError(f"{accepted:,} is more than {drafted:,}")
        run.engine = engine or run.engine
        label = f"engine {run.engine}" if run.engine else ""
        ratio = None if rate is None else rate / 100 if kind == "%" else rate
        if kind == "since":
            ratio, now = None, [accepted, drafted, emitted or 0]
            before = run.last.get(run.engine, [0, 0, 0])
            run.last[run.engine] = now
            if all(one <= more for one, more in zip(before, now, strict=True)):
                accepted, drafted = accepted - before[0], drafted - before[1]
                emitted = None if emitted is None else emitted - before[2]
        speeds = run.speeds.pop(run.engine, None)
        counts = None
        if emitted is None and rates and drafted:
            counts = _exact_counts(accepted, drafted, mean, ratio, rates)

        n_accepted, n_drafted = accepted, drafted

        def make() -> RecordedRequest:
            time = time_of(prefix)
            found = RecordedRequest("vllm", ", ".join(filter(None, (label, time))), stop="interval")
            found.num_draft_tokens, found.num_accepted_draft_tokens = n_drafted, n_accepted
            if emitted is not None:
                found.timings["predicted_n"] = emitted
            found.rates, found.num_spec_tokens = list(rates) or None, length or len(rates) or None
            if counts is not None:  # and everything else agrees with them
                found.per_pos, found.num_spec_steps = counts, n_drafted // len(rates)
            else:
                found.num_spec_steps = _steps(found, mean or "", n_drafted, n_accepted)
                if rates:
                    found.set_rates(rates)
                if ratio is not None and n_drafted:
                    share = n_accepted / n_drafted
                    found.check(
                        abs(ratio - share) <= _SUM_DIGITS,
                        ("Draft acceptance rate",),
                        f"the draft acceptance rate is {rate:g}{kind}, but "
                        f"{n_accepted:,} of {n_drafted:,} make {share:.3f}",
                    )
            found.record = {"time": time} if time else {}
            for name, speed in (("accepted", accepted_speed), ("drafted", drafted_speed)):
                if speed is not None:
                    found.record[f"{name}_per_second"] = speed
            if speeds is not None:
                found.timings |= {"prompt_per_second": speeds[0], "predicted_per_second": speeds[1]}
            return found

        run.add(label, None if counts is None else (prefix, accepted, drafted, counts), make)
        return True

    # -- SGLang --------------------------------------------------------------------------------

    @staticmethod
    def _on_batch(
        run: _Run,
        _kind: str,
        prefix: str,
        rank: str | None,
        mean: float | None,
        rate: float | None,
        speed: float | None,
        running: float | None,
    ) -> bool:
        """Averages of a decode batch."""
        if mean is None and rate is None:
            return False
        if rate is not None and rate > 1:
            raise OutOfRangeError(f"accept rate {rate:g} is more than 1")
        label = f"rank {rank}" if rank else ""
        given = {"mean_acceptance_length": mean, "draft_acceptance_rate": rate}
        known = {name: value for name, value in given.items() if value is not None}

        def make() -> RecordedRequest:
            time = time_of(prefix)
            place = ", ".join(filter(None, (label, time)))
            found = RecordedRequest("sglang", place, stop="interval")
            found.given, found.record = known, {"time": time} if time else {}
            if speed is not None:
                found.timings["predicted_per_second"] = speed
            if running is not None:
                found.record["running"] = running
            return found

        run.add(label, (prefix, known), make)
        return True

    @staticmethod
    def _finished(said: str) -> RecordedRequest | None:
        values: dict[str, Any] = {}
        for name, value in _PAIR.findall(said):
            is_count = value.isdigit()
            values[name] = whole(value) if is_count else float(value)
        if SGLANG.read is None or "spec_verify_ct" not in values:
            return None
        name = re.search(r"'id': '([^']{1,100})'", said)
        stop = re.search(r"'finish_reason': \{'type': '(\w{1,40})'", said)
        found = SGLANG.read(Node(values, "the log", "", (), (), {}))
        found.place, found.stop = name[1] if name else "", stop[1] if stop else ""
        return found

    # -- mtp-bench -----------------------------------------------------------------------------

    def _row(self, number: int, said: str) -> None:
        values = {key.lower(): value for key, value in _KEY.findall(said)}
        name = said[: _KEY.search(said).start()].strip(" |*`\t:-")  # type: ignore[union-attr]
        name = name[-100:]
        known = {one.place for one in map(_made, self._tables[-1].requests)} if self._tables else ()
        if not self._tables or self._tables[-1].engine == "closed" or name in known:
            if len(self._tables) >= _MOST_RUNS:
                return
            self._tables.append(_Run(BENCH, ""))
        table = self._tables[-1]

        def read(_said: str) -> RecordedRequest:
            found = RecordedRequest("llama-server", name, stop="end")
            found.timings["predicted_n"] = whole(values["pred"])
            if values.get("draft", "").isdigit():
                found.num_draft_tokens = whole(values["draft"])
                accepted = whole(values.get("acc", ""), found.num_draft_tokens)
                found.num_accepted_draft_tokens = accepted
            speed = values.get("tok/s", "")
            if re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", speed):
                found.timings["predicted_per_second"] = real(speed)
            rate, drafted = values.get("rate", ""), found.num_draft_tokens
            if drafted and re.fullmatch(r"\d{1,3}\.\d{1,12}", rate):
                found.check(
                    abs(float(rate) - accepted / drafted) <= _SUM_DIGITS,
                    ("rate", "acc", "draft"),
                    f"rate is {rate}, but {accepted:,} of {drafted:,} are another",
                )
            return found

        self._read(table, number, said, read)

    def _total(self, number: int, said: str) -> None:
        table = self._tables[-1]
        for name, value in _TOTAL.findall(said):
            if name not in _TOTALS or not value.isdigit():
                continue
            field_name = _TOTALS[name]
            values = [
                one.timings.get(field_name)
                if field_name == "predicted_n"
                else getattr(one, field_name)
                for one in map(_made, table.requests)
            ]
            known = [one for one in values if one is not None]
            try:
                total = whole(value, COUNT)
            except OutOfRangeError as error:
                table.has_unread(number, str(error))
                continue
            if len(known) == len(values) and sum(known) != total:
                table.findings.append(
                    {
                        "rule": "log-lines-missing",
                        "message": "The lines of the table do not add up to its aggregate: one "
                        "may be missing.",
                        "evidence": f"{name} is {total:,}, the lines make {sum(known):,}",
                    }
                )
        if "}" in said:
            self._n_left_of_table, table.engine = 0, "closed"


def _mtp_request(said: str) -> RecordedRequest | None:
    """A request of oMLX. All drafts have a first token."""
    found = _MTP.search(said)
    if found is None:
        return None
    request = RecordedRequest("omlx", f"request {found[1]}", stop=found[2])
    request.timings["predicted_n"] = whole(found[3], COUNT)
    request.num_draft_tokens = whole(found[5], COUNT)
    request.num_accepted_draft_tokens = whole(found[4], request.num_draft_tokens)
    parts = re.findall(r"d\d{1,4}=(\d{1,20})/(\d{1,20})", found[6] or "")
    counts = [(whole(accepted, COUNT), whole(drafted, COUNT)) for accepted, drafted in parts]
    if counts:
        request.num_spec_steps, request.per_pos = counts[0][1], [one for one, _ in counts]
        request.check(
            sum(request.per_pos) == request.num_accepted_draft_tokens
            and sum(drafted for _, drafted in counts) == request.num_draft_tokens,
            ("accept", "depth"),
            "the counts by index in the draft do not add up to those of all",
        )
    return request


def _interval(label: str, lines: Sequence[_Line]) -> RecordedRequest:
    """Lines of an engine that follow each other, as one."""
    if len(lines) == 1 and isinstance(lines[0], RecordedRequest):
        return lines[0]
    if (found := _plain_sums(label, lines)) is not None:
        return found
    requests = [_interval(label, [one]) for one in lines]
    return merged(requests, f"{requests[0].place} and after")


def _plain_sums(label: str, lines: Sequence[_Line]) -> RecordedRequest | None:
    """Lines without more than counts, or averages, as one; None for others."""
    first = lines[0]
    kinds = {len(one) if isinstance(one, tuple) else 0 for one in lines}
    if not isinstance(first, tuple) or len(kinds) > 1:
        return None
    place = ", ".join(filter(None, (label, time_of(first[0])))) + " and after" * (len(lines) > 1)
    names = {name for one in lines for name in one[1]} if len(first) == 2 else set()  # type: ignore[index]
    if names:
        found = RecordedRequest("sglang", place, stop="interval", n_merged=len(lines))
        for name in sorted(names):
            values = [one[1][name] for one in lines if name in one[1]]  # type: ignore[index]
            found.given[name] = sum(values) / len(values)
        return found
    _, accepted, drafted, per_pos = zip(*lines, strict=True)
    found = RecordedRequest("vllm", place, stop="interval", n_merged=len(lines))
    found.num_accepted_draft_tokens, found.num_draft_tokens = sum(accepted), sum(drafted)
    found.num_spec_steps = sum(n // len(one) for n, one in zip(drafted, per_pos, strict=True))
    found.per_pos = [sum(one) for one in zip_longest(*per_pos, fillvalue=0)]
    return found


def _vllm_saying(said: str, head: re.Match[str]) -> Saying:
    """What a line about metrics says, as the values of `_on_vllm`."""
    at = head.end()
    counts = [
        NOTHING if found is None else (*found.span(1), COUNT)
        for found in (one.search(said, at) for one in _COUNTS)
    ]
    mean, rate = _MEAN.search(said, at), _RATE.search(said, at)
    kind = "since" if "System efficiency" in said else rate[2] if rate is not None else ""
    speeds = {found[1]: found.span(2) for found in _THROUGHPUTS.finditer(said, at)}
    return (
        "vllm",
        kind,
        (
            (0, head.start(), None),
            _engine(said[:at]),
            *counts,
            NOTHING if mean is None else (*mean.span(1), None),
            NOTHING if rate is None else (*rate.span(1), LONGEST_PART_MS),
            *(
                (*speeds[name], LONGEST_PART_MS) if name in speeds else NOTHING
                for name in ("Accepted", "Drafted")
            ),
            *_items(said, at),
        ),
    )


def _batch_saying(said: str, head: re.Match[str]) -> Saying:
    """What a line about a decode batch says, as the values of `_on_batch`."""
    found = _OF_BATCH.finditer(said, head.end())
    spans = {one[1].removeprefix("avg_").replace("t_", "t "): one.span(2) for one in found}
    rank = _RANK.search(said, 0, head.start())
    names = ("accept len", "accept rate", "gen throughput (token/s)", "#running-req")
    values = ((*spans[one], LONGEST_PART_MS) if one in spans else NOTHING for one in names)
    of_rank = NOTHING if rank is None else (*rank.span(1), None)
    return "batch", "", ((0, head.start(), None), of_rank, *values)


def _exact_counts(
    accepted: int, drafted: int, mean: str | None, ratio: float | None, rates: Sequence[float]
) -> list[int] | None:
    """How many drafts had each position accepted, where all are as long as there are positions and
    everything that a line says agrees with that."""
    steps, rest = divmod(drafted, len(rates))
    counts = [round(rate * steps) for rate in rates]
    if rest or sum(counts) != accepted:
        return None
    if mean and not _is_mean(1 + accepted / steps, mean):
        return None
    if ratio is not None and abs(ratio - accepted / drafted) > _SUM_DIGITS:
        return None
    return counts if all(map(ge, [steps, *counts], counts)) else None


def _is_mean(value: float, mean: str) -> bool:
    """Whether a mean length is written as it would be."""
    number, half = mean_of(mean)
    return abs(value - number) <= half


@lru_cache(1 << 12)
def mean_of(text: str) -> tuple[float, float]:
    """A mean length, and half a unit of its last digit."""
    return float(text), 0.5001 * 10.0 ** -len(text.partition(".")[2])


def _thinned(requests: list[RecordedRequest | _Waiting]) -> list[RecordedRequest | _Waiting]:
    """Half as many, of two neighbours of the same engine each."""
    by_engine: dict[str, list[RecordedRequest | _Waiting]] = {}
    for one in requests:
        label = one[0] if isinstance(one, tuple) else one.place.partition(", ")[0]
        by_engine.setdefault(label if label.startswith(("engine ", "rank ")) else "", []).append(
            one
        )
    return [
        _together(label, group[i : i + 2])
        for label, group in by_engine.items()
        for i in range(0, len(group), 2)
    ]


def _together(label: str, pair: Sequence[RecordedRequest | _Waiting]) -> RecordedRequest:
    """Two neighbours, or one that has none, as one."""
    parts = [one[1] for one in pair if isinstance(one, tuple) and one[1] is not None]
    if len(parts) == 2 and (len(parts[0]) > 2 or parts[0][1].keys() == parts[1][1].keys()):
        found = _plain_sums(label, parts)
        if found is not None:
            return found
    whole = list(map(_made, pair))
    return merged(whole, f"{whole[0].place} and after")


def _made(one: RecordedRequest | _Waiting) -> RecordedRequest:
    """A line that waits as an interval."""
    return one[2]() if isinstance(one, tuple) else one


@lru_cache(1 << 12)
def source_of(prefix: str, stream: str) -> str:
    """The server that a line is of: what its prefix names, without processes of one server."""
    prefix = _PROCESSES.sub(" ", _COUNTED.sub(r"\1", prefix[-256:]))
    return stream or name_of(prefix)


def _engine(said: str) -> Value:
    """Where the number of an engine is."""
    found = _ENGINE.search(said)
    return NOTHING if found is None else (*found.span(1 if found[1] else 2), None)


def _items(said: str, at: int) -> list[Value]:
    """Numbers after a label, up to what is none."""
    label = _RATES.search(said, at)
    found: list[Value] = []
    at = label.end() if label else len(said)
    while len(found) < LONGEST_DRAFT and (item := _ITEM.match(said, at)) is not None:
        if not re.fullmatch(r"\d(?:\.\d{0,20})?", item[1]):
            break
        found.append((*item.span(1), 1.0))
        at = item.end()
    return found


def _steps(found: RecordedRequest, mean: str, drafted: int, accepted: int) -> int | None:
    """Drafts: all as long as there are positions, if that gives the mean length; else the number
    that gives it, if there is one."""
    n = found.num_spec_tokens
    if n and drafted and drafted % n == 0:
        steps = drafted // n
        if not mean or _is_mean(1 + accepted / steps, mean):
            return steps
    return found.steps_of(*mean_of(mean)) if mean else None
