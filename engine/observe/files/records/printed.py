"""Printed sums of benchmark programs: llama.cpp's `llama-speculative` and `-simple`, vLLM's example
`spec_decode.py` and `vllm bench serve`, SGLang's and TensorRT-LLM's benchmarks, whose averages are
over requests.

A line is a name and a number; a repeated name starts another run of the program. Copied parts of
vLLM or SGLang lines are read in the same way.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from engine.foreign import COUNT, LONGEST_DRAFT, LONGEST_PART_MS, is_real, is_whole
from engine.observe.files.records.column_names import (
    ABOUT,
    NAMES,
    kind_of,
    mean_of,
    names_of,
    plain_number,
    said_lines,
)
from engine.observe.files.records.document import Fields, Node
from engine.observe.files.records.readers import (
    LLAMA_SERVER,
    RecordShape,
    keys_in,
    of_same_request,
    read_usage,
)
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.tables import ALL, read_tables, row_of

_STEPS, _DRAFTED, _ACCEPTED = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
_EMITTED, _MEAN, _RATE, _BY_INDEX = "predicted_n", "mean", "rate", "by index"
_SPEED = "predicted_per_second"
_ABOUT = {_DRAFTED, _ACCEPTED, _MEAN, _BY_INDEX}
"""A run has one of these."""
_PART = f"{_ACCEPTED} of a round"
_COUNTS = (_STEPS, _DRAFTED, _ACCEPTED, _EMITTED)
_AS_COLUMN = {
    **{_STEPS: "rounds", _DRAFTED: "drafted", _ACCEPTED: "accepted", _EMITTED: "tokens"},
    **{_MEAN: "mean length", _RATE: "printed acceptance rate", _SPEED: "t/s"},
}
"""Names of table columns that lines also use."""
_IS_BY_INDEX = re.compile(r"(?i)(?=.{0,40}acc).{0,40}per[_ ]?pos(?:ition)?.{0,40}")
_BEFORE = r"(?:\d{1,9}\.\d\d\.\d{3}\.\d{3} [IWEDC] )?[ \t|>*`\"-]{0,20}(?:spec_decode_)?"
_LINE = re.compile(
    rf"(?:^|[,{{\]|] ?|metrics: |\.{{3}} ){_BEFORE}"
    r"(?P<name>(?:[^\W\d_]|[#\[])[\w#%()/@ .\]-]{1,48}?)\"?[ \t]{0,60}(?:=>|[:=\uff1a]|\.{3,80})"
    r"(?: Mean result:)?[ \t*\[]{0,60}"
    r"(?P<value>\d{1,3}(?:[,'\u2019 \xa0\u2009\u202f]\d{3})++(?:\.\d{1,9})?(?![\d,])"
    r"|\d{1,9},\d{1,9}(?![\d.,])|\d{1,20}(?:\.\d{1,20})?)"
    r"(?P<percent>[ \t]?%)?(?=[\s,|`*\]}]|$)"
    r"(?P<unit> ?t(?:ok(?:en)?s?)?/s\b)?",
    re.IGNORECASE | re.MULTILINE,
)
_INDEX = re.compile(r"(?:acc.{0,15} at token|position|accept(?:ance)? ?@ ?pos|(pos)) (\d{1,4})")
_SIGN = re.compile(
    rf"(?i)[\n,{{\]](?![\d.]++[,\n]) ?{_BEFORE}"
    rf"(?:{'|'.join(NAMES['sums']['signs'])})[ \t*]{{0,60}}\d"
)
_ALONE = re.compile(
    r"(?:\n|metrics: )[ \t|>*`-]{0,20}(?:mean al|mean acceptance len(?:gth)?"
    r"|per-position acceptance rate|accept len"
    r"|drafted(?=.{0,60}(?:\n.{0,60}){0,3}\n[ \t|>*`-]{0,20}accepted[ \t]{0,40}[:=])"
    r"|accepted(?=.{0,60}(?:\n.{0,60}){0,3}\n[ \t|>*`-]{0,20}drafted[ \t]{0,40}[:=]))"
    r"[ \t]{0,40}[:=][ \t*\[]{0,60}\d",
    re.IGNORECASE,
)
"""Also a part of a log line, which may be wrapped there, or two counts on separate lines."""
_OF_LOG = re.compile(
    r"Decode batch|metrics: .{0,400}?(?:Drafted|Number of draft tokens\D{0,8}): *\d"
)
"""A line of an engine's log, if enough of it is there."""
_TASK = re.compile(r"(?m)^={9,99} Task: {1,9}(\S.{0,99}?) ={9,99}$")
"""Heading of the sums that follow, as Spec-Bench prints it."""
_SHARES = re.compile(r"[\d., ]{1,8192}")
_LONGEST_HEAD = 40
"""Characters before the first of several shares, which may say that they are percentages."""
_BACKEND, _NEAR = re.compile(r"(?i)\bbackend\"?[ \t]*:[ \t]*\"?(vllm|sglang)\b"), 2000
"""The server that a client says it has measured."""


def is_printed(text: str) -> bool:
    """Whether a text has such sums."""
    # a much faster check for large texts
    may_have = any(map(text.lower().__contains__, NAMES["sums"]["words"]))
    is_whole, text = _OF_LOG.search(text.replace("\n", "")) is not None, f"\n{text}"
    has_alone = not is_whole and may_have and _ALONE.search(text) is not None
    return has_alone or (may_have and _SIGN.search(text) is not None)


def read_printed(text: str, unread: list[str] | None = None) -> list[RecordedRequest]:
    """The sums of each run of a program in a text, else the rows of its tables, else lines with
    counts or rates. Impossible numbers are left out. unread: see `read_tables`."""
    found = read_tables(text, unread)
    if is_printed(text):
        sums = _sums(text)
        known = {one.num_accepted_draft_tokens for one in sums} - {None}
        others = ((one, one.num_accepted_draft_tokens) for one in found)
        more = [one for one, n in others if n not in known and (one.given or n is not None)]
        if unread is not None:  # a table next to them may describe the same
            unread += [f"the row {one.place}" for one in more]
        return sums
    is_counted = any(one.num_accepted_draft_tokens is not None for one in found)
    sums = [] if is_counted else _sums(text)  # lines may have more
    whole_ = [one for one in sums if one.num_spec_steps or one.num_draft_tokens]
    found = [one for one in whole_ if one.num_accepted_draft_tokens is not None] or found
    counted, rated = ([], []) if found else said_lines(text)
    read = {one.place for one in counted}
    if unread is not None:
        unread[:] = [one for one in unread if one.partition(": ")[0] not in read]
    return found or counted or [one for one in sums if one.given and one.timings] or rated


def _sums(text: str) -> list[RecordedRequest]:
    found: list[RecordedRequest] = []
    values: dict[str, re.Match[str]] = {}
    ends = list(accumulate(len(line) + 1 for line in text.split("\n")))
    tasks = [(one.end(), one[1]) for one in _TASK.finditer(text)]

    def close() -> None:
        if _PART in values:
            values.pop(_DRAFTED, None)  # of a round as well
        has_rate = _RATE in values and ABOUT.search(values[_RATE]["name"].lower()) is not None
        if not values.keys().isdisjoint(_ABOUT) or (has_rate and _SPEED in values):
            start = next(iter(values.values())).start("name")
            place = f"line {1 + bisect_right(ends, start)}"
            n_before = bisect_right(tasks, (start,))
            found.append(_request(values, text, tasks[n_before - 1][1] if n_before else place))
        values.clear()

    for match in _LINE.finditer(text):
        name = _field_of(match)
        before = values.get(name)
        is_next = before is not None and match["name"] == before["name"]
        if before is not None and name == _MEAN and match[0][0] not in ",{]":
            is_next = is_next or _value(match) != _value(before)
        if is_next:
            close()
        if name:
            values.setdefault(name, match)
    close()
    return [one for one in found if ALL.fullmatch(one.place) is None] or found


def _field_of(match: re.Match[str]) -> str:
    """What a line names: a field, a mean, a rate or a draft position; "" for anything else."""
    field = _named(match["name"], match["unit"] or "")
    if field in _COUNTS and match["percent"]:
        return _RATE if field == _ACCEPTED else ""
    return field if field not in _COUNTS or "." not in _value(match) else f"{field} of a round"


def _value(match: re.Match[str]) -> str:
    """The number of a line, with a decimal point and without thousands separators."""
    value = match["value"]
    return plain_number(value, has_comma=bool(match["percent"]) and "." not in value)


@lru_cache(1 << 10)
def _named(name: str, unit: str) -> str:
    """The same for a name and a unit."""
    name = " ".join(re.split(r"[-_\s]+", name.lower().rstrip(" .-_")))
    if (at := _INDEX.fullmatch(name)) is not None:
        return f"position {int(at[2]) - bool(at[1])}"  # short names count from 1
    if name in NAMES["lines"] or (_IS_BY_INDEX.fullmatch(name) and "rate" in name):
        return str(NAMES["lines"].get(name, _BY_INDEX))
    kind = kind_of(names_of([name])[0]) or (kind_of(name + unit) if unit else "")
    return str(NAMES["fields"].get(kind, ""))


def _request(values: dict[str, re.Match[str]], text: str, place: str) -> RecordedRequest:
    first = next(iter(values.values()))
    around = text[max(first.start() - 100, 0) : next(reversed(values.values())).end()].lower()
    own = next((engine for sign, engine in NAMES["engines"]["lines"] if sign in around), "")
    said = _BACKEND.findall(text, max(first.start() - _NEAR, 0), first.end())
    engine = said[-1].lower() if said else own
    named = {
        _AS_COLUMN[name]: _value(one) + ("%" if "%" in f"{one['name']}{one['percent']}" else "")
        for name, one in values.items()
        if name in _AS_COLUMN
    } | _by_place(values, text)
    found = row_of(list(named), list(named.values()), place, "") or RecordedRequest("", place)
    found.engine, found.place, found.stop, found.record = engine, place, "end", {}
    accepted = found.num_accepted_draft_tokens
    for name, of, own in ((_MEAN, found.num_spec_steps, 1), (_RATE, found.num_draft_tokens, 0)):
        if name in values and accepted is not None and of:
            number, half = mean_of(_value(values[name]))
            is_percent = "%" in named[_AS_COLUMN[name]] or (name == _RATE and number > 1)
            part = (accepted + own * of) * (100 if is_percent else 1)
            found.check_ratio(values[name]["name"], number, part, of, "the counts", within=half)
    return found


def _by_place(values: dict[str, re.Match[str]], text: str) -> dict[str, str]:
    """Shares of drafts accepted at each position, as far as they are consecutive, under column
    names. text: the program's output."""
    parts: list[str] = []
    while len(parts) < LONGEST_DRAFT and (match := values.get(f"position {len(parts)}")):
        # the text before the first one describes all of them
        head = text[max(match.start() - _LONGEST_HEAD, 0) : match.start()] if not parts else ""
        is_share = "%" in parts[0] if parts else "(%)" in head or match["percent"]
        parts.append(_value(match) + ("%" if is_share else ""))
    if not parts and _BY_INDEX in values:
        row = _SHARES.match(text, values[_BY_INDEX].start("value"))
        shares = [part.strip() for part in (row[0] if row else "").split(",") if part.strip()]
        if all(re.fullmatch(r"[01](?:\.\d{1,20})?", one) for one in shares[:LONGEST_DRAFT]):
            parts = shares[:LONGEST_DRAFT]
    return {f"position {at}": one for at, one in enumerate(parts)}


# -- the same as JSON -------------------------------------------------------------------------

_STAGE_NAMES = NAMES["generations"]["spec-bench"]


def _read_spec_bench(node: Node) -> RecordedRequest:
    """An attempt, short or with --output-details: the sums of its stages, which draft in turn."""
    values = node.fields()
    name, run = values.text("task_name") or values.text("task"), values.count("run")
    if run is None and (run := values.count("repeat_index")) is not None:
        run += 1
    found = RecordedRequest("ik_llama.cpp", f"{name}, run {run}", record=dict(node.values))
    inner = values.object("speculative") or values
    stages = [
        Fields(one, node.file, f"{node.place}.stages", node.taken)
        for one in inner.values.get("stages") or ()
        if isinstance(one, dict)
    ]
    for field, names in _STAGE_NAMES.items():
        counts = [next((n for k in names if (n := s.count(k)) is not None), None) for s in stages]
        known = [n for n in counts if n is not None]
        setattr(found, field, sum(known) if known and len(known) == len(counts) else None)
    if len(stages) == 1:
        found.per_pos = stages[0].counts("accepted_by_position") or None
    tokens, timing = values.object("tokens"), values.object("timing")
    generated = tokens.count("generated") if tokens else values.count("generated")
    found.set_tokens(tokens.count("prompt") if tokens else None, None, generated)
    seconds = timing.number("decode_s") if timing else values.number("decode_s")
    if seconds is not None:
        found.timings["predicted_ms"] = 1e3 * seconds
    found.stop = values.text("stop") or "end"
    found.check_counts({field: names[0] for field, names in _STAGE_NAMES.items()})
    return found


SPEC_BENCH = RecordShape(
    "spec-bench",
    "llama-spec-bench",
    (("row_type", "task", "stages"), ("row_type", "task_id", "speculative")),
    _read_spec_bench,
)


_BY_STEP = "draft_count", "accept_count"


def _read_mlc(node: Node) -> RecordedRequest:
    """Counts by index of a step's tokens, of which the first is the target's own."""
    values, found = node.fields(), RecordedRequest("mlc-llm", node.place, stop="end")
    drafted, accepted = (values.counts(key) or [] for key in _BY_STEP)
    if drafted and accepted:
        _take_steps(found, accepted, sum(drafted[1:]), _BY_STEP)
        sentence = "the first token of each step is the target's own, but not every step counts it"
        found.check(drafted[0] == accepted[0], _BY_STEP, sentence)
    return found


def _take_steps(
    found: RecordedRequest, accepted: list[int], drafted: int, keys: tuple[str, str]
) -> None:
    """accepted: steps that emitted a token at each index, the target's own first."""
    found.num_spec_steps, found.per_pos = accepted[0], accepted[1:]
    found.num_draft_tokens, found.num_accepted_draft_tokens = drafted, sum(accepted[1:])
    found.check_counts(dict(zip((_DRAFTED, _ACCEPTED), keys, strict=True)))


MLC = RecordShape("mlc-llm", "MLC LLM", (_BY_STEP,), _read_mlc)
_OF_HEADS = "rejected_tokens", "accepted_tokens_per_head"


def _read_fastdeploy(node: Node) -> RecordedRequest:
    """`speculate_metrics` of a reply, in which accepted tokens are all emitted ones."""
    values, found = node.fields(), RecordedRequest("fastdeploy", node.place, stop="end")
    rejected, heads = values.count(_OF_HEADS[0]), values.counts(_OF_HEADS[1])
    emitted = values.count("accepted_tokens")
    if heads and rejected is not None:
        _take_steps(found, heads, sum(heads[1:]) + rejected, _OF_HEADS)
        found.derived = ("num_draft_tokens", "draft_n")
        sentence = f"{_OF_HEADS[1]} adds up to {sum(heads):,}, but accepted_tokens differs"
        found.check(emitted in (None, sum(heads)), (_OF_HEADS[1], "accepted_tokens"), sentence)
    read_usage(node, node.owner("usage"), found)
    return found


FASTDEPLOY = RecordShape("fastdeploy", "FastDeploy", (_OF_HEADS,), _read_fastdeploy)
_OF_TURNS = "new_tokens", "wall_time"
_BY_TURN = (*_OF_TURNS, "decoding_steps", "idxs")
"""Lists with an entry per turn."""


def _read_turns(node: Node) -> RecordedRequest:
    """The answers to a question's turns, as EAGLE and Spec-Bench keep them: tokens and seconds of
    each, including the prompt's as in their own speeds, the index of the last step or the number of
    steps, and for all steps the number of emitted tokens. If each emitted one, there were no
    drafts, or none was accepted: unknown."""
    values, owner = node.fields(), node.fields(node.owner("question_id"))
    found = RecordedRequest("", node.place, stop="end", record=dict(node.values))
    found.model, question = owner.text("model_id") or "", owner.values.get("question_id")
    if isinstance(question, int | str):
        found.place = f"{owner.text('category') or 'question'} {question}"[:_LONGEST_NAME]
    emitted = sum(values.counts("new_tokens") or ())
    found.set_tokens(None, None, emitted)
    times = node.values["wall_time"]
    are_times = isinstance(times, list) and all(is_real(one, LONGEST_PART_MS) for one in times)
    if are_times and (seconds := sum(times)) > 0:
        found.timings[_SPEED] = emitted / seconds
    by_step, last = values.counts("accept_lengths", LONGEST_DRAFT), values.counts("idxs")
    numbers = values.counts("decoding_steps") or [one + 1 for one in last or ()]
    turns = {key: len(one) for key in _BY_TURN if isinstance(one := node.values.get(key), list)}
    same = len(set(turns.values())) <= 1
    found.check(same, (*turns,), f"{' and '.join(turns)} have different numbers of turns")
    steps, emitted = (len(by_step), sum(by_step)) if by_step else (sum(numbers), emitted)
    if 0 < steps < emitted:
        found.num_spec_steps, found.num_accepted_draft_tokens = steps, emitted - steps
        if by_step and 0 not in by_step:
            counts = Counter(by_step)
            found.histogram = [counts[n] for n in range(1, max(by_step) + 1)]
    return found


_SIGNS = tuple((*_OF_TURNS, one) for one in ("idxs", "accept_lengths"))
EAGLE = RecordShape("eagle", "EAGLE and Spec-Bench", _SIGNS, _read_turns)


_KEY = re.compile(rb'"([A-Za-z][\w.:/]{2,80})"\s*:\s*"?\d')
_OF_DRAFT = re.compile(rb'"draft"\s*:\s*\{(?=[^{}]*"accepted"\s*:)[^{}]*"n"\s*:\s*\d')
_OF_RATE = re.compile(r"(?i)acc.*(?:rate|ratio|len)")
_LONGEST_NAME = 80
_AROUND = "tokens", "speed", "seconds"
"""Objects of the request that may contain its draft counts."""


def counted_shape(data: bytes) -> RecordShape | None:
    """The record shape of a JSON text, or its beginning, with objects that have counts of accepted
    and of drafted or rejected tokens, or of drafts, or else a rate or a mean length, under telling
    names; None if there are none."""
    keys = dict.fromkeys(one.decode() for one in _KEY.findall(data))
    kinds = dict(zip(keys, map(kind_of, names_of(list(keys))), strict=True))
    accepted = [key for key, kind in kinds.items() if kind == "accepted"]
    others = [
        *(key for key, kind in kinds.items() if kind in ("drafted", "rejected")),
        *(key for key in keys if key.endswith("drafts")),
        *(["n"] if _OF_DRAFT.search(data) is not None else []),
    ]
    signs: tuple[tuple[str, ...], ...] = tuple(product(accepted, others))
    signs = signs or tuple(
        (key,)
        for key, kind in kinds.items()
        if kind == "at index" or (kind in ("rate", "mean") and _OF_RATE.search(key))
    )
    without = LLAMA_SERVER.without
    shape = RecordShape("counts", "counts", signs, _read_counted, without, _counted_of, True)
    return shape if shape.may_be_in({"n", *keys_in(data)}) else None


def _counted_of(node: Node) -> Hashable:
    if not any("spec_decode_num" in key for key in node.values):
        return of_same_request(node)
    return tuple(key for key in node.path if not key.isdigit())  # a server's cumulative counts


def _cells_of(values: dict[str, Any]) -> dict[str, str]:
    """The numbers and texts of an object."""
    return {
        key: str(value)
        for key, value in values.items()
        if isinstance(value, int | float | str) and len(str(value)) <= _LONGEST_NAME
    }


def _read_counted(node: Node) -> RecordedRequest:
    """An object as a table row, whose names and cells it has. Tokens and speeds may be in ancestors
    that contain nothing else."""
    plain = _cells_of(node.values)
    node.taken.setdefault(id(node.values), set()).update(plain)
    if node.path[-1:] == ("draft",) and "n" in plain:
        plain["drafted"] = plain.pop("n")
    inside = node.values
    for owner in reversed(node.around):
        if not isinstance(owner, dict):
            break
        if any(one is not inside and isinstance(one, dict | list) for one in owner.values()):
            break
        more = {key: one for key, one in _cells_of(owner).items() if key not in plain}
        kinds = dict(zip(more, map(kind_of, names_of(list(more))), strict=True))
        names = {key: one for key, one in more.items() if not kinds[key] and owner[key] == one}
        of_all = {key: one for key, one in more.items() if kinds[key] in _AROUND}
        node.taken.setdefault(id(owner), set()).update(names, of_all)
        plain, inside = names | plain | of_all, owner
    found = row_of(names_of(list(plain)), list(plain.values()), node.place, "")
    found = found or RecordedRequest("", node.place)
    found.engine = found.engine or NAMES["series"]["engines"].get(plain.get("backend"), "")
    for key in filter(_IS_BY_INDEX.fullmatch, node.values):
        shares = node.values[key]
        if not isinstance(shares, list) or not 0 < len(shares) <= LONGEST_DRAFT:
            continue
        if all(is_whole(one, COUNT) for one in shares) and sum(shares) == (
            found.num_accepted_draft_tokens
        ):
            found.per_pos = node.fields().counts(key)
        elif "rate" in key and all(is_real(one, 1.0) for one in shares):
            found.rates, found.num_spec_tokens = node.fields().values[key], len(shares)
            node.taken[id(node.values)].add(key)
    return found
