"""Lines in which other engines tell sums: vLLM's of every ten seconds, SGLang's of its decode
batches and finished requests, and the table of the script mtp-bench.

vLLM: `vllm/v1/spec_decode/metrics.py` and, of the first generation, `vllm/engine/metrics.py`, whose
counts go on from line to line. SGLang: `scheduler_metrics_mixin.py`; its lengths and rates are
averages of a batch, so no counts follow from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from engine.foreign_numbers import COUNT, LONGEST_DRAFT, OutOfRangeError, real, whole
from engine.observe.files.records.document import Node
from engine.observe.files.records.readers import SGLANG
from engine.observe.files.records.request import RecordedRequest, merged
from engine.observe.files.records.writing import write_requests
from engine.observe.rounds.log_lines import name_of, time_of
from engine.trace.store import TraceStore

VLLM, SGLANG_LOG, BENCH = "vllm-log", "sglang-log", "mtp-bench"
UNITS = {VLLM: "intervals", SGLANG_LOG: "intervals", BENCH: "prompts"}
"""What a sequence is in a run of this shape."""
_ENGINES = {VLLM: "vllm", SGLANG_LOG: "sglang", BENCH: "llama-server"}
_MOST_RUNS = 256
MOST_INTERVALS = 8192
"""Of a run; neighbours of more are taken together, so that a log of months is a run too."""
_LONGEST = 1 << 14
_TABLE_END = 40
"""Lines that the object after a table may have."""
_SUM_DIGITS = 0.01
SIGNS = re.compile(
    r"Spec(?:Decoding|ulative) metrics: |Decode batch[.,][^\n]{0,300}accept (?:len|rate):"
    r"|Finish: [^\n]{0,8000}'spec_verify_ct':|\bpred=\s{0,9}\d[^\n]{0,40} acc=\s{0,9}\d"
)
"""What a text has in which there are such lines."""
_METRICS = re.compile(r"Spec(?:Decoding|ulative) metrics: ?")
_PROCESSES = re.compile(
    r"\((?:APIServer|EngineCore\w{0,20}|Worker\w{0,20})[^)]{0,40}\)"
    r"|\[[\w.]{1,60}\.py:\d{1,6}\]|Engine \d{1,6}:|\b[DTPE]P\d{1,4}\b"
)
_ENGINE = re.compile(r"\bEngine (\d{1,6})\b|EngineCore_(?:DP)?(\d{1,6})\b")
_SPEED = re.compile(
    r"Avg prompt throughput:\s{0,9}([\d.]{1,20})\s{0,9}tokens/s.{0,40}?"
    r"Avg generation throughput:\s{0,9}([\d.]{1,20})"
)
_COUNTS = {
    "accepted": re.compile(r"\b(?:Accepted|Number of accepted tokens):\s{0,9}(\d{1,20})\b(?! ?\.)"),
    "drafted": re.compile(r"\b(?:Drafted|Number of draft tokens):\s{0,9}(\d{1,20})\b(?! ?\.)"),
    "emitted": re.compile(r"\bNumber of emitted tokens:\s{0,9}(\d{1,20})\b"),
    "length": re.compile(r"\bNumber of speculative tokens:\s{0,9}(\d{1,20})\b"),
}
_MEAN = re.compile(r"Mean acceptance length:\s{0,9}(\d{1,9}\.\d{1,9})")
_RATE = re.compile(r"Draft acceptance rate:\s{0,9}(\d{1,9}\.\d{1,9})(%?)")
_THROUGHPUTS = re.compile(r"(Accepted|Drafted) throughput:\s{0,9}([\d.]{1,20})")
_RATES = re.compile(r"Per-position acceptance rate:\s{0,9}")
_ITEM = re.compile(r"\s{0,9}([\d.]{1,20})\s{0,9}(?:,|$|(?=[^\d.\s]))")
_BATCH = re.compile(r"Decode batch[.,:]? ?")
_OF_BATCH = re.compile(
    r"(accept len|accept rate|gen throughput \(token/s\)|#running-req):\s{0,9}([\d.]{1,20})"
)
_RANK = re.compile(r"\bDP(\d{1,4})\b")
_PAIR = re.compile(r"'(\w{1,60})': (\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,3})?)(?=[,}\s])")
_KEY = re.compile(r"\b([A-Za-z/]{2,12})=\s{0,12}([-\w.%/]{1,24})")
_TOTAL = re.compile(r'"(\w{1,40})":\s{0,9}([\d.]{1,20})')
_TOTALS = {
    "total_draft": "num_draft_tokens",
    "total_draft_accepted": "num_accepted_draft_tokens",
    "total_predicted": "predicted_n",
}


@dataclass(slots=True)
class _Run:
    """Requests, or intervals, that become a run. last: of counts that go on, the ones before.
    speeds: of the engine's last line about them."""

    shape: str
    name: str
    requests: list[RecordedRequest] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, dict[str, int]] = field(default_factory=dict)
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)
    engine: str = ""
    n_unread: int = 0
    first_unread: str = ""


class LineLogs:
    """Takes the lines of such engines out of a log, each with the run that it is of."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _Run] = {}
        self._tables: list[_Run] = []
        self._n_left_of_table = 0

    def takes(self, number: int, stream: str, said: str) -> bool:
        """Whether a line is one of these, and then taken. stream: the server that it is of, where
        more than its text says so."""
        if self._n_left_of_table:
            self._n_left_of_table -= 1
            self._total(said)
        elif (
            "metrics: " in said
            or "Decode batch" in said
            or "spec_verify_ct" in said
            or "pred=" in said
            or "throughput:" in said
            or "Aggregate" in said
        ):
            return self._takes(number, stream, said[:_LONGEST])
        else:
            return False
        return True

    def write(self, store: TraceStore, file: str) -> list[int]:
        """Write what was read as runs; returns their ids. Raises TraceFileError for more than a
        trace can hold."""
        found = []
        for run in (*self._runs.values(), *self._tables):
            if run.n_unread:
                evidence = f"{run.n_unread:,} of them; the first is {run.first_unread}"
                message = "Lines look like those of the engine's sums and are not read."
                finding = {"rule": "log-unread", "message": message, "evidence": evidence}
                run.findings.append(finding)
            if not run.requests:
                continue
            facts: dict[str, Any] = {"attachment": "log", "observed_findings": run.findings}
            facts |= {"server": {"address": run.name}} if run.name else {}
            about = [{"prompt": one.place} if run.shape == BENCH else {} for one in run.requests]
            found.append(
                write_requests(store, run.requests, run.shape, file, {}, facts=facts, about=about)
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
        if "metrics: " in said and (found := _METRICS.search(said)) is not None:
            run = self._run(VLLM, _source(said[: found.start()], stream))
            self._read(run, number, said, found.end(), self._vllm)
        elif "throughput:" in said and (speeds := _SPEED.search(said)) is not None:
            run = self._run(VLLM, _source(said[: max(said.find("Engine"), 0)], stream))
            run.engine = _engine(said) or run.engine
            run.speeds[run.engine] = min(float_of(speeds[1]), 1e9), min(float_of(speeds[2]), 1e9)
        elif "Decode batch" in said and "accept " in said:
            found = _BATCH.search(said)
            if found is None:
                return False
            run = self._run(SGLANG_LOG, _source(said[: found.start()], stream))
            self._read(run, number, said, found.end(), self._batch)
        elif "'spec_verify_ct'" in said:
            at = said.find("Finish")
            run = self._run(SGLANG_LOG, _source(said[: max(at, 0)], stream))
            self._read(run, number, said, max(said.find("meta_info"), 0), self._finished)
        elif "pred=" in said and "acc=" in said:
            self._row(number, said)
        elif said.lstrip().startswith("Aggregate") and "{" in said and self._tables:
            self._n_left_of_table = 0 if "}" in said else _TABLE_END
            self._total(said)
        else:
            return False
        return True

    def _run(self, shape: str, name: str) -> _Run:
        key = shape, name if len(self._runs) < _MOST_RUNS else ""
        return self._runs.setdefault(key, _Run(*key))

    def _read(self, run: _Run, number: int, said: str, at: int, read: Any) -> None:
        try:
            found = read(run, said, at)
        except OutOfRangeError as error:
            found = None
            why = str(error)
        else:
            why = repr(said[at : at + 100])
        if found is None:
            run.n_unread += 1
            run.first_unread = run.first_unread or f"line {number}: {why}"
        else:
            run.requests.append(found)
            if len(run.requests) > MOST_INTERVALS and run.shape != BENCH:
                run.requests = _thinned(run.requests)

    # -- vLLM ----------------------------------------------------------------------------------

    def _vllm(self, run: _Run, said: str, at: int) -> RecordedRequest | None:
        counts = {
            name: whole(value[1], COUNT)
            for name, one in _COUNTS.items()
            if (value := one.search(said, at)) is not None
        }
        if "drafted" not in counts or "accepted" not in counts:
            return None
        run.engine = _engine(said[:at]) or run.engine
        time = time_of(said[:at])
        label = f"engine {run.engine}" if run.engine else ""
        found = RecordedRequest("vllm", ", ".join(filter(None, (label, time))), stop="interval")
        length = counts.pop("length", None)
        if "System efficiency" in said:  # counts since the start
            before = run.last.get(run.engine, {})
            run.last[run.engine] = dict(counts)
            if all(before.get(name, 0) <= n for name, n in counts.items()):
                counts = {name: n - before.get(name, 0) for name, n in counts.items()}
        drafted, accepted = counts["drafted"], counts["accepted"]
        whole(str(accepted), drafted)  # it cannot be more
        found.num_draft_tokens, found.num_accepted_draft_tokens = drafted, accepted
        if "emitted" in counts:
            found.timings["predicted_n"] = counts["emitted"]
        rates = _items(said, at)
        mean = _MEAN.search(said, at)
        found.rates, found.num_spec_tokens = rates or None, length or len(rates) or None
        found.num_spec_steps = _steps(found, mean[1] if mean else "", drafted, accepted)
        if rates:
            found.set_rates(rates)
        if (rate := _RATE.search(said, at)) is not None and drafted:
            given = float(rate[1]) / (100 if rate[2] else 1)
            found.check(
                abs(given - accepted / drafted) <= _SUM_DIGITS,
                ("Draft acceptance rate",),
                f"the draft acceptance rate is {rate[0].rpartition(':')[2].strip()}, but "
                f"{accepted:,} of {drafted:,} make {accepted / drafted:.3f}",
            )
        found.record = {"time": time} if time else {}
        for name, value in _THROUGHPUTS.findall(said[at:]):
            found.record[f"{name.lower()}_per_second"] = real(value)
        if (speeds := run.speeds.pop(run.engine, None)) is not None:
            found.timings |= {"prompt_per_second": speeds[0], "predicted_per_second": speeds[1]}
        return found

    # -- SGLang --------------------------------------------------------------------------------

    def _batch(self, _run: _Run, said: str, at: int) -> RecordedRequest | None:
        values = {name: real(value) for name, value in _OF_BATCH.findall(said[at:])}
        time, rank = time_of(said[:at]), _RANK.search(said[:at])
        place = ", ".join(filter(None, (f"rank {rank[1]}" if rank else "", time)))
        found = RecordedRequest("sglang", place, stop="interval")
        names = {"accept len": "mean_acceptance_length", "accept rate": "draft_acceptance_rate"}
        found.given = {names[name]: values[name] for name in names if name in values}
        if not found.given:
            return None
        if found.given.get("draft_acceptance_rate", 0.0) > 1:
            raise OutOfRangeError(f"accept rate {values['accept rate']:g} is more than 1")
        if "gen throughput (token/s)" in values:
            found.timings["predicted_per_second"] = values["gen throughput (token/s)"]
        found.record = {"time": time} if time else {}
        if "#running-req" in values:
            found.record["running"] = values["#running-req"]
        return found

    def _finished(self, _run: _Run, said: str, at: int) -> RecordedRequest | None:
        values: dict[str, Any] = {}
        for name, value in _PAIR.findall(said[at:]):
            is_count = value.isdigit()
            values[name] = whole(value) if is_count else float(value)
        if SGLANG.read is None or "spec_verify_ct" not in values:
            return None
        name = re.search(r"'id': '([^']{1,100})'", said[at:])
        stop = re.search(r"'finish_reason': \{'type': '(\w{1,40})'", said[at:])
        found = SGLANG.read(Node(values, "the log", "", (), (), {}))
        found.place, found.stop = name[1] if name else "", stop[1] if stop else ""
        return found

    # -- mtp-bench -----------------------------------------------------------------------------

    def _row(self, number: int, said: str) -> None:
        values = {key.lower(): value for key, value in _KEY.findall(said)}
        name = said[: _KEY.search(said).start()].strip(" |*`\t:-")  # type: ignore[union-attr]
        name = name[-100:]
        known = {one.place for one in self._tables[-1].requests} if self._tables else set()
        if not self._tables or self._tables[-1].engine == "closed" or name in known:
            if len(self._tables) >= _MOST_RUNS:
                return
            self._tables.append(_Run(BENCH, ""))
        table = self._tables[-1]

        def read(_run: _Run, _said: str, _at: int) -> RecordedRequest:
            found = RecordedRequest(_ENGINES[BENCH], name, stop="end")
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

        self._read(table, number, said, 0, read)

    def _total(self, said: str) -> None:
        table = self._tables[-1]
        for name, value in _TOTAL.findall(said):
            if name not in _TOTALS or not value.isdigit():
                continue
            field_name = _TOTALS[name]
            values = [
                one.timings.get(field_name)
                if field_name == "predicted_n"
                else getattr(one, field_name)
                for one in table.requests
            ]
            known = [one for one in values if one is not None]
            if len(known) == len(values) and sum(known) != whole(value, COUNT):
                table.findings.append(
                    {
                        "rule": "log-lines-missing",
                        "message": "The lines of the table do not add up to its aggregate: one "
                        "may be missing.",
                        "evidence": f"{name} is {int(value):,}, the lines make {sum(known):,}",
                    }
                )
        if "}" in said:
            self._n_left_of_table, table.engine = 0, "closed"


def _thinned(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """Half as many, of two neighbours of the same engine each."""
    by_engine: dict[str, list[RecordedRequest]] = {}
    for one in requests:
        label = one.place.partition(", ")[0]
        by_engine.setdefault(label if label.startswith(("engine ", "rank ")) else "", []).append(
            one
        )
    return [
        merged(group[i : i + 2], f"{group[i].place} and after")
        for group in by_engine.values()
        for i in range(0, len(group), 2)
    ]


def float_of(text: str) -> float:
    """A decimal number, 0 for what is none."""
    return real(text) if re.fullmatch(r"\d{1,12}(?:\.\d{0,12})?", text) else 0.0


@lru_cache(1 << 12)
def _source(prefix: str, stream: str) -> str:
    """The server that a line is of: what its prefix names, without processes of one server."""
    prefix = _PROCESSES.sub(" ", prefix[-256:])
    return stream or name_of(prefix)


def _engine(said: str) -> str:
    found = _ENGINE.search(said)
    return (found[1] or found[2]) if found else ""


def _items(said: str, at: int) -> list[float]:
    """Numbers after a label, up to what is none."""
    label = _RATES.search(said, at)
    found: list[float] = []
    at = label.end() if label else len(said)
    while len(found) < LONGEST_DRAFT and (item := _ITEM.match(said, at)) is not None:
        if not re.fullmatch(r"\d(?:\.\d{0,20})?", item[1]):
            break
        found.append(real(item[1], 1.0))
        at = item.end()
    return found


def _steps(found: RecordedRequest, mean: str, drafted: int, accepted: int) -> int | None:
    """Drafts: all as long as there are positions, if that gives the mean length; else the number
    that gives it, if there is one."""
    n = found.num_spec_tokens
    half = 0.5001 * 10.0 ** -len(mean.partition(".")[2])
    if n and drafted and drafted % n == 0:
        steps = drafted // n
        if not mean or abs(1 + accepted / steps - float(mean)) <= half:
            return steps
    return found.steps_of(float(mean), half) if mean else None
