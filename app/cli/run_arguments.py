"""Arguments of decoding subcommands: options of the engine, and refusals.

Options that determine tokens and cost of a run are described in engine.options; names and defaults
are llama.cpp's wherever it has them. app.cli.option_lines makes arguments of them.
"""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from app.cli.option_lines import is_given, refuse_given
from app.cli.output import note
from engine.draft.registry import DRAFTERS
from engine.option_fields import build, differing, options_in
from engine.options import CacheOptions, RunOptions
from engine.options.faults import notes_on
from engine.trace.records import GHOST_KINDS

PromptSource = str | tuple[int, ...]
"""A prompt: text, or token ids."""


def given_options(args: argparse.Namespace, start: RunOptions) -> RunOptions:
    """Options of a run, overridden by those on the command line. Raises OptionError for a value out
    of range."""
    values = {}
    for one in options_in(RunOptions):
        value: Any = start
        for name in one.path:
            value = getattr(value, name)
        flags = one.option.flags if hasattr(args, one.option.dest) else ()
        if any(is_given(args.words, flag) for flag in flags):
            value = getattr(args, one.option.dest)
        values[one.path] = tuple(value) if isinstance(value, list) else value
    if args.spec_default:
        values["spec", "types"] = tuple(dict.fromkeys((*values["spec", "types"], "ngram-mod")))
    return build(RunOptions, values)


def run_options(args: argparse.Namespace) -> RunOptions:
    """The options for the engine. Raises OptionError for a value out of range."""
    types: tuple[str, ...] = args.spec_type or ()
    if args.spec_default and args.spec_type != ():  # `none` overrides it
        types = tuple(dict.fromkeys((*types, "ngram-mod")))
    return options_from(argparse.Namespace(**{**vars(args), "spec_type": types}), RunOptions)


def cache_options(args: argparse.Namespace) -> CacheOptions | None:
    """The prompt cache options, None without a cache. Raises OptionError."""
    if args.cache_prompt is False:
        refuse_given(args, "a prompt cache", "@engine.options.CacheOptions")
        return None
    return options_from(args, CacheOptions)


def print_notes(options: RunOptions, *, has_cache: bool = False) -> None:
    """A line for each note. has_cache: see notes_on."""
    spec = options.spec
    if spec.synthetic:
        note("acceptance is synthetic: the output is not the model's.")
    for one, _ in differing(spec):
        able = [name for name, drafter in DRAFTERS.items() if one.path in drafter.paths()]
        if not set(spec.types) & set(able or DRAFTERS):
            needed = ", ".join(able) or "a drafter"
            note(f"{one.option.name} has no effect without {needed} (--spec-type).")
    for sentence in notes_on(options, has_cache=has_cache):
        note(sentence)
    for drafter in (DRAFTERS[name] for name in spec.types):
        if sentence := drafter.note(drafter.options_of(spec)):
            note(sentence)


_T = TypeVar("_T")


def options_from(args: argparse.Namespace, kind: type[_T]) -> _T:
    """A dataclass of options from the arguments; options that are missing or not given keep their
    defaults. Raises OptionError for a value out of range."""
    values: dict[tuple[str, ...], Any] = {}
    for one in options_in(kind):
        value = getattr(args, one.option.dest, None)
        if value is not None:
            values[one.path] = tuple(value) if isinstance(value, list) else value
    return build(kind, values)


# middle tones of the 256 colours, legible on light and dark: 32 blue, 166 vermilion, 244 grey
_STYLES = {
    "accepted": "4;38;5;32",  # underlined
    "rejected": "9;38;5;166",  # struck out
    "ignored": "3;9;38;5;244",  # struck out, italic
    "side": "3;9;38;5;244",
    "replacement": "1;38;5;166",  # bold: few terminals have the double underline
    "unknown": "38;5;244",
}


def styled(text: str, kind: str) -> tuple[str, str]:
    """A piece for `print_texts`. A rejected draft stays on its line."""
    if kind in GHOST_KINDS:
        text = text.replace("\n", "↵").replace("\t", "→")
    return text, _STYLES.get(kind, "")
