"""Prompt files with categories, in the formats of common data sets: JSON, JSON lines, gzipped.

A prompt is a text, or an object with the field names of known sets: HumanEval (prompt, task_id),
GSM8K (question), MT-Bench, Spec-Bench and SPEED-Bench (turns, category, question_id), and this
program's own (text, name). Of several turns only the first is used: later ones depend on an answer.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.files import file_head, is_unicode, json_values, user_text
from engine.gguf.binary import shorten

TEXT_FIELDS = ("text", "prompt", "question", "turns", "messages", "instruction")
NAME_FIELDS = ("name", "task_id", "question_id", "id")
CATEGORY_FIELDS = ("category",)
_MOST_BYTES = 1 << 28
_MOST_PROMPTS = 1_000_000
_LONGEST_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A text to continue, or a user's message, with a name unique in its set. category: empty
    without one."""

    name: str
    text: str
    category: str = ""


def default_set(sets: Collection[str], *, on_demo: bool) -> str:
    """The default set: for the demo model its own prompts, if sets has them."""
    if not on_demo:
        return "general"
    return "demo" if "demo" in sets else "python"


def read_prompts(path: Path, fields: tuple[str, str, str] = ("", "", "")) -> list[NamedPrompt]:
    """The prompts of a file in order. fields: names of the fields for text, name and category;
    empty: the usual ones.

    Raises OptionError naming file and line (of a JSON list: number) for anything that is not a
    prompt, and for a file that cannot be read, is larger than 256 MiB or contains none.
    """
    if file_head(path, 4) == b"PAR1":
        raise OptionError(
            f"{path} is a Parquet file.", "Convert it to JSON lines, one prompt per line."
        )
    text = user_text(path, _MOST_BYTES, packed=True)
    give = "Give a JSON list of prompts, or one JSON value per line."
    prompts: list[NamedPrompt] = []
    names = _UniqueNames()
    for place, entry in json_values(path, text, "prompt", give):
        prompt = _prompt(path, place, entry, fields, len(prompts) + 1)
        prompts.append(NamedPrompt(names.of(prompt.name), prompt.text, prompt.category))
        if len(prompts) > _MOST_PROMPTS:
            raise OptionError(f"{path} has more than {_MOST_PROMPTS:,} prompts.", "Split it.")
    if not prompts:
        raise OptionError(f"{path} holds no prompts.", "Give a JSON list or JSON lines.")
    return prompts


class _UniqueNames:
    """Adds a number to repeated names, such as "a (2)"."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._last: dict[str, int] = {}

    def of(self, name: str) -> str:
        """The name, or its next unused variant."""
        found, n = name, self._last.get(name, 1)
        while found in self._given:
            n += 1
            found = f"{name} ({n})"
        self._last[name] = n
        self._given.add(found)
        return found


def choose(
    prompts: Sequence[NamedPrompt], limit: int | None, seed: int | None
) -> list[NamedPrompt]:
    """At most `limit` prompts, alternating between categories, in the order of the set. seed: for a
    reproducible random choice; None: the first ones."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    by_category: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(number)
    if seed is not None:
        draw = random.Random(seed)
        for numbers in by_category.values():
            draw.shuffle(numbers)
    chosen: list[int] = []
    depth = 0
    while len(chosen) < limit:
        for numbers in by_category.values():
            if depth < len(numbers) and len(chosen) < limit:
                chosen.append(numbers[depth])
        depth += 1
    return [prompts[number] for number in sorted(chosen)]


def _prompt(
    path: Path, place: str, entry: Any, fields: tuple[str, str, str], number: int
) -> NamedPrompt:
    if isinstance(entry, str):
        return NamedPrompt(f"prompt {number}", _checked(path, place, entry), "")
    if not isinstance(entry, dict):
        raise OptionError(
            f"{path}: {place} is neither a text nor an object.", "Correct it or leave it out."
        )
    text, name, category = fields
    names = (text,) if text else TEXT_FIELDS
    found = next((entry[one] for one in names if one in entry), None)
    if found is None:
        known = ", ".join(map(shorten, list(entry)[:8])) or "none"
        raise OptionError(
            f"{path}: {place} has no field {' or '.join(names)}; its fields: {known}.",
            "Name the field of the text with --prompt-field.",
        )
    return NamedPrompt(
        _word(entry, (name,) if name else NAME_FIELDS) or f"prompt {number}",
        _checked(path, place, _first_turn(found)),
        _word(entry, (category,) if category else CATEGORY_FIELDS),
    )


def _first_turn(found: Any) -> Any:
    """The text itself, the first of several turns, or the first user message."""
    if not isinstance(found, list):
        return found
    for turn in found:
        if isinstance(turn, dict):
            if turn.get("role", "user") == "user":
                return turn.get("content")
        else:
            return turn
    return None


def _checked(path: Path, place: str, text: Any) -> str:
    if not (isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT and is_unicode(text)):
        raise OptionError(
            f"{path}: {place} has no text of 1 to {_LONGEST_TEXT:,} characters.",
            "Correct it or leave it out.",
        )
    return text


def _word(entry: dict[str, Any], names: Sequence[str]) -> str:
    """A name or category in one line, empty if there is none."""
    value = next((entry[name] for name in names if name in entry), "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return shorten(" ".join(str(value).split()))
