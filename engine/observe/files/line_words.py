"""Wordings of other engines' lines with sums: the meaning of a line, with the places of its values,
or the request that it describes."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from engine.foreign import COUNT, LONGEST_DRAFT, LONGEST_PART_MS, real, whole
from engine.observe.files.records.request import RecordedRequest
from engine.observe.rounds.log_lines import name_of, time_of
from engine.observe.rounds.log_words import NOTHING, Saying, Value

READ = tomllib.loads(Path(__file__).with_name("printed_requests.toml").read_text("utf-8"))
SIGNS = re.compile("|".join(READ["signs"]))
"""A text with such lines contains these."""
METRICS = re.compile(r"Spec(?:Decoding|ulative) metrics: ?")
_PROCESSES = re.compile(
    r"\((?:APIServer|EngineCore\w{0,20}|Worker\w{0,20})[^)]{0,40}\)"
    r"|(?:\[|(?<!\S))[\w.]{1,60}\.py:\d{1,6}\]|(?:Engine \d{1,6}|\d{1,6} Engines Aggregated):"
    r"|\b[DTPE]P\d{1,4}\b"
)
_COUNTED = re.compile(
    r"^((?:[^\s:\[]{1,200}:)?)(?:\d{1,9}:(?!\d\d\b)(?=\S)|\s*\d{1,9}\t|\s+\d{1,9} )"
)
"""Line numbers of `grep -n`, `cat -n` and `less -N`."""
_ENGINE = re.compile(r"\bEngine (\d{1,6})\b|EngineCore_(?:DP)?(\d{1,6})\b|\bDP(\d{1,4})\]")
SPEED = re.compile(
    r"Avg prompt throughput:\s{0,9}([\d.]{1,20})\s{0,9}tokens/s.{0,40}?"
    r"Avg generation throughput:\s{0,9}([\d.]{1,20})"
    r"(?:\s{0,9}tokens/s, Running:\s{0,9}(\d{1,9}) reqs)?"
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
BATCH = re.compile(r"Decode batch(?: \[\d{1,20}\])?[.,:]? ?")
_OF_BATCH = re.compile(
    r"(accept len|accept rate|avg_accept_len|accept_rate|gen throughput \(token/s\)|#running-req)"
    r":\s{0,9}([\d.]{1,20})"
)
_RANK = re.compile(r"\bDP(\d{1,4})\b")
PAIR = re.compile(r"'(\w{1,60})': (\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,3})?)(?=[,}\s])")
KEY = re.compile(r"\b([A-Za-z/]{2,12})=\s{0,12}([-\w.%/]{1,24})")
ROW_END = re.compile(r"\btok/s=\s{0,12}[\d.]{1,20}")
TOTAL = re.compile(r'"(\w{1,40})":\s{0,9}([\d.]{1,20})')
KOBOLD_DRAFTS = re.compile(
    r"Drafted (\d{1,9}) Tokens: \[|\(Draft Results - Success:(\d{1,20}), Failure:(\d{1,20})\)"
)
"""With --debugmode: each draft's tokens, and after a request its accepted tokens and its drafts
ended by a wrong one."""

_PATTERNS = {(r["has"], r["engine"]): re.compile("".join(r["pattern"])) for r in READ["request"]}
REQUESTS = tuple(_PATTERNS)
"""Lines about a whole request or interval: pattern and engine."""


def printed_request(
    said: str, word: str, engine: str, before: RecordedRequest | None = None
) -> RecordedRequest | None:
    """The request, or interval, in such a line. before: that of the previous line."""
    if (found := _PATTERNS[word, engine].search(said)) is None:
        return None
    printed = {name: value for name, value in found.groupdict().items() if value is not None}
    place = f"request {printed['id']}" if "id" in printed else time_of(said[: found.start()])
    if "accepted" not in printed and "depth" in printed:
        if before is not None and before.place == place and before.per_pos is None:
            _take_depths(before, printed["depth"])
        return before
    stop = printed.get("stop", "interval" if "shares" in printed else "end")
    request = RecordedRequest(engine, place, stop=stop)
    n, cached, new, steps, drafted = (
        None if name not in printed else whole(printed[name], COUNT)
        for name in ("n", "cached", "new", "steps", "drafted")
    )
    request.set_tokens(None if cached is None or new is None else cached + new, cached, n)
    if new is not None:
        request.timings["prompt_n"] = new
    for name, field in (("prompt_s", "prompt_ms"), ("s", "predicted_ms")):
        if name in printed:
            request.timings[field] = round(1e3 * real(printed[name], LONGEST_PART_MS / 1e3), 3)
    for name, field in (("prompt_speed", "prompt_per_second"), ("speed", "predicted_per_second")):
        if re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", printed.get(name, "")):
            request.timings[field] = real(printed[name])
    if steps is not None and "plain" in printed:
        steps -= whole(printed["plain"], steps)
    if drafted is not None:
        request.num_accepted_draft_tokens = n_accepted = whole(printed["accepted"], drafted)
        if "mean" in printed and abs(1 + n_accepted / (steps or 1) - float(printed["mean"])) > 0.01:
            steps = None  # not each of them emits one token of the target
    request.num_spec_steps, request.num_draft_tokens = steps, drafted
    if (
        "share" in printed
        and n
        and abs(100 * (1 - (steps or 0) / n) - float(printed["share"])) < 0.1
    ):
        request.num_accepted_draft_tokens = n - (steps or 0)  # the others are the target's own
    if "depth" in printed:
        _take_depths(request, printed["depth"])
    elif "shares" in printed:
        parts = re.findall(r"\d: '(\d{1,3}\.\d{1,4})%'", printed["shares"])
        shares = [float(one) / 100 for one in parts]  # of the steps, by accepted tokens
        request.num_spec_tokens = length = len(shares) - 1
        if length > 0 and request.num_draft_tokens and request.num_draft_tokens % length == 0:
            request.num_spec_steps = request.num_draft_tokens // length
            request.set_rates([min(sum(shares[at:]), 1.0) for at in range(1, length + 1)], 4)
    if before is None or "id" not in printed or before.place != place:
        return request
    has_drafts = None not in (before.num_draft_tokens, drafted)
    if has_drafts or not before.timings.keys().isdisjoint(request.timings):
        return request
    before.timings |= request.timings
    if drafted is not None:
        before.num_spec_steps, before.num_draft_tokens = steps, drafted
        before.num_accepted_draft_tokens = request.num_accepted_draft_tokens
    return before


def _take_depths(request: RecordedRequest, said: str) -> None:
    """Accepted and drafted tokens by index. All drafts have a first token. "Drafted" may mean
    judged ones only, which are no more than were accepted at the index before."""
    parts = re.findall(r"d\d{1,4}=(\d{1,20})/(\d{1,20})", said)
    counts = [(whole(accepted, COUNT), whole(drafted, COUNT)) for accepted, drafted in parts]
    while counts and counts[-1][1] == 0:
        counts.pop()
    if counts:
        request.num_spec_steps, request.per_pos = counts[0][1], [one for one, _ in counts]
        if all(more <= one for (one, _), (_, more) in pairwise(counts)):
            request.judged = [drafted for _, drafted in counts]
        request.check(
            sum(request.per_pos) == request.num_accepted_draft_tokens
            and sum(drafted for _, drafted in counts) == request.num_draft_tokens,
            ("accept", "depth"),
            "the counts per draft position do not add up to the total",
        )


def vllm_saying(said: str, head: re.Match[str]) -> Saying:
    """A metrics line as the arguments of `on_vllm`."""
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
            engine_in(said[:at]),
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


def speed_saying(said: str, found: re.Match[str]) -> Saying:
    """vLLM's speed line of the same seconds as the arguments of `on_speed`."""
    speeds = (NOTHING if found[i] is None else (*found.span(i), 1e9) for i in (1, 2, 3))
    return "speed", "", ((0, found.start(), None), engine_in(said), *speeds)


def batch_saying(said: str, head: re.Match[str]) -> Saying:
    """A decode batch line as the arguments of `on_batch`."""
    found = _OF_BATCH.finditer(said, head.end())
    spans = {one[1].removeprefix("avg_").replace("t_", "t "): one.span(2) for one in found}
    rank = _RANK.search(said, 0, head.start())
    names = ("accept len", "accept rate", "gen throughput (token/s)", "#running-req")
    values = ((*spans[one], LONGEST_PART_MS) if one in spans else NOTHING for one in names)
    of_rank = NOTHING if rank is None else (*rank.span(1), None)
    kind = "" if "accept" in said else "plain"
    return "batch", kind, ((0, head.start(), None), of_rank, *values)


@lru_cache(1 << 12)
def source_of(prefix: str, stream: str) -> str:
    """The server of a line: from its prefix, without the processes of one server."""
    prefix = _PROCESSES.sub(" ", _COUNTED.sub(r"\1", prefix[-256:]))
    return stream or name_of(prefix)


def engine_in(said: str) -> Value:
    """Place of an engine's number."""
    found = _ENGINE.search(said)
    return NOTHING if found is None else (*found.span(found.lastindex or 0), None)


def _items(said: str, at: int) -> list[Value]:
    """Consecutive numbers after a label."""
    label = _RATES.search(said, at)
    found: list[Value] = []
    at = label.end() if label else len(said)
    while len(found) < LONGEST_DRAFT and (item := _ITEM.match(said, at)) is not None:
        if not re.fullmatch(r"\d(?:\.\d{0,20})?", item[1]):
            break
        found.append((*item.span(1), 1.0))
        at = item.end()
    return found
