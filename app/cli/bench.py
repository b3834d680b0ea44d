"""`draftscope bench`: measurements, as a table or as JSON. One module per kind of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from app.cli import (
    bench_against,
    bench_forward,
    bench_recording,
    bench_rollback,
    bench_slots,
    bench_suite,
    bench_w1,
)
from app.cli.bench_requests import add_requests
from app.cli.common import add_compute, add_model, check_output, output_file, positive
from app.cli.output import print_json, print_line
from app.cli.reports import add_report, check_report
from app.cli.run_arguments import (
    add_cache,
    add_draft_model,
    add_memory_details,
    add_sampling,
    add_sizes,
    add_speculation,
    add_synthetic,
    refuse_cache,
)
from engine.errors import OptionError
from engine.experiments.random_models.quant_mixes import QUANTS
from engine.experiments.random_models.random_drafters import RANDOM_DRAFTERS
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.options import ROLLBACK_POLICIES
from engine.size_text import size_text

_REPEAT = 7
_MOST_REPEATS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.usage = "draftscope bench [MODEL | --demo] [what to measure] [options]"
    parser.epilog = (
        "examples:\n"
        "  draftscope bench --demo\n"
        "  draftscope bench model.gguf --spec-type draft-mtp --out a.json\n"
        "  draftscope bench model.gguf --spec-type draft-mtp --rollback all\n"
        "  draftscope bench --compare a.json b.json\n"
        "  draftscope bench --demo --w1 --spec-type draft-mtp\n"
        "  draftscope bench --demo --slots 1,5 --spec-type draft-mtp\n"
        "  draftscope bench --demo --recording -n 60 --spec-type draft-mtp\n"
        "  draftscope bench --rollback all\n"
        "  draftscope bench --write-random-model random.gguf\n"
        "  draftscope bench --write-random-model dflash.gguf --drafter dflash\n"
        "  draftscope bench random.gguf --against ~/llama.cpp/build/bin\n"
        "  draftscope bench random.gguf --splits\n"
        "  draftscope bench random.gguf --steps 1,2,4,8,16,128,512"
    )
    model = add_model(parser)
    add_draft_model(model)
    add_compute(model)
    _add_kinds(parser)
    add_requests(parser)
    add_sampling(parser)
    add_speculation(
        parser, default="each that the model makes possible, none beside it", repeatable=True
    )
    add_synthetic(parser)
    memory = parser.add_argument_group("memory and batches")
    add_sizes(memory)
    add_memory_details(memory)
    add_cache(parser, "--w1")
    bench_against.add_arguments(parser)
    _add_details(parser)
    parser.set_defaults(n_predict=bench_suite.N_PREDICT, parallel=1)


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure (without any of these: the prompt suite)")
    one = what.add_mutually_exclusive_group()
    one.add_argument(
        "--w1",
        action="store_true",
        help="a conversation of four turns with a growing history, counters per turn",
    )
    one.add_argument(
        "--slots",
        type=_widths,
        metavar="N[,N]",
        help="so many requests side by side: aggregate speed, and its ratio to the first number",
    )
    one.add_argument(
        "--recording",
        action="store_true",
        help="the first prompt over and over, -n tokens whatever they are: the share of the time "
        "that recording the trace takes",
    )
    one.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="measure nothing: compare two result files of the suite (--out)",
    )
    one.add_argument(
        "--splits",
        action="store_true",
        help="several sequences in one forward pass against one sequence per pass",
    )
    one.add_argument(
        "--steps", type=_widths, metavar="N[,N]", help="forward steps of so many tokens"
    )
    one.add_argument(
        "--against",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="llama-bench and llama-server of a llama.cpp build (of $PATH, without a folder) in "
        "alternation with this engine, on the same file and threads",
    )
    one.add_argument(
        "--write-random-model",
        type=output_file,
        metavar="FILE",
        help="measure nothing: write a qwen35 model with random weights and an MTP head",
    )
    what.add_argument(
        "--rollback",
        type=_policies,
        metavar="A[,B]",
        help=f"policies to compare: all, or {', '.join(ROLLBACK_POLICIES)}; with a model on the "
        "suite or on --w1, without one by rounds of made-up states",
    )
    what.add_argument(
        "--repeat",
        "--rounds",
        type=positive,
        metavar="N",
        help=f"repetitions; medians count (default {_REPEAT}, 1 for the suite)",
    )
    what.add_argument("--json", action="store_true", help="print one JSON object")
    add_report(what)


def _add_details(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--rollback without a model")
    _number(group, "--heads", 16, "value heads of a layer")
    _number(group, "--dim", 128, "dimension of a head; a state is dim x dim")
    _number(group, "--layers", 18, "recurrent layers")
    _number(group, "--conv-dim", 6144, "channels of the convolution: queries, keys and values")
    group.add_argument(
        "--widths",
        type=_widths,
        default=(1, 4, 8, 16, 64),
        metavar="N[,N]",
        help="tokens verified in one round (default 1,4,8,16,64)",
    )
    group.add_argument(
        "--keep",
        type=positive,
        metavar="N",
        help="how many of them are accepted (default: half, at least one)",
    )
    group = parser.add_argument_group("--splits")
    _number(group, "--sequences", 5, "sequences side by side")
    _number(group, "--draft", 3, "drafted tokens per sequence, verified with one more")
    group = parser.add_argument_group("--steps")
    group.add_argument(
        "--outputs",
        choices=("last", "all"),
        default="last",
        help="rows whose logits are computed (default %(default)s)",
    )
    group = parser.add_argument_group("--write-random-model")
    group.add_argument(
        "--arch",
        choices=tuple(RANDOM_FAMILIES),
        default="qwen35",
        help="architecture (default %(default)s)",
    )
    sizes = "; ".join(f"{arch}: {', '.join(f.sizes)}" for arch, f in RANDOM_FAMILIES.items())
    group.add_argument("--size", metavar="NAME", help=f"parameters, by default the first ({sizes})")
    group.add_argument(
        "--drafter",
        choices=tuple(RANDOM_DRAFTERS),
        help="write a drafter for a model of this architecture and size instead, for -md",
    )
    group.add_argument(
        "--quant",
        choices=QUANTS,
        default="q8_0",
        help="types of the matrices (default %(default)s)",
    )


def _number(group: argparse._ArgumentGroup, name: str, default: int, text: str) -> None:
    group.add_argument(
        name, type=positive, default=default, metavar="N", help=f"{text} (default {default})"
    )


def run(args: argparse.Namespace) -> int:
    """Check which measurement is asked for, and do it. Raises OptionError."""
    has_model = args.model is not None or args.model_option is not None or args.demo
    on_requests = args.against is None and not (
        args.splits or args.steps or args.compare or args.write_random_model
    )
    if args.rollback is not None and not on_requests:
        raise OptionError(
            "--rollback goes with the suite, with --w1 or without a model.",
            "Leave the other measurement out.",
        )
    if args.out is not None and (args.recording or not on_requests):
        raise OptionError("--out goes with the suite or --w1.", "Use --json and redirect it.")
    is_suite = on_requests and has_model and not (args.w1 or args.slots or args.recording)
    if args.report is not None and not is_suite:
        raise OptionError("--report goes with the suite only.", "Use --json and redirect it.")
    if args.markdown and not is_suite and args.against is None:
        raise OptionError(
            "--markdown goes with the suite and with --against only.", "Leave it out."
        )
    check_report(args)
    if not args.w1:
        refuse_cache(args, "--w1")
    if args.against is None:
        bench_against.refuse(args)
    if args.repeat is not None and args.repeat > _MOST_REPEATS:
        raise OptionError(f"--repeat is above {_MOST_REPEATS}.", "Medians need far fewer.")
    if args.compare is not None:
        return bench_suite.compare(args)
    if args.write_random_model is not None:
        return _write(args)
    if args.w1:
        return bench_w1.run(args)
    if args.against is not None:
        return bench_against.run(args)
    repeat_default = 1
    if args.recording or args.splits or args.steps or (args.rollback and not has_model):
        repeat_default = _REPEAT
    args.repeat = args.repeat or repeat_default
    if args.slots:
        return bench_slots.run(args)
    if args.recording:
        return bench_recording.run(args)
    if args.splits:
        return bench_forward.splits(args)
    if args.steps:
        return bench_forward.steps(args)
    if args.rollback is not None and not has_model:
        return bench_rollback.run(args)
    return bench_suite.run(args)


def _write(args: argparse.Namespace) -> int:
    path = args.write_random_model
    check_output(path, "--write-random-model")
    size = args.size or next(iter(RANDOM_FAMILIES[args.arch].sizes))
    if args.drafter is None:
        write_random_model(path, arch=args.arch, size=size, quant=args.quant)
    else:
        write_random_drafter(
            path, drafter=args.drafter, arch=args.arch, size=size, quant=args.quant
        )
    n_bytes = path.stat().st_size
    if args.json:
        print_json(
            {
                "path": str(path),
                "arch": args.arch,
                "size": size,
                "drafter": args.drafter,
                "quant": args.quant,
                "bytes": n_bytes,
            }
        )
    else:
        print_line(f"{path}: {size_text(n_bytes)}, random weights, the same ones every time")
    return 0


def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(ROLLBACK_POLICIES)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ROLLBACK_POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a policy")
    return names


def _widths(text: str) -> Sequence[int]:
    return tuple(dict.fromkeys(positive(word.strip()) for word in text.split(",")))
