"""Named prompts kept as data: a JSON list of objects with a name and a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import OptionError
from engine.files import unreadable

_REMEDY = 'Give a JSON list of objects like {"name": "fox", "text": "The quick"}.'


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A text to be continued, or a user's message, under a name for tables."""

    name: str
    text: str


def read_prompts(path: Path) -> list[NamedPrompt]:
    """The prompts of a file in their order.

    Raises OptionError for a file that cannot be read, is no such list, has no prompt, an empty
    name or text, or a name twice.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON in UTF-8.", _REMEDY) from error
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"{path} holds no list of prompts.", _REMEDY)
    prompts: list[NamedPrompt] = []
    names: set[str] = set()
    for number, entry in enumerate(entries):
        name, text = (entry.get("name"), entry.get("text")) if isinstance(entry, dict) else ("", "")
        if not (isinstance(name, str) and name and isinstance(text, str) and text):
            raise OptionError(f"{path}: prompt {number} has no name or no text.", _REMEDY)
        if name in names:
            raise OptionError(f"{path}: the name {name!r} is given twice.", "Rename one of them.")
        names.add(name)
        prompts.append(NamedPrompt(name, text))
    return prompts
