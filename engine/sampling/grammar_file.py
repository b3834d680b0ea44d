"""Grammars from files: a JSON schema, or rules in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import llguidance

from engine.errors import GrammarFileError
from engine.sampling.grammar import Grammar, GrammarTokens, why_invalid
from engine.sampling.options import SamplerOptions

MOST_BYTES = 1 << 20
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_LARK_REMEDY = "Correct it; the rules are Lark's as llguidance reads them, beginning with `start:`."
_SCHEMA_REMEDY = "Correct the schema, or leave out what llguidance does not know."


def read_grammar(options: SamplerOptions, tokens: GrammarTokens) -> Grammar | None:
    """The grammar that the options name, None if they name none. Raises GrammarFileError."""
    if options.json_schema:
        return _schema(Path(options.json_schema), tokens)
    if options.grammar_file:
        return _rules(Path(options.grammar_file), tokens)
    return None


def _schema(path: Path, tokens: GrammarTokens) -> Grammar:
    text = _read(path)
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise GrammarFileError(path, place, f"no JSON: {error.msg}", "Correct the file.") from error
    except (RecursionError, ValueError) as error:  # a number of thousands of digits, too
        raise GrammarFileError(path, "file", f"no JSON: {error}", "Correct the file.") from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if why := why_invalid(grammar, tokens):
        raise GrammarFileError(path, "schema", _sentence(why), _SCHEMA_REMEDY)
    return Grammar(grammar, tokens)


def _rules(path: Path, tokens: GrammarTokens) -> Grammar:
    grammar = llguidance.LLMatcher.grammar_from_lark(_read(path))
    if why := why_invalid(grammar, tokens):
        place, found = "grammar", _PLACE.match(why)
        if found:
            place, why = f"line {found[1]}, column {found[2]}", found[3]
        raise GrammarFileError(path, place, _sentence(why), _LARK_REMEDY)
    return Grammar(grammar, tokens)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            what = f"larger than {MOST_BYTES:,} bytes"
            raise GrammarFileError(path, "file", what, "Use a smaller grammar.")
        return data.decode()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise GrammarFileError(path, "file", why, "Check the path.") from error
    except UnicodeDecodeError as error:
        what = f"no UTF-8 at byte {error.start}"
        raise GrammarFileError(path, "file", what, "Save it as UTF-8.") from error


def _sentence(message: str) -> str:
    """The library's message without its picture of the place."""
    first, *rest = message.strip().split("\n")
    cause = next((line.strip() for line in rest if line.strip().startswith("error: ")), "")
    return f"{first.strip().rstrip(':.')}{cause.replace('error: ', ': ', 1)}"
