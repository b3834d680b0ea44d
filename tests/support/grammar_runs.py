"""A small schema and small grammars, and what a text has to be to fit them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine.options import RunOptions, SamplerOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["queue", "stack", "heap"]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 2,
            "maxItems": 4,
        },
        "sorted": {"type": "boolean"},
    },
    "required": ["name", "sizes", "sorted"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SUMS = 'start: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" start ")"\n'
LETTERS = "start: pair{3,5}\npair: /[a-f]/ /[0-9]/ \n"
_PAIRS = re.compile("([a-f][0-9]){3,5}")


def schema_file(folder: Path) -> SamplerOptions:
    path = folder / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return SamplerOptions(json_schema=str(path))


def rules_file(folder: Path, rules: str) -> SamplerOptions:
    path = folder / "grammar.lark"
    path.write_text(rules)
    return SamplerOptions(grammar_file=str(path))


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == {"name", "sizes", "sorted"}
        and found["name"] in SCHEMA["properties"]["name"]["enum"]
        and 2 <= len(found["sizes"]) <= 4
        and all(0 <= size <= 99 for size in found["sizes"])
        and isinstance(found["sorted"], bool)
    )


def fits_letters(text: str) -> bool:
    return _PAIRS.fullmatch(text) is not None


def plain(options: RunOptions) -> RunOptions:
    """The same without speculation, one sequence at a time."""
    return RunOptions(n_predict=options.n_predict, sampler=options.sampler)
