"""The options of `draftscope run`; names and defaults are llama.cpp's wherever it has them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from app.cli.common import (
    add_batch_invariant,
    add_compute,
    add_model,
    positive,
    read_text,
    token_ids,
)
from app.cli.sampling_arguments import add_sampling, sampler_options
from app.cli.spec_arguments import add_speculation, add_synthetic, spec_options
from engine.options import (
    CHECKPOINT_DEVICES,
    FAULTS,
    KV_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    RunOptions,
)

Source = str | tuple[int, ...]
"""A prompt as given: text, or token ids."""

_RUN = RunOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options, in groups."""
    parser.usage = "draftscope run (MODEL | --demo) (-p TEXT | -f FILE | --tokens IDS) … [options]"
    parser.epilog = (
        "example:\n"
        '  draftscope run --demo -p "def quicksort(arr):" -n 200 --spec-type draft-mtp --trace out'
    )
    model = add_model(parser)
    add_draft_model(model)
    add_compute(model)
    add_prompts(parser)
    add_sampling(parser)
    add_speculation(parser)
    add_synthetic(parser)
    add_memory(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: sequences, options in effect, totals",
    )
    output.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write the trace as CSV files; replaces an earlier export",
    )


def add_draft_model(group: argparse._ArgumentGroup) -> None:
    """-md."""
    group.add_argument(
        "-md",
        "--spec-draft-model",
        metavar="FILE",
        type=Path,
        help="draft model for draft-simple (with --demo: the bundled one)",
    )


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """-p, -f, --tokens and --chat; `sources` collects what they give."""
    group = parser.add_argument_group("prompts (each option may be repeated; one sequence each)")
    group.add_argument(
        "-p",
        "--prompt",
        dest="sources",
        action="append",
        metavar="TEXT",
        default=[],
        help="text to continue",
    )
    group.add_argument(
        "-f",
        "--file",
        dest="sources",
        action="append",
        metavar="FILE",
        type=_file_text,
        help="file with the text; a last newline is dropped",
    )
    group.add_argument(
        "--tokens",
        dest="sources",
        action="append",
        metavar="IDS",
        type=token_ids,
        help="token ids, for example 1,2,3",
    )
    add_chat(group)


def add_chat(group: argparse._ArgumentGroup) -> None:
    """--chat and --chat-template-kwargs."""
    group.add_argument(
        "--chat",
        action="store_true",
        help="wrap each text as a user's message in the model's chat template",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="variables for the chat template, for example '{\"enable_thinking\": false}'",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Slots, sizes, the rollback policy and its details."""
    group = parser.add_argument_group("memory and batches")
    group.add_argument(
        "--parallel",
        type=positive,
        default=_RUN.parallel,
        metavar="N",
        help="sequences decoded side by side; further prompts wait (default %(default)s)",
    )
    add_sizes(group)
    group.add_argument(
        "--rollback",
        default=_RUN.rollback,
        metavar="POLICY",
        help="how rejected tokens leave the recurrent state: "
        f"{', '.join(ROLLBACK_POLICIES)} (default %(default)s)",
    )
    add_memory_details(group)


def add_memory_details(group: argparse._ArgumentGroup) -> None:
    """--checkpoint-device, --replay, --fault, --n-rs-seq, --split, --kv, --batch-invariant."""
    group.add_argument(
        "--checkpoint-device",
        default=_RUN.checkpoint_device,
        metavar="PLACE",
        help=f"where checkpoints are kept: {' or '.join(CHECKPOINT_DEVICES)} (default %(default)s)",
    )
    group.add_argument(
        "--replay",
        default=_RUN.replay,
        metavar="HOW",
        help="accepted tokens after a restore: trust decodes them again, verify samples them "
        "again with the sampler restored, as llama.cpp does; with --spec-accept rejection they "
        "are always trusted (default %(default)s)",
    )
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help="switch on a bug of the field to look at it; the output may be wrong. "
        f"Repeatable: {', '.join(FAULTS)}",
    )
    group.add_argument(
        "--n-rs-seq",
        type=int,
        metavar="N",
        help="most tokens that can be undone without a checkpoint (default: --spec-draft-n-max "
        "with a draft-* drafter, else 0)",
    )
    group.add_argument(
        "--split",
        default=_RUN.split,
        metavar="RULE",
        help=f"how a batch is split: {' or '.join(SPLITS)} (default %(default)s)",
    )
    group.add_argument(
        "--kv",
        default=_RUN.kv,
        metavar="MODE",
        help=f"attention cells: {' or '.join(KV_MODES)} (default %(default)s)",
    )
    add_batch_invariant(group)


def add_sizes(group: argparse._ArgumentGroup) -> None:
    """-c, -b and -ub."""
    group.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=_RUN.n_ctx,
        metavar="N",
        help="cells per sequence, 0 = the trained context, at most 4096 (default %(default)s)",
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=_RUN.n_batch,
        metavar="N",
        help="most prompt and verified tokens in one round (default %(default)s)",
    )
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        default=_RUN.n_ubatch,
        metavar="N",
        help="most tokens in one forward pass (default %(default)s)",
    )


def run_options(args: argparse.Namespace) -> RunOptions:
    """The options as the engine takes them. Raises OptionError for a value out of range."""
    return RunOptions(
        parallel=args.parallel,
        n_predict=args.n_predict,
        n_ctx=args.ctx_size,
        n_batch=args.batch_size,
        n_ubatch=args.ubatch_size,
        sampler=sampler_options(args),
        spec=spec_options(args),
        rollback=args.rollback,
        n_rs_seq=args.n_rs_seq,
        split=args.split,
        kv=args.kv,
        checkpoint_device=args.checkpoint_device,
        replay=args.replay,
        faults=tuple(dict.fromkeys(args.fault)),
        ignore_eos=args.ignore_eos,
        allow_non_finite=args.allow_non_finite,
        batch_invariant=args.batch_invariant,
    )


def _file_text(name: str) -> str:
    return read_text(Path(name)).removesuffix("\n")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
