"""Counters of a server as Prometheus text: of vLLM, of llama-server, which names them alike, of
TensorRT-LLM and of rapid-mlx.

Two scrapes in the order taken show what was done between them; one alone shows what was done since
the server started.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from engine.errors import TraceFileError
from engine.foreign import COUNT, LARGEST, LONGEST_DRAFT, is_real
from engine.gguf.binary import shorten
from engine.observe.files.records.document import MOST_BYTES
from engine.observe.files.records.request import RecordedRequest
from engine.observe.rounds.counters import LONGEST_LINE, longest_line

_ENGINES = {
    "vllm": "vllm",
    "llamacpp": "llama-server",
    "trtllm": "tensorrt-llm",
    "rapid_mlx": "rapid-mlx",
}
_COUNTERS = {
    "num_drafts": "num_spec_steps",
    "num_draft_tokens": "num_draft_tokens",
    "num_accepted_tokens": "num_accepted_draft_tokens",
}
_PER_POS = "num_accepted_tokens_per_pos"
_SERIES = re.compile(
    rf"(vllm|llamacpp):spec_decode_({'|'.join((*_COUNTERS, _PER_POS))})(?:_total)?"
)
_OTHER_SERIES = {
    "rapid_mlx_spec_decode_attempts": ("rapid_mlx", "num_draft_tokens"),
    "rapid_mlx_spec_decode_accepts": ("rapid_mlx", "num_accepted_tokens"),
    "rapid_mlx_spec_decode_verify_calls": ("rapid_mlx", "num_drafts"),
    "rapid_mlx_spec_decode_accepted_by_depth": ("rapid_mlx", _PER_POS),
    "trtllm_spec_decode_num_draft_tokens": ("trtllm", "num_draft_tokens"),
    "trtllm_spec_decode_num_accepted_tokens": ("trtllm", "num_accepted_tokens"),
    "llamacpp:draft_tokens": ("llamacpp", "num_draft_tokens"),
    "llamacpp:draft_tokens_accepted": ("llamacpp", "num_accepted_tokens"),
    "llamacpp:draft_verify_steps": ("llamacpp", "num_drafts"),
    "llamacpp:spec_tokens_drafted": ("llamacpp", "num_draft_tokens"),
    "llamacpp:spec_tokens_accepted": ("llamacpp", "num_accepted_tokens"),
}
"""By other names, without `_total`: of rapid-mlx, for which each token of a draft is an attempt and
depths count from 1, of TensorRT-LLM, and of builds of llama.cpp before it had vLLM's names."""
_TOKENS = {"vllm:generation_tokens": "vllm", "llamacpp:tokens_predicted": "llamacpp"}
"""Emitted tokens, of all requests, with and without drafts."""
_GAUGES = {
    "spec_accept_length": "mean_acceptance_length",
    "spec_accept_rate": "draft_acceptance_rate",
}
"""SGLang's, averages of its last batches: no counts follow from them."""
_SIGN = re.compile(
    rb"^(?:(?:vllm|llamacpp):spec_decode_num_(?:drafts|draft_tokens|accepted_tokens)(?:_total)?"
    rb"|sglang:spec_accept_(?:length|rate)|rapid_mlx_spec_decode_attempts_total"
    rb"|trtllm_spec_decode_num_draft_tokens(?:_total)?"
    rb"|llamacpp:(?:draft_tokens|spec_tokens_drafted)(?:_total)?)[ {]",
    re.MULTILINE,
)
_EXACT = {"vllm": COUNT, "llamacpp": 10**6, "trtllm": COUNT, "rapid_mlx": COUNT}
"""Up to where a server prints a counter with all its digits."""
_REMEDY = "Save the reply of /metrics again, once before and once after."

_SAMPLE = re.compile(
    r"[`>*|\s]{0,9}([A-Za-z_]\w{0,80}[:_]\w{1,200}(?:\{.{0,4000}\})?)\s{0,9}\|?\s{0,9}"
    r"(?<=[\s|}])([^\s|]{1,40}(?: \d{1,20})?)[\s|]{0,9}"
)
"""A sample, also as a row of a table."""
_BEGIN = re.compile(r"[`>*|\s]{0,9}(?:(?:vllm|llamacpp|sglang):|rapid_mlx_|trtllm_)")

_EMITTED = "emitted"

_Counters = dict[str, dict[int, float]]


def is_metrics(data: bytes) -> bool:
    """Whether bytes, or their beginning, are counters of speculative decoding."""
    return _SIGN.search(data) is not None


def only_samples(data: bytes) -> tuple[bytes, str]:
    """Counters as a person has copied them: commands, table rules and tags around them are left
    out, and a sentence says how many lines; as they are where there are none."""
    kept: list[str] = []
    left: list[str] = []
    lines = data.decode("utf-8-sig", "replace").splitlines()
    for line in lines:
        if not line.strip() or line.startswith("#"):
            kept.append(line)
        elif len(line) <= LONGEST_LINE and (found := _SAMPLE.fullmatch(line)) is not None:
            kept.append(f"{found[1]} {found[2]}")
        elif _BEGIN.match(line) or len(line) > LONGEST_LINE:
            kept.append(line)  # what is wrong with it is said later
        elif any(map(str.isalnum, line)):
            left.append(line)
    if not left and kept == lines:
        return data, ""
    n = "1 line was" if len(left) == 1 else f"{len(left):,} lines were"
    sentence = f"{n} left out, the first is {shorten(left[0].strip(), 80)}" if left else ""
    return ("\n".join(kept) + "\n").encode(), sentence


def read_metrics(data: bytes, name: str, later: bytes = b"") -> list[RecordedRequest]:
    """One sum for each set of labels: engines of a server, models. later: a scrape taken after
    those in `data`. Raises TraceFileError."""
    if len(data) + len(later) > MOST_BYTES:
        raise TraceFileError(f"{name} has more than {MOST_BYTES:,} bytes.", _REMEDY)
    texts = [
        text
        for part in (data, later)
        for text in (_scrapes(part.decode("utf-8", errors="replace")) if part else ())
    ]
    if len(texts) > 2:
        raise TraceFileError(
            f"{name} has {len(texts)} scrapes.", "Keep two, one before and one after."
        )
    scrapes = [_read_scrape(text, name) for text in texts]
    before = scrapes[0] if len(scrapes) == 2 else {}
    return [
        _averages(labels, last)
        if engine == "sglang"
        else _difference(engine, labels, before.get((engine, labels)), last)
        for (engine, labels), last in scrapes[-1].items()
    ]


def _scrapes(text: str) -> list[str]:
    """The scrapes of a file: each begins with the comment or the series that the first does."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    begin = first if first.startswith("#") else first.rpartition(" ")[0]
    starts = [i for i, line in enumerate(lines) if line.startswith(begin)] if begin else [0]
    return [
        "\n".join(lines[start:stop]) + "\n"
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def _read_scrape(text: str, name: str) -> dict[tuple[str, str], _Counters]:
    """The counters of speculative decoding by engine and labels; index -1 is a counter's own."""
    from prometheus_client.parser import text_string_to_metric_families

    if longest_line(text) > LONGEST_LINE:
        raise TraceFileError(
            f"{name} has a line of more than {LONGEST_LINE:,} characters.", _REMEDY
        )
    found: dict[tuple[str, str], _Counters] = {}
    emitted: dict[tuple[str, str], float] = {}
    try:
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise TraceFileError(
            f"{name} is not a valid Prometheus text ({str(error)[:80]}).", _REMEDY
        ) from error
    for sample in samples:
        gauge = sample.name.removeprefix("sglang:")
        if gauge in _GAUGES and gauge != sample.name and is_real(sample.value, LARGEST):
            whose = _labels_text(sample.labels)
            found.setdefault(("sglang", whose), defaultdict(dict))[gauge][-1] = sample.value
            continue
        if (match := _SERIES.fullmatch(sample.name)) is not None:
            engine, series = match[1], match[2]
        elif (known := _OTHER_SERIES.get(sample.name.removesuffix("_total"))) is not None:
            engine, series = known
        else:
            engine = _TOKENS.get(sample.name.removesuffix("_total"))
            if engine and is_real(sample.value, LARGEST) and sample.value == int(sample.value):
                emitted[engine, _labels_text(sample.labels)] = float(sample.value)
            continue
        labels = dict(sample.labels)
        first = int(engine == "rapid_mlx")
        at = labels.pop("depth" if first else "position", None)
        index = -1 if at is None else _position(at, sample.name, name, first)
        values = found.setdefault((engine, _labels_text(labels)), defaultdict(dict))[series]
        if index in values:
            raise TraceFileError(f"{name} has {sample.name} twice in one scrape.", _REMEDY)
        values[index] = _value(sample.value, sample.name, name)
    for key in found.keys() & emitted.keys():
        found[key][_EMITTED][-1] = emitted[key]
    return found


def _labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(labels.items()))


def _value(value: float, series: str, file: str) -> float:
    if not is_real(value, LARGEST) or value != int(value):
        shown = str(value)[:40]
        raise TraceFileError(f"{file}: {series} is {shown}, not a whole number from 0.", _REMEDY)
    return float(value)


def _position(text: str, series: str, file: str, first: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 4
    if not (is_number and first <= int(text) < LONGEST_DRAFT):
        raise TraceFileError(
            f"{file}: position {text[:40]!r} of {series} is not an index in a draft.", _REMEDY
        )
    return int(text) - first


def _averages(labels: str, last: _Counters) -> RecordedRequest:
    found = RecordedRequest("sglang", labels)
    found.given = {_GAUGES[name]: values[-1] for name, values in last.items()}
    found.record = {name: values[-1] for name, values in last.items()}
    return found


def _difference(
    engine: str, labels: str, before: _Counters | None, last: _Counters
) -> RecordedRequest:
    before = before or defaultdict(dict)
    series = [(name, index) for name, values in last.items() for index in values]
    fell = [name for name, index in series if before[name].get(index, 0.0) > last[name][index]]
    found = RecordedRequest(_ENGINES[engine], labels)
    if fell:  # another process of the server: the first scrape is not of the same counters
        before = defaultdict(dict)
        found.record["restarted"] = f"{fell[0]} fell between the scrapes"
    most = max((last[name][i] for name, i in series if name != _EMITTED), default=0.0)
    exact = most < _EXACT[engine]
    if not exact:
        found.record["rounded"] = f"counters from {_EXACT[engine]:,} on have six digits"

    def count(name: str, index: int = -1) -> int | None:
        value = last[name].get(index)
        return None if value is None else int(value - before[name].get(index, 0.0))

    for name, field in _COUNTERS.items():
        setattr(found, field, count(name))
        found.record[name] = count(name)
    if (emitted := count(_EMITTED)) is not None:
        found.timings["predicted_n"] = emitted
    positions = sorted(last[_PER_POS])
    found.per_pos = [count(_PER_POS, i) or 0 for i in range(max(positions, default=-1) + 1)]
    found.record[_PER_POS] = list(found.per_pos)
    if not positions:
        found.per_pos = None
    if exact:
        _check(found)
    return found


def _check(found: RecordedRequest) -> None:
    found.check_counts({field: name for name, field in _COUNTERS.items()})
    if found.per_pos is None:
        return
    accepted, drafts = found.num_accepted_draft_tokens, found.num_spec_steps
    if accepted is not None:
        found.check(
            sum(found.per_pos) == accepted,
            (_PER_POS, "num_accepted_tokens"),
            f"{_PER_POS} sums to {sum(found.per_pos):,}, but num_accepted_tokens is {accepted:,}",
        )
    reached = ([] if drafts is None else [drafts]) + found.per_pos
    found.check(
        all(one >= more for one, more in pairwise(reached)),
        (_PER_POS, "num_drafts"),
        f"{_PER_POS} grows with the position, or is more than num_drafts",
    )
