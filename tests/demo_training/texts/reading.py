"""Whether a text is what the grammars would write: a story that keeps to its plot and to its names,
or a program whose own test holds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from tests.demo_training.texts.stories import PLOTS, POOLS, pronouns

_SLOT = re.compile(r"\$(\w+)")
_SECONDS = 10.0


def is_story(text: str) -> bool:
    """True if `text` is a whole story: one wording of each sentence of a plot, with one set of
    slots throughout."""
    return any(_follows(text, plot, {}) for plot in PLOTS)


def _follows(text: str, plot: Sequence[Sequence[str]], slots: dict[str, str]) -> bool:
    if not plot:
        return not text and _agree(slots)
    return any(
        _follows(text[found.end() :].removeprefix(" "), plot[1:], slots | found.groupdict())
        for wording in plot[0]
        if (found := re.match(_pattern(wording, slots), text))
    )


def _pattern(wording: str, slots: dict[str, str]) -> str:
    """A regular expression with a group for each slot that has no value yet."""
    literals, keys = _SLOT.split(wording)[::2], _SLOT.findall(wording)
    parts = [re.escape(literals[0])]
    for i, (key, literal) in enumerate(zip(keys, literals[1:], strict=True)):
        if key in slots:
            parts.append(re.escape(slots[key]))
        elif key in keys[:i]:
            parts.append(f"(?P={key})")
        else:
            words = POOLS.get(key, _PRONOUNS.get(key, ()))
            parts.append(f"(?P<{key}>{'|'.join(map(re.escape, words))})")
        parts.append(re.escape(literal))
    return "".join(parts)


_PRONOUNS = {key: tuple({pronouns(name)[key] for name in POOLS["name"]}) for key in pronouns("Mia")}


def _agree(slots: dict[str, str]) -> bool:
    wanted = pronouns(slots["name"])
    return all(slots.get(key, word) == word for key, word in wanted.items())


def holds(text: str) -> bool:
    """True if the program `text` has a test and passes it.

    It runs in an interpreter of its own, which is stopped after some seconds.
    """
    names = re.findall(r"^def (test_\w+)\(\):$", text, re.MULTILINE)
    program = "\n".join([text, *[f"{name}()" for name in names]])
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return bool(names) and ended.returncode == 0
