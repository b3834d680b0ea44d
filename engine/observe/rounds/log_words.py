"""Words of llama-server's log, of builds of two years and of ik_llama.cpp: what one message says,
by name, with the places of its values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
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
"""Begin and end in the message, begin -1 for what is not there, and what it is at most: an int of a
whole number, a float of a decimal one, None of a text."""
NOTHING: Value = (-1, -1, None)
Saying: TypeAlias = tuple[str, str, tuple[Value, ...]]
"""What a message says (a method of `ServerState`), of which kind, and its values."""


def patterns(written: Mapping[str, str | Sequence[str]]) -> dict[str, re.Pattern[str]]:
    """Regular expressions by name, each a text or parts that follow each other."""
    return {name: re.compile("".join(parts)) for name, parts in written.items()}


WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_IS = patterns(WORDS["says"])
SLOT, IDS, CANDIDATE, TOKEN = (_IS[name] for name in ("slot", "ids", "candidate", "token"))
MODEL, BUILD, PLANES, START = (_IS[name] for name in ("model", "build", "planes", "start"))
IMPLEMENTATION, LOOKS_LIKE = _IS["implementation"], _IS["looks_like"]
_OF_LAUNCH = "freq_", " K (", "- n_max=", "peculati"
CHUNK = "http: streamed chunk: data: "
"""Comes before what a server sends to a client, in which nothing is read."""
_OF_LOOKS = "n_gen =", "n_decoded =", "accepted ", "draft ", "eval time", "#gen "
_MARKS = {
    "max possible draft": "draft",
    "n_batch (effective)": "verify",
    "done yielding": "yielded",
}
_OF_SIGNS = "| task ", "llama_server: ", "eval time", "draft acceptance", ": #calls", "draft candid"


def launch_saying(message: str) -> dict[str, str]:
    """What a message says of how a server was started: RoPE, types of cache cells, limits of drafts
    and why it does not draft, by name."""
    if not any(map(message.__contains__, _OF_LAUNCH)):
        return {}
    found = _IS["launch"].search(message)
    if found is None:
        return {}
    said = {name: value for name, value in found.groupdict().items() if value is not None}
    return {said.pop("name"): said.pop("value")} if "name" in said else said


def has_entries(text: str) -> bool:
    """Whether a text has what only a llama-server's log has."""
    may_have = any(map(text.__contains__, _OF_SIGNS)) or _IS["stamp"].search(text) is not None
    return may_have and _IS["signs"].search(text) is not None


def may_look_like(message: str) -> bool:
    """Whether a message has a word that one has that LOOKS_LIKE finds."""
    return any(map(message.__contains__, _OF_LOOKS))


def values_of(said: str, values: tuple[Value, ...]) -> list[Any]:
    """The values of a message, None for what is not there. Raises OutOfRangeError."""
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
    """What a message of a slot says, without its head; None for nothing that is read."""
    if said.startswith(("n_gen", "n_decoded")):
        if (found := _quoted(TOKEN, said)) is not None:
            text = found.end(), len(said.rstrip()) - 1, None
            return "token", "", (*_values(found, MOST_TOKENS, COUNT), text)
        if (found := _IS["speed"].match(said)) is not None:
            return "speed", "", _values(found, MOST_TOKENS, LONGEST_PART_MS, LONGEST_PART_MS)
        return None
    if said.startswith("accepted") and (found := _IS["accepted"].match(said)) is not None:
        if found[3] or found[4] or not said[found.end() :].strip():
            kind = "restores" if found[3] else "again" if found[4] else ""
            return "accepted", kind, _values(found, LONGEST_DRAFT, LONGEST_DRAFT)
        return None
    for word, name, pattern, mosts in _OF_SLOT:
        if word in said and (found := pattern.search(said)) is not None:
            return name, "", _values(found, *mosts)
    if said.startswith(("created context", "restored context", "erased inval", "erasing old")):
        found, size = _IS["checkpoint"].match(said), _IS["size"].search(said)
        if found is None:
            return None
        n_bytes = NOTHING if size is None else (*size.span(1), float(1 << 30))
        places = tuple((*found.span(i), MOST_TOKENS) for i in (2, 3, 4))
        return "checkpoint", found[1], (*places, n_bytes)
    if (adapted := _adapted(said)) is not None:
        return adapted
    if said.startswith("forcing full"):
        return "forced", "", ()
    return _sums(said) or _mark(said)


def free_slot_saying(said: str) -> Saying | None:
    """What a message of a slot without a task says."""
    if said.startswith("selected slot by") and (found := _IS["selected"].match(said)) is not None:
        mosts = None, LONGEST_PART_MS, MOST_TOKENS, LONGEST_PART_MS
        return "selected", "", _values(found, *mosts)
    return _mark(said)


def candidate_saying(message: str) -> Saying | None:
    """What a message says of one token that a drafter looked at."""
    if (found := CANDIDATE.search(message)) is None:
        return None
    text = found.end(), len(message.rstrip()) - 1, None
    most = COUNT, COUNT, COUNT, COUNT, LONGEST_PART_MS
    return "candidate", "", (*_values(found, *most), text)


def server_saying(message: str) -> Saying | None:
    """What a message of no slot says of rounds and sums."""
    if "called impl" in message and (found := _IS["impl"].search(message)) is not None:
        return "impl", "", _values(found, None, COUNT, COUNT)
    if "statistics" in message and "#calls" in message:
        found = _IS["statistics"].search(message)
        mosts = None, COUNT, COUNT, COUNT, None
        return ("statistics", "", _values(found, *mosts)) if found else None
    if (adapted := _adapted(message)) is not None:
        return adapted
    if message.startswith("====") and (found := _IS["cache"].match(message)) is not None:
        return "cache", "", _values(found, MOST_TOKENS, MOST_TOKENS)
    if (saying := _sums(message)) is not None:
        return "bare", saying[0], saying[2]
    return _mark(message)


def is_open(message: str) -> bool:
    """Whether the text of a token may go on in the next line: no quote ends it, or one that it may
    begin with."""
    found = TOKEN.search(message) or CANDIDATE.search(message)
    text = message[found.end() :].rstrip() if found is not None else "'"
    return found is not None and (text == "'" or not text.endswith("'"))


def _values(found: re.Match[str], *mosts: float | None) -> tuple[Value, ...]:
    return tuple((*found.span(i), most) for i, most in enumerate(mosts, 1))


_OF_SLOT: tuple[tuple[str, str, re.Pattern[str], tuple[float | None, ...]], ...] = (
    ("generate_draft", "generated", _IS["generate"], (COUNT, LONGEST_DRAFT, MOST_TOKENS)),
    ("add accepted", "added", _IS["added"], (LONGEST_DRAFT + 1, LONGEST_DRAFT)),
    ("slot decode", "decoded", _IS["decode"], (MOST_TOKENS,)),
    ("created spec", "saved", _IS["created"], (float(LARGEST >> 20),)),
    ("restoring", "restoring", _IS["restoring"], (LARGEST,)),
    ("new prompt", "prompt", _IS["prompt"], (MOST_PROMPT_TOKENS,)),
    ("n_past =", "common", _IS["common"], (MOST_TOKENS, MOST_TOKENS, COUNT, COUNT)),
    ("n_tokens", "cached", _IS["cached"], (MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS)),
    ("n_past =", "cached", _IS["cached"], (MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS)),
    ("kv cache", "cached", re.compile(r"kv cache rm .{0,300} p0=(\d+)"), (MOST_PROMPT_TOKENS,)),
    ("cking ch", "looked_back", _IS["looked_at"], (MOST_TOKENS, MOST_TOKENS, MOST_TOKENS)),
    ("stop processing", "released", _IS["released"], (MOST_TOKENS, 9)),
    ("released |", "released", re.compile(r"slot released .{0,300}n_cache_tokens=(\d+)"), (COUNT,)),
)


def _adapted(said: str) -> Saying | None:
    """The longest draft of a slot is another from here on."""
    found = _IS["adapted"].search(said) if "adaptive " in said else None
    return ("adapted", "", _values(found, COUNT, LONGEST_DRAFT, LONGEST_DRAFT)) if found else None


def _sums(said: str) -> Saying | None:
    if "eval time" in said and (found := _IS["time"].search(said)) is not None:
        if found[1]:
            return "prompt_time", "", _values(found, None, LONGEST_PART_MS, MOST_PROMPT_TOKENS)[1:]
        mosts = None, LONGEST_PART_MS, MOST_TOKENS, float(LARGEST)
        return "eval_time", "", _values(found, *mosts)[1:]
    if not ("draft acceptance" in said or " per pos" in said or "mean " in said):
        return None
    counts, mean, rates = (
        _IS["sums"].search(said),
        _IS["mean"].search(said),
        _IS["by_position"].search(said),
    )
    if counts is None and " generated)" in said:
        return None  # its counts are hidden, or damaged
    if counts is None and (mean is None or "draft acceptance" not in said) and rates is None:
        return None
    of_counts = _values(counts, None, COUNT, MOST_TOKENS) if counts else (NOTHING,) * 3
    texts = ((*one.span(1), None) if one else NOTHING for one in (mean, rates))
    return "sums", "", (*of_counts, *texts)


def _mark(message: str) -> Saying | None:
    """An entry that begins or ends a phase."""
    if message.endswith("update slots"):
        return "mark", "update", ()
    return next((("mark", name, ()) for word, name in _MARKS.items() if word in message), None)


def file_name(path: str) -> str:
    """The last part of a path of any system."""
    return re.split(r"[\\/]", path)[-1]


def _quoted(head: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The head of a text that goes on to a quote at its end; None unless both are there."""
    found = head.search(text)
    return found if found and text[found.end() :].rstrip().endswith("'") else None
