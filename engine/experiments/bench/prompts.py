"""Named prompts kept as data: a JSON list of objects with a name and a text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from engine.errors import OptionError
from engine.files import is_unicode, user_text
from engine.foreign_json import JsonError, parse_json

_MOST_BYTES = 64 << 20
_LONGEST_NAME, _LONGEST_TEXT = 200, 1 << 20
_REMEDY = 'Give a JSON list of objects like {"name": "fox", "text": "The quick"}.'


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A text to be continued, or a user's message, under a name for tables."""

    name: str
    text: str


def default_set(sets: Collection[str], *, on_demo: bool) -> str:
    """The set for the demo model, or for others: its own prompts, where sets has them."""
    if not on_demo:
        return "general"
    return "demo" if "demo" in sets else "python"


def read_prompts(path: Path) -> list[NamedPrompt]:
    """The prompts of a file in their order.

    Raises OptionError, naming the line or the prompt (from 1), for a file that cannot be read, is
    larger than 64 MiB or no such list, has no prompt, a name or text that is empty, too long (200
    characters, 2^20) or no Unicode, or a name twice.
    """
    try:
        entries = parse_json(user_text(path, _MOST_BYTES), unique=True)
    except JsonError as error:
        raise OptionError(f"{path}: {error}.", _REMEDY) from error
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"{path} holds no list of prompts.", _REMEDY)
    prompts: list[NamedPrompt] = []
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        fields = entry if isinstance(entry, dict) else {}
        name, text = fields.get("name"), fields.get("text")
        if not (_is_text(name, _LONGEST_NAME) and _is_text(text, _LONGEST_TEXT)):
            raise OptionError(f"{path}: prompt {number} has no name or no text.", _REMEDY)
        if name in names:
            raise OptionError(f"{path}: the name {name!r} is given twice.", "Rename one of them.")
        names.add(name)
        prompts.append(NamedPrompt(name, text))
    return prompts


def _is_text(value: Any, longest: int) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= longest and is_unicode(value)
