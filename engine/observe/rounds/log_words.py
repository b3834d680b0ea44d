"""Wordings of llama-server's log, of builds of two years and of ik_llama.cpp: the meaning of a
message, by name, with the places of its values."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from engine.foreign import (
    COUNT,
    LARGEST,
    LONGEST_DRAFT,
    LONGEST_PART_MS,
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    real,
    whole,
)

Value: TypeAlias = tuple[int, int, float | None]
"""Start and end in the message, start -1 if absent, and the maximum: int for an integer, float for
a decimal, None for a text."""
NOTHING: Value = (-1, -1, None)
Saying: TypeAlias = tuple[str, str, tuple[Value, ...]]
"""The meaning of a message (a method of `ServerState`), its kind, and its values."""

# Regular expressions without ambiguous repetition: gaps are bounded, and the end of a text is
# searched from its end.
SLOT = re.compile(r"slot .{1,33}?: id {1,40}+(\d{1,9}) \| task (-?\d{1,10}) \| ?")
IDS = re.compile(r"\bid_slot=(\d{1,9}) id_task=(\d{1,10})\b")
CANDIDATE = re.compile(
    r"- (?:seq_id (\d+), )?draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\) '"
)
_IMPL = re.compile(r"called impl (\S{1,100}), hist size = (\d+), call_count = \d+, gen = (\d+)")
IMPLEMENTATION = re.compile(r"adding speculative implementation '([^']{1,200})'")
_GENERATE = re.compile(r"generate_draft: id=-?\d+, #tokens=(\d+), #draft=(\d+), pos_next=(\d+)")
_DECODE = re.compile(r"slot decode token, id=-?\d+,.{0,200} n_tokens = (\d+)")
_CREATED = re.compile(r"created speculative checkpoint \(.{0,400} size = ([\d.]+) MiB")
_RESTORING = re.compile(r"restoring speculative checkpoint \(.{0,400} size = (\d+)\)")
_ACCEPTED = re.compile(
    r"accepted\s{1,40}+(\d+)/\s{0,40}+(\d+) draft tokens"
    r"(?:( \(restore checkpoint\))|(, new n_(?:tokens|past) = ))?"
)
_ADDED = re.compile(r"add accepted tokens: sampled=\d+, ids\.size=(\d+), n_draft=(\d+)")
TOKEN = re.compile(r"(?:n_gen|n_decoded) = (\d+), n_remaining = -?\d+, next token:\s+(\d+) '")
_PROMPT = re.compile(r"new prompt, .{0,200}?(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_CACHED = re.compile(
    r"^(?:cached )?n_(?:tokens|past) = (\d+)(?:, memory_seq_rm|\s*$)|^cached n_tokens = (\d+)"
)
_SPEED = re.compile(
    r"(?:n_gen|n_decoded) =\s{0,40}+(\d+), tg =\s{0,40}+([\d.]+) t/s"
    r"(?:, tg_3s =\s{0,40}+([\d.]+) t/s)?"
)
_TIME = re.compile(
    r"(prompt )?eval time\s{0,40}+=\s{0,40}+([\d.]+) ms /\s{0,40}+(\d+) (?:tokens|runs)"
    r"(?:\s{0,9}\([^,\n]{1,60},\s{0,40}+([\d.]{1,20}) tokens per second)?"
)
_SUMS = re.compile(
    r"draft acceptance(?: rate)?\s{0,40}+=\s{0,40}+([-.,\w]{1,40}) "
    r"\(\s{0,40}+(\d+) accepted /\s{0,40}+(\d+) generated\)"
)
_MEAN = re.compile(r"mean (?:acceptance )?len(?:gth)?\s{0,40}+=\s{0,40}+([\d.]{1,40}+)(?!,\d)")
_BY_POSITION = re.compile(
    r"(?:acceptance rate per position|acc(?:eptance)?(?: rate)? per pos(?:ition)?)"
    r"\s{0,40}+[=:]\s{0,40}+\(([\d., ]{1,8192})\)"
)
_STATISTICS = re.compile(
    r"statistics\s{1,40}+(\S{1,64}): #calls.{0,200}?#gen drafts\s{0,40}+=\s{0,40}+(\d+),"
    r".{0,100}?#gen tokens\s{0,40}+=\s{0,40}+(\d+), #acc tokens\s{0,40}+=\s{0,40}+(\d+)"
    r"(?:.{0,60}?#acc rate/pos\s{0,40}+=\s{0,40}+\(([\d., ]{1,8192})\))?"
)
_SELECTED = re.compile(
    r"^selected slot by (LCP similarity|LRU)(?:, (?:f_)?sim_best = ([\d.]+)"
    r"(?: \((\d+)/\d+\))?(?:.{0,40}?f_keep = ([\d.]+))?)?"
)
_COMMON = re.compile(
    r"^n_past = (\d+), [\w.]{1,40}\.size\(\) = (\d+), .{0,60}?pos_min = (?:-\d+|(\d+))"
    r"(?:, n_swa = (\d+))?"
)
_CHECKPOINT = re.compile(
    r"^(created(?= context)|restored(?= context)|erased(?= inval)|erasing(?= old)) .{0,200}?"
    r"\(pos_min = -?\d+, pos_max = (?:-\d+|(\d+))(?:.{0,30}? n_tokens = (\d+))?"
    r"(?:, n_swa = (\d+))?(?:.{0,200}?size = ([\d.]+) MiB)?"
)
_CACHE = re.compile(r"^={3,20} Cache: cache_size = (\d+), n_past =\s{0,9}(\d+)")
_LOOKED_AT = re.compile(r"[Cc]hecking checkpoint with \[(\d+), (\d+)\] against (\d+)")
_ADAPTED = re.compile(
    r"adaptive (?!seq )[a-z][\w-]{0,20}(?: (?!seq )[a-z][\w-]{0,20}){0,2}"
    r"(?: seq (\d{1,9}))?\s{0,8}+[:=]?\s{0,8}+(\d{1,9}) -> (\d{1,9})"
)
_RELEASED = re.compile(r"^stop processing(?:: n_(?:tokens|past) = (\d+), truncated = (\d))?")
MODEL = re.compile(r"load_model: loading model '([^']{1,4096})'")
BUILD = re.compile(r"build(?:_info)?\s*[:=]\s*(\S{1,200})")
PLANES = re.compile(r"llama_context: n_rs_seq\s+= (\d+)")
_LAUNCH = re.compile(
    r"(?P<name>freq_(?:base|scale)(?:_train)?)\s{0,40}= (?P<value>[\d.e+-]{1,40})"
    r"|file size\s{0,9}= (?P<file_size>[\d.]{1,20} [MG]iB)"
    r"| K \((?P<k>\w{1,20})\): .{1,60} V \((?P<v>\w{1,20})\): "
    r"|- n_max=(?P<n_max>\d{1,9}), n_min=(?P<n_min>\d{1,9}), p_min=(?P<p_min>[\d.]{1,20})"
    r"|(?:must match target model to use speculation but|initialize speculative decoding context:)"
    r" (?P<refusal>.{1,200})"
)
_OF_LAUNCH = "freq_", "file size", " K (", "- n_max=", "peculati"
START = re.compile(r"llama_server: initializing|build: \d|main: server is listening")
CHUNK = "http: streamed chunk: data: "
"""Precedes data sent to a client, which is not parsed."""
_LOOKS_LIKE = re.compile(
    r"(?:^|\| )(?:n_gen|n_decoded) =|accepted\s{1,4}\d+/"
    r"|draft acceptance(?: rates?)?+(?! [a-z]{2}|[.,;)])"  # as a person may write about it
    r"|eval time\s{0,5}=|#gen drafts|draft candidate"
)
"""Never occurs in a server's lines without rounds and sums."""
_OF_LOOKS = "n_gen =", "n_decoded =", "accepted ", "draft ", "eval time", "#gen "
_MOST_LOOKED_AT = 200
"""Characters of a message that are examined."""
_MARKS = {
    "max possible draft": "draft",
    "n_batch (effective)": "verify",
    "done yielding": "yielded",
}
_SIGNS = re.compile(
    r"(?:^|[^\d.])\d{1,9}\.\d\d\.\d{3}\.\d{3} [IWEDC] "
    r"|slot {1,20}[\w():~]{1,32}: id {1,40}\d{1,9} \| task |llama_server: "
    r"|eval time {0,8}= {1,20}[\d.]{1,20} ms /|draft acceptance(?: rate)? {0,8}= "
    r"|statistics {1,40}\S{1,64}: #calls|- (?:seq_id \d{1,9}, )?draft candidate {1,9}\d"
)
_OF_SIGNS = "| task ", "llama_server: ", "eval time", "draft acceptance", ": #calls", "draft candid"
_STAMP = re.compile(r"\.\d\d\.\d{3}\.\d{3} [IWEDC] ")
"""One of these occurs in every match of _SIGNS, and is found far faster in a large text."""


def launch_saying(message: str) -> dict[str, str]:
    """Launch settings in a message: RoPE, file sizes, types of cache cells, draft limits and why it
    does not draft, by name."""
    if not any(map(message.__contains__, _OF_LAUNCH)):
        return {}
    found = _LAUNCH.search(message)
    if found is None:
        return {}
    said = {name: value for name, value in found.groupdict().items() if value is not None}
    return {said.pop("name"): said.pop("value")} if "name" in said else said


def has_entries(text: str) -> bool:
    """Whether a text has entries that only a llama-server's log has."""
    may_have = any(map(text.__contains__, _OF_SIGNS)) or _STAMP.search(text) is not None
    return may_have and _SIGNS.search(text) is not None


def looks_like_sums(message: str) -> bool:
    """Whether a message starts like those of rounds or sums."""
    may_be = any(map(message.__contains__, _OF_LOOKS))
    return may_be and _LOOKS_LIKE.search(message, 0, _MOST_LOOKED_AT) is not None


def values_of(said: str, values: tuple[Value, ...]) -> list[Any]:
    """The values of a message, None for absent ones. Raises OutOfRangeError."""
    return [
        None
        if begin < 0
        else said[begin:end]
        if most is None
        else whole(said[begin:end], most)
        if isinstance(most, int)
        else real(said[begin:end], most)
        for begin, end, most in values
    ]


def slot_saying(said: str) -> Saying | None:
    """The meaning of a slot's message, without its head; None if it is not read."""
    if said.startswith(("n_gen", "n_decoded")):
        found = TOKEN.search(said) if said.rstrip().endswith("'") else None
        if found is not None and said[found.end() :].strip():
            text = found.end(), len(said.rstrip()) - 1, None
            return "token", "", (*_values(found, MOST_TOKENS, COUNT), text)
        if (found := _SPEED.match(said)) is not None:
            return "speed", "", _values(found, MOST_TOKENS, LONGEST_PART_MS, LONGEST_PART_MS)
        return None
    if said.startswith("accepted") and (found := _ACCEPTED.match(said)) is not None:
        if found[3] or found[4] or not said[found.end() :].strip():
            kind = "restores" if found[3] else "again" if found[4] else ""
            return "accepted", kind, _values(found, LONGEST_DRAFT, LONGEST_DRAFT)
        return None
    return _listed(said, _OF_SLOT) or _sums(said) or _mark(said)


def free_slot_saying(said: str) -> Saying | None:
    """The meaning of a message of a slot without a task."""
    return _listed(said, _OF_FREE_SLOT) or _mark(said)


def candidate_saying(message: str) -> Saying | None:
    """The meaning of a message about a drafter's candidate."""
    if (found := CANDIDATE.search(message)) is None:
        return None
    text = found.end(), len(message.rstrip()) - 1, None
    most = COUNT, COUNT, COUNT, COUNT, LONGEST_PART_MS
    return "candidate", "", (*_values(found, *most), text)


def server_saying(message: str) -> Saying | None:
    """The meaning of a message without a slot, about rounds and sums."""
    if (saying := _listed(message, _OF_SERVER)) is not None:
        return saying
    if (saying := _sums(message)) is not None:
        return "bare", saying[0], saying[2]
    return _mark(message)


def is_open(message: str) -> bool:
    """Whether a token's text may continue on the next line: no quote ends it, or one that it may
    start with."""
    found = TOKEN.search(message) or CANDIDATE.search(message)
    text = message[found.end() :].rstrip() if found is not None else "'"
    return found is not None and (text == "'" or not text.endswith("'"))


def _values(found: re.Match[str], *mosts: float | None) -> tuple[Value, ...]:
    return tuple((*found.span(i), most) for i, most in enumerate(mosts, 1))


_Listed: TypeAlias = tuple[tuple[str, str, re.Pattern[str], tuple[float | None, ...]], ...]
"""Messages by a word in each: name, pattern, and maxima of the values."""
_ADAPTED_ROW = "adaptive ", "adapted", _ADAPTED, (COUNT, LONGEST_DRAFT, LONGEST_DRAFT)
_OF_SLOT: _Listed = (
    ("generate_draft", "generated", _GENERATE, (COUNT, LONGEST_DRAFT, MOST_TOKENS)),
    ("add accepted", "added", _ADDED, (LONGEST_DRAFT + 1, LONGEST_DRAFT)),
    ("slot decode", "decoded", _DECODE, (MOST_TOKENS,)),
    ("created spec", "saved", _CREATED, (float(LARGEST >> 20),)),
    ("restoring", "restoring", _RESTORING, (LARGEST,)),
    ("new prompt", "prompt", _PROMPT, (MOST_PROMPT_TOKENS,)),
    ("n_past =", "common", _COMMON, (MOST_TOKENS, MOST_TOKENS, COUNT, COUNT)),
    ("n_tokens", "cached", _CACHED, (MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS)),
    ("n_past =", "cached", _CACHED, (MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS)),
    ("kv cache", "cached", re.compile(r"kv cache rm .{0,300} p0=(\d+)"), (MOST_PROMPT_TOKENS,)),
    ("cking ch", "looked_back", _LOOKED_AT, (MOST_TOKENS, MOST_TOKENS, MOST_TOKENS)),
    ("stop processing", "released", _RELEASED, (MOST_TOKENS, 9)),
    ("released |", "released", re.compile(r"slot released .{0,300}n_cache_tokens=(\d+)"), (COUNT,)),
    ("pos_max", "checkpoint", _CHECKPOINT, (None, *(MOST_TOKENS,) * 3, float(1 << 30))),
    _ADAPTED_ROW,
    ("forcing", "forced", re.compile("^forcing full"), ()),
)
_OF_FREE_SLOT: _Listed = (
    ("selected", "selected", _SELECTED, (None, LONGEST_PART_MS, MOST_TOKENS, LONGEST_PART_MS)),
)
_OF_SERVER: _Listed = (
    ("called impl", "impl", _IMPL, (None, COUNT, COUNT)),
    ("#calls", "statistics", _STATISTICS, (None, COUNT, COUNT, COUNT, None)),
    _ADAPTED_ROW,
    ("Cache: ", "cache", _CACHE, (MOST_TOKENS, MOST_TOKENS)),
)


def _listed(said: str, listed: _Listed) -> Saying | None:
    for word, name, pattern, mosts in listed:
        if word in said and (found := pattern.search(said)) is not None:
            return name, "", _values(found, *mosts)
    return None


def _sums(said: str) -> Saying | None:
    if "eval time" in said and (found := _TIME.search(said)) is not None:
        if found[1]:
            return "prompt_time", "", _values(found, None, LONGEST_PART_MS, MOST_PROMPT_TOKENS)[1:]
        mosts = None, LONGEST_PART_MS, MOST_TOKENS, float(LARGEST)
        return "eval_time", "", _values(found, *mosts)[1:]
    if not ("draft acceptance" in said or " per pos" in said or "mean " in said):
        return None
    counts, mean, rates = _SUMS.search(said), _MEAN.search(said), _BY_POSITION.search(said)
    if counts is None and " generated)" in said:
        return None  # its counts are hidden, or damaged
    if counts is None and (mean is None or "draft acceptance" not in said) and rates is None:
        return None
    of_counts = _values(counts, None, COUNT, MOST_TOKENS) if counts else (NOTHING,) * 3
    texts = ((*one.span(1), None) if one else NOTHING for one in (mean, rates))
    return "sums", "", (*of_counts, *texts)


def _mark(message: str) -> Saying | None:
    """An entry that starts or ends a phase."""
    if message.endswith("update slots"):
        return "mark", "update", ()
    return next((("mark", name, ()) for word, name in _MARKS.items() if word in message), None)


def file_name(path: str) -> str:
    """The last component of a path of any system."""
    return re.split(r"[\\/]", path)[-1]
