"""Grammars from files: a JSON schema, or rules in Lark's notation as llguidance reads it."""

from __future__ import annotations

import re
from pathlib import Path

import llguidance

from engine.errors import GrammarFileError, OptionError
from engine.files import user_text
from engine.foreign_json import JsonError, parse_json
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
        parse_json(text, unique=True)
    except JsonError as error:
        place = f"line {error.line}, column {error.column}"
        raise GrammarFileError(
            path, place, f"no JSON: {error.what}", "Correct the file."
        ) from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
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
        return user_text(path, MOST_BYTES)
    except OptionError as error:
        what = error.message.removeprefix(f"{path}").lstrip(" :").rstrip(".")
        raise GrammarFileError(path, "file", what, error.remedy) from error


def _sentence(message: str) -> str:
    """The library's message without its picture of the place."""
    first, *rest = message.strip().split("\n")
    cause = next((line.strip() for line in rest if line.strip().startswith("error: ")), "")
    return f"{first.strip().rstrip(':.')}{cause.replace('error: ', ': ', 1)}"
