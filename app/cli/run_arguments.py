"""The options of `draftscope run` and of other subcommands that decode, in groups.

What decides the tokens and the cost of a run describes itself in engine.options; names and
defaults are llama.cpp's wherever it has them. Engine options become argparse arguments here, and
back; see engine.option_fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from app.cli.common import add_compute, add_model, read_text
from app.cli.option_lines import (
    OptionLines,
    as_type,
    finite_number,
    is_given,
    refuse_given,
    whole_number,
)
from app.cli.output import note
from app.cli.recorded import add_report
from engine.draft.registry import DRAFTERS
from engine.option_fields import PlacedOption, build, differing, grouped, json_object, options_in
from engine.options import CacheOptions, RunOptions
from engine.options.faults import notes_on
from engine.options.llama_cpp import LlamaSettings
from engine.trace.records import GHOST_KINDS

PromptSource = str | tuple[int, ...]
"""A prompt as given: text, or token ids."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "draftscope run (MODEL | --demo) (-p TEXT | -f FILE | --tokens IDS) … [options]\n"
        "       draftscope run (MODEL | --demo) --turns FILE [options]\n"
        "       draftscope run (MODEL | --demo) --from TRACE (--round R | --position P) [options]"
    )
    parser.epilog = (
        f"{LEGEND}\n\n"
        "example:\n"
        '  draftscope run --demo -p "def quicksort(arr):" -n 200 --spec-type draft-mtp --trace out'
    )
    model = add_model(parser)
    add_draft_model(model)
    add_compute(model)
    add_prompts(parser)
    add_turns(parser)
    add_fork(parser)
    add_sampling(parser)
    add_speculation(parser)
    add_synthetic(parser)
    add_memory(parser)
    add_cache(parser)
    output = OptionLines(parser).add("""
        output
          --[no-]audit  at its end, decode the text of the run plainly and compare tokens, logits
              and recurrent states, and make sampled drafts again (default: as much of the text as 3
              %% of the run's time allows, in runs of 2048 tokens at most, prompts and -n together,
              that may write as much as they read)
          --json  print one JSON object: sequences, options in effect, totals
          --trace DIR  write the trace as CSV files; replaces an earlier export
    """)
    add_report(output)


def add_draft_model(group: argparse._ArgumentGroup) -> None:
    OptionLines(group).add(
        """
        -md, --spec-draft-model FILE  model for draft-simple, the target's MTP block in a file of
            its own, which is used instead of one in the model's file, or a drafter that reads the
            target's layers (EAGLE-3, DFlash); what it is for is in the file, and repeated, each may
            be for another drafter (with --demo: the bundled one)
        """,
        spec_draft_model={"action": "append"},
    )


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """-p, -f, --tokens and --chat; `sources` collects what they give."""
    group = OptionLines(parser).add(
        """
        prompts (each option may be repeated; one sequence each)
          sources=-p, --prompt TEXT*  text to continue
          sources=-f, --file FILE*  file with the text, - = standard input; its last newline goes
          sources=--tokens IDS*  token ids, for example 1,2,3
        """,
        file={"type": _file_text},
    )
    add_chat(group)


def add_turns(parser: argparse.ArgumentParser) -> None:
    OptionLines(parser).add("""
        conversations (in place of prompts)
          --turns FILE  hold the conversation of a JSON file, or of JSON lines, turn by turn, and
              tell what each turn reuses and processes again: OpenAI-style messages, requests with
              `messages`, or texts
          --turns-answers {recorded,anew}  answers that the file has are taken as they are
              (recorded, the default), or the model writes others in their place (anew)
    """)


def add_fork(parser: argparse.ArgumentParser) -> None:
    OptionLines(parser).add("""
        forks (in place of prompts)
          fork_from=--from TRACE  go on from a round of a recorded run with its options but for
              those that are given: its rounds are decoded again up to there; --trace then has both
              runs
          --from-run N:int  its number in the trace (default: the first)
          --round R:N  the first new round, from 1
          --position P:N  instead: the last position that stays
          --from-seq SEQ:int  sequence that --position and --force are about (default 0)
          --force ID:int  token that takes the place of the newest one that stays
    """)


def given_options(args: argparse.Namespace, start: RunOptions) -> RunOptions:
    """Options of a run with those in place of its own that the command line names. Raises
    OptionError for a value out of range."""
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


def add_chat(group: argparse._ArgumentGroup) -> None:
    OptionLines(group).add(
        """
        --chat  wrap each text as a user's message in the model's chat template
        --chat-template-kwargs JSON  variables for the chat template, for example
            '{"enable_thinking": false}'
        """,
        chat_template_kwargs={"type": as_type(json_object)},
    )
    group.set_defaults(chat_template_kwargs={})


def add_sampling(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("decoding"), grouped(RunOptions, "decoding"))


def add_drafters(group: argparse._ArgumentGroup, about: str, *, repeatable: bool = False) -> None:
    """--spec-type. about: its help, where {about} is that of a run."""
    (types,) = (one for one in options_in(RunOptions) if one.path == ("spec", "types"))
    group.add_argument(
        *types.option.flags,
        type=reader(types),
        action="append" if repeatable else "store",
        metavar=types.option.metavar,
        help=about.format(about=types.option.about),
    )


def add_speculation(
    parser: argparse.ArgumentParser, *, default: str = "none", repeatable: bool = False
) -> None:
    """--spec-type and what every drafter is set by.

    default: what the help says of it. repeatable: the option makes a list of drafter lists.
    """
    group = parser.add_argument_group("speculation")
    more = "; repeatable, one configuration each" if repeatable else ""
    add_drafters(group, "{about} " + f"(default {default}){more}", repeatable=repeatable)
    OptionLines(group).add("--spec-default  add ngram-mod to the drafters")
    add_options(group, grouped(RunOptions, "speculation"))
    add_options(
        parser.add_argument_group("speculation without a draft model"),
        sorted(grouped(RunOptions, "ngram"), key=lambda one: len(one.path) < 3),
    )


def add_synthetic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("synthetic acceptance (benchmarks; the output is invalid)")
    add_options(group, grouped(RunOptions, "synthetic"))


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Slots, sizes, the rollback policy and its details."""
    group = parser.add_argument_group("memory and batches")
    add_options(group, grouped(RunOptions, "slots"))
    add_sizes(group)
    add_options(group, grouped(RunOptions, "rollback"))
    add_memory_details(group)


def add_memory_details(group: argparse._ArgumentGroup) -> None:
    """How checkpoints, snapshots, splits and attention cells are kept; --fault."""
    add_options(group, grouped(RunOptions, "memory", "faults"))


def add_sizes(group: argparse._ArgumentGroup) -> None:
    add_options(group, grouped(RunOptions, "sizes"))


def add_batch_invariant(group: argparse._ArgumentGroup) -> None:
    add_options(group, [one for one in options_in(RunOptions) if one.field == "batch_invariant"])


def run_options(args: argparse.Namespace) -> RunOptions:
    """The options as the engine takes them. Raises OptionError for a value out of range."""
    types: tuple[str, ...] = args.spec_type or ()
    if args.spec_default and args.spec_type != ():  # `none` wins over it
        types = tuple(dict.fromkeys((*types, "ngram-mod")))
    return options_from(argparse.Namespace(**{**vars(args), "spec_type": types}), RunOptions)


def add_llama_library(group: argparse._ArgumentGroup) -> None:
    """--llama-cpp, and the settings of llama.cpp's models and contexts by its own names."""
    OptionLines(group).add("""
        llama_cpp_lib=--llama-cpp, --llama-cpp-lib BUILD  build of llama.cpp for its lanes: a build
            tree, an install prefix, a folder with llama.h and libllama, a wheel, or xllamacpp or
            llama_cpp for the installed package (default: an installed package)
    """)
    add_options(group, options_in(LlamaSettings))


def add_cache(parser: argparse.ArgumentParser, option: str = "--turns") -> None:
    """--cache-prompt and what the prompt cache is set by. option: with which they make sense."""
    group = parser.add_argument_group(f"prompt cache ({option})")
    OptionLines(group).add("""
        --[no-]cache-prompt  process only what is new in a prompt (default yes)
    """)
    _add_checkpoints(group)


def _add_checkpoints(group: Any) -> None:
    add_options(group, options_in(CacheOptions))


def cache_options(args: argparse.Namespace) -> CacheOptions | None:
    """The options as the engine takes them, None without a cache. Raises OptionError."""
    if args.cache_prompt is False:
        refuse_given(args, "a prompt cache", _add_checkpoints)
        return None
    return options_from(args, CacheOptions)


def _file_text(name: str) -> str:
    return read_text(None if name == "-" else Path(name)).removesuffix("\n")


def print_notes(options: RunOptions, *, has_cache: bool = False) -> None:
    """A line for each note. has_cache: see notes_on."""
    spec = options.spec
    if spec.synthetic:
        note("acceptance is synthetic, the output is not the model's.")
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


def add_options(
    group: argparse._ArgumentGroup, options: Iterable[PlacedOption], *, is_set: bool = True
) -> None:
    """Add them. is_set: without it, the value of an option that is not given is None, not its
    default; the help is the same."""
    for one in options:
        option = one.option
        if one.kind is bool:
            group.add_argument(*option.flags, action="store_true", help=option.about)
            continue
        start: Any = [] if option.repeats else one.default
        shown = "%(default)s" if is_set else one.default
        has_default = one.default not in (None, "") and one.kind is not tuple
        group.add_argument(
            *option.flags,
            action="append" if option.repeats else "store",
            type=reader(one),
            default=start if is_set else None,
            metavar=option.metavar,
            help=option.about.replace("%", "%%") + (f" (default {shown})" if has_default else ""),
        )


def reader(one: PlacedOption) -> Callable[[str], Any]:
    """The argparse type of an option's text."""
    parse = one.option.parse
    if parse is None:
        return whole_number if one.kind is int else finite_number if one.kind is float else str
    return as_type(parse)


def options_from(args: argparse.Namespace, kind: type[_T]) -> _T:
    """A dataclass of options from what was given; options that the parser lacks, or that were not
    given, keep their defaults. Raises OptionError for a value out of range."""
    values: dict[tuple[str, ...], Any] = {}
    for one in options_in(kind):
        value = getattr(args, one.option.dest, None)
        if value is not None:
            values[one.path] = tuple(value) if isinstance(value, list) else value
    return build(kind, values)


# middle tones of the 256 colours, legible on light and on dark: 32 blue, 166 vermilion, 244 grey
_STYLES = {
    "accepted": "4;38;5;32",  # underlined
    "rejected": "9;38;5;166",  # struck out
    "ignored": "3;9;38;5;244",  # struck out, italic
    "side": "3;9;38;5;244",
    "replacement": "1;38;5;166",  # bold: few terminals have the double underline
    "unknown": "38;5;244",
}
LEGEND = (
    "On a terminal accepted drafts are blue and underlined, rejected ones struck out, the\n"
    "target's replacements vermilion and bold; NO_COLOR=1 and TERM=dumb switch that off."
)


def styled(text: str, kind: str) -> tuple[str, str]:
    """A piece for `print_texts`. A draft that was not accepted stays on its line."""
    if kind in GHOST_KINDS:
        text = text.replace("\n", "↵").replace("\t", "→")
    return text, _STYLES.get(kind, "")
