"""AIPerf: acceptance records, read, and written for every sequence of a trace; and summaries of a
whole benchmark, as JSON, CSV and printed (docs/tutorials/spec-decode-metrics.md).

A record has no time and no text, so it receives only a trace's counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.observe.files.records.column_names import NAMES
from engine.observe.files.records.document import Node
from engine.observe.files.records.readers import RecordShape, read_acceptance
from engine.observe.files.records.request import RecordedRequest
from engine.trace.facts import RequestFacts
from engine.trace.records import MISSING
from engine.trace.store import TraceStore
from engine.trace.timings import summary

_OURS = "draftscope"
_TOTALS = NAMES["keys"]["aiperf"]
_POOLED = "pooled_spec_decode_acceptance_histogram"
_MEAN = "spec_decode_token_weighted_acceptance_length"
_RATE = "spec_decode_overall_draft_acceptance_rate"
_ROW = re.compile(
    r'^"?([A-Za-z][^,"()\n]{0,80}?)(?: \([^)\n]{1,40}\))?"?,"?([\d.]{1,40})"?\r?$', re.M
)
_SUMMARY = re.compile(
    r'^"?Total Spec Decode Steps[^,\n]{0,40},|^[│|] {1,60}Overall Draft Acceptance Rate',
    re.MULTILINE,
)
_CELLS = re.compile(r"^[│|]([^│|\n]{1,120})[│|] {0,20}([\d.,]{0,20}) {0,20}[│|]", re.MULTILINE)
_SHARES = re.compile(r"Accepted drafts per step \(% of steps\):((?: {1,9}\d{1,3}: \d{1,3}%){1,9})")
_PRINTED = {_MEAN: "Token-Weighted Acceptance Length", _RATE: "Overall Draft Acceptance Rate"}
_OF_STEPS, _HEAD = "percent_of_steps", 1 << 10
WARMUP = "warmup_metrics"
"""Keys of a summary about requests before the benchmark."""


def is_summary_table(data: bytes) -> bool:
    """Whether bytes are a summary as CSV or printed, with sums of speculative decoding."""
    parts = b"Total Spec Decode Steps", b"Overall Draft Acceptance"
    if data[:_HEAD].lstrip().startswith(b"{") or not any(map(data.__contains__, parts)):
        return False
    return _SUMMARY.search(data.decode("utf-8", "replace")) is not None


def table_values(data: bytes) -> dict[str, Any]:
    """A CSV or printed summary under the keys of the JSON form; single-number rows only. Ratios
    have two decimals there, so they are not checked against counts. The printed form has averages
    over requests, two ratios over all steps and shares by accepted tokens."""
    found: dict[str, Any] = {}
    text = data.decode("utf-8-sig", "replace")
    rows: list[list[str]] = []
    for name, value in _CELLS.findall(text):
        if not value and rows:  # a name continues on the next line
            rows[-1][0] += f" {name.strip()}"
        else:
            rows.append([name.strip(), value])
    for name, value in rows:
        key = next((k for k, words in _PRINTED.items() if name.startswith(words)), None)
        if key is not None and re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value):
            found[key] = {"avg": float(value)}
    if (shares := _SHARES.search(text)) is not None:
        found[_OF_STEPS] = {k: int(n) for k, n in re.findall(r"(\d+): (\d+)%", shares[1])}
    for name, value in _ROW.findall(text):
        key = re.sub(r"\W", "_", name.strip().lower())
        if re.fullmatch(r"\d{1,20}(?:\.\d{1,20})?", value):
            found[key] = {"avg": float(value)}
    return found


def _read_summary(node: Node) -> RecordedRequest:
    """The sums of a benchmark. A single number is labelled as average."""
    values = node.fields()
    found = RecordedRequest("aiperf", node.place, stop="end")

    def figure(key: str) -> float | None:
        one = values.object(key)
        return None if one is None else one.number("avg")

    for name, key in _TOTALS.items():
        if (total := figure(key)) is None:
            continue
        if total != int(total):
            raise values.wrong(f"{key}.avg", total, "a whole number")
        if name == "predicted_n":
            found.timings[name] = int(total)
        else:
            setattr(found, name, int(total))
    found.histogram = values.histogram(_POOLED)
    if (mean := figure(_MEAN)) is not None:
        found.given["mean_acceptance_length"] = mean
    found.check_rate(_MEAN, mean, _TOTALS, own=1)
    if (rate := figure(_RATE)) is not None and rate <= 100:
        found.given["draft_acceptance_rate"] = rate / 100
    if (shares := values.histogram(_OF_STEPS)) is not None:
        found.rates = [sum(shares[i:]) / 100 for i in range(1, len(shares))]
    found.check_rate(_RATE, rate, _TOTALS, 100)
    found.check_counts(_TOTALS | {"histogram": _POOLED})
    known = (*_TOTALS.values(), _POOLED, _MEAN, _RATE)
    found.record = {key: node.values[key] for key in known if key in node.values}
    return found


def _read(node: Node) -> RecordedRequest:
    if _TOTALS["num_spec_steps"] in node.values or _RATE in node.values:
        return _read_summary(node)
    found, values = read_acceptance(node, "")
    found.engine = values.text("engine") or ""
    found.set_tokens(None, None, values.count("completion_tokens"))
    return found


AIPERF = RecordShape(
    "aiperf",
    "AIPerf",
    (
        ("engine", "num_spec_steps", "mean_acceptance_length"),
        ("engine", "per_step_accepted"),
        (_TOTALS["num_spec_steps"],),
        (_RATE,),
    ),
    _read,
)


def acceptance_records(store: TraceStore) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Run, sequence and record of each sequence of a trace, in order. None instead of the record
    without drafts, or if too little is known.

    Records read from such a file are returned unchanged.
    """
    rows = _rows_by_sequence(store)
    told = {
        (run_id, seq_id): request
        for run_id, facts in store.runs.items()
        for request in facts.requests or ()
        for seq_id in request.seq_ids
    }
    for run_id, seq_id in sorted(rows.keys() | told.keys()):
        key = run_id, seq_id
        yield run_id, seq_id, _record(store, key, told.get(key, RequestFacts()), rows.get(key))


def _rows_by_sequence(store: TraceStore) -> dict[tuple[int, int], np.ndarray]:
    """Rows of `rounds` by run and sequence, int64 [n] each, ascending."""
    n = len(store.rounds)
    runs, sequences = (store.rounds.column(name, 0, n) for name in ("run_id", "seq_id"))
    order = np.lexsort((sequences, runs))
    begins = np.flatnonzero(np.diff(((runs << 32) + sequences)[order], prepend=-1))
    return {
        (int(runs[part[0]]), int(sequences[part[0]])): part
        for part in np.split(order, begins[1:])
        if len(part)
    }


def _record(
    store: TraceStore, key: tuple[int, int], request: RequestFacts, rows: np.ndarray | None
) -> dict[str, Any] | None:
    facts = store.runs[key[0]]
    shape = facts.record.shape if facts.record else ""
    lists = {} if rows is None else _lists(store, rows, least=0 if shape else 1)
    if shape == AIPERF.name:
        is_record = bool(request.record) and _TOTALS["num_spec_steps"] not in request.record
        return request.record | lists if is_record else None
    if rows is not None and (store.rounds.column("n_merged")[rows] != MISSING).any():
        return None  # rows of an unknown number of steps each
    figures = request.told or summary(store, *key)
    steps, drafted = figures.get("num_spec_steps"), figures.get("draft_n")
    if not steps or not drafted:
        return None
    histogram = figures["acceptance_histogram"]
    sparse = {str(j): n for j, n in enumerate(histogram or ()) if n}
    return {
        "engine": request.engine or (facts.source.engine if facts.source else None) or _OURS,
        "mean_acceptance_length": figures["mean_acceptance_length"],
        "draft_acceptance_rate": figures["draft_acceptance_rate"],
        "acceptance_histogram": sparse if histogram is not None else None,
        "num_accepted_draft_tokens": figures["draft_n_accepted"],
        "num_draft_tokens": drafted,
        "num_spec_steps": steps,
        "num_spec_tokens": request.record.get("num_spec_tokens"),
        "completion_tokens": figures["predicted_n"],
        **(lists or dict.fromkeys(("per_step_accepted", "per_step_drafted"))),
    }


def _lists(store: TraceStore, rows: np.ndarray, least: int) -> dict[str, list[int]]:
    """Accepted and drafted tokens of the rows that drafted at least `least` tokens."""
    drafted = store.rounds.column("num_draft_tokens")[rows]
    accepted = store.rounds.column("num_accepted_draft_tokens")[rows]
    steps = drafted >= least
    return {
        "per_step_accepted": np.maximum(accepted[steps], 0).tolist(),
        "per_step_drafted": drafted[steps].tolist(),
    }
