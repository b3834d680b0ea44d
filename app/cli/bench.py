"""`draftscope bench` without a kind of measurement: the suite; or, as earlier versions wrote it, an
option names the kind (`bench --w1` for `bench w1`), for one more version."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from app.cli import bench_against, bench_forward, bench_random_model, bench_rollback
from app.cli.bench_requests import (
    N_PREDICT,
    add_decoding,
    add_models,
    add_repeat,
    add_rollback,
    numbers,
)
from app.cli.common import output_file
from app.cli.output import note
from app.cli.parser import KINDS, module_of
from app.cli.recorded import add_report, check_report
from app.cli.run_arguments import add_cache, refuse_cache
from engine.errors import OptionError

_KIND_OF_OPTION = {
    "w1": "w1",
    "slots": "slots",
    "recording": "recording",
    "compare": "compare",
    "splits": "forward",
    "steps": "forward",
    "against": "against",
    "write_random_model": "random-model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite's options, and those that named a kind."""
    parser.usage = "draftscope bench [KIND] [MODEL | --demo] [options]"
    kinds = "\n".join(f"  {kind:<14} {about}" for kind, about in KINDS["bench"].items())
    parser.epilog = (
        "kinds of measurement, the suite without any (draftscope bench KIND --help):\n"
        f"{kinds}\n\n"
        "examples:\n"
        "  draftscope bench --demo\n"
        "  draftscope bench model.gguf --spec-type draft-mtp --rollback all\n"
        "  draftscope bench w1 --demo --spec-type draft-mtp\n"
        "  draftscope bench forward model.gguf --steps 1,2,4,8,16,128,512"
    )
    add_models(parser)
    _add_kinds(parser)
    add_decoding(parser)
    add_cache(parser, "w1")
    bench_against.add_details(parser)
    bench_rollback.add_details(parser)
    bench_forward.add_details(parser)
    bench_random_model.add_details(parser)
    parser.set_defaults(n_predict=N_PREDICT)


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("kinds, as earlier versions wrote them (now: bench KIND)")
    one = what.add_mutually_exclusive_group()
    one.add_argument("--w1", action="store_true", help="bench w1")
    one.add_argument("--slots", type=numbers, metavar="N[,N]", help="bench slots")
    one.add_argument("--recording", action="store_true", help="bench recording")
    one.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="bench compare A B")
    one.add_argument("--splits", action="store_true", help="bench forward --splits")
    one.add_argument("--steps", type=numbers, metavar="N[,N]", help="bench forward --steps")
    one.add_argument(
        "--against", nargs="?", const="", metavar="FOLDER", help="bench against --llama-cpp FOLDER"
    )
    one.add_argument(
        "--write-random-model", type=output_file, metavar="FILE", help="bench random-model FILE"
    )
    output = parser.add_argument_group("repetitions and results")
    add_rollback(output)
    add_repeat(output)
    output.add_argument("--out", type=Path, metavar="DIR", help="where results are written")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    add_report(output)


def run(args: argparse.Namespace) -> int:
    """Measure what is asked for. Raises OptionError for options of another kind."""
    has_model = args.model is not None or args.model_option is not None or args.demo
    named = [name for name in _KIND_OF_OPTION if getattr(args, name) not in (None, False)]
    kind = _KIND_OF_OPTION[named[0]] if named else "suite"
    if kind == "suite" and args.rollback is not None and not has_model:
        named, kind = ["rollback"], "rollback"
    _refuse(args, kind)
    if named:
        option = named[0].replace("_", "-")
        note(f"`bench --{option}` is `bench {kind}` now; the next version knows only that")
    return int(import_module(module_of(f"bench {kind}")).run(args))


def _refuse(args: argparse.Namespace, kind: str) -> None:
    """Raises OptionError for an option that another kind of measurement takes."""
    if args.rollback is not None and kind in ("forward", "against", "compare", "random-model"):
        raise OptionError(
            "--rollback goes with the suite, with w1 or without a model.",
            "Leave the other measurement out.",
        )
    if args.out is not None and kind not in ("suite", "w1", "slots", "rollback"):
        raise OptionError("--out goes with the suite or w1.", "Use --json and redirect it.")
    if args.report is not None and kind != "suite":
        raise OptionError("--report goes with the suite only.", "Use --json and redirect it.")
    if args.markdown and kind not in ("suite", "against"):
        raise OptionError("--markdown goes with the suite and with against only.", "Leave it out.")
    check_report(args)
    if kind != "w1":
        refuse_cache(args, "w1")
    if kind == "w1" and args.repeat is not None:
        raise OptionError("--repeat cannot be combined with --w1.", "Leave it out.")
    if kind != "against" and (args.pairs is not None or args.depth is not None):
        raise OptionError("--pairs and --depth go with against only.", "Leave them out.")
