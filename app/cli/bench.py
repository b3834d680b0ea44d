"""`draftscope bench`: measurements, as a table or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.bench_tables import rollback_lines, split_lines, step_lines
from app.cli.common import (
    add_compute,
    add_model,
    loading_line,
    positive,
    print_json,
    size,
    target_path,
    use_threads,
)
from app.cli.files import check_files
from engine.bench.random_model import QUANTS, SIZES, write_random_model
from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.model.info import describe
from engine.options import ROLLBACK_POLICIES

if TYPE_CHECKING:
    from engine.model.hybrid import HybridModel

_MOST_STATES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.epilog = (
        "examples:\n"
        "  draftscope bench --rollback all\n"
        "  draftscope bench --write-random-model random.gguf\n"
        "  draftscope bench random.gguf --splits\n"
        "  draftscope bench random.gguf --steps 1,2,4,8,16,128,512"
    )
    add_compute(add_model(parser))
    what = parser.add_argument_group("what to measure (one of these)")
    one = what.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "--rollback",
        type=_policies,
        metavar="A[,B]",
        help=f"cost of undoing drafts, without a model: all, or {', '.join(ROLLBACK_POLICIES)}",
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
        "--write-random-model",
        type=Path,
        metavar="FILE",
        help="measure nothing: write a qwen35 model with random weights and an MTP head",
    )
    parser.add_argument(
        "--repeat",
        "--rounds",
        type=positive,
        metavar="N",
        help="repetitions (default 7)",
        default=7,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_rollback(parser)
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
        "--size", choices=SIZES, default=SIZES[0], help="parameters (default %(default)s)"
    )
    group.add_argument(
        "--quant",
        choices=QUANTS,
        default="q8_0",
        help="types of the matrices (default %(default)s)",
    )


def _add_rollback(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--rollback")
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
    group.add_argument(
        "--n-rs-seq",
        type=positive,
        metavar="N",
        help="snapshots beyond the live state (default: all but one of the tokens)",
    )


def _number(group: argparse._ArgumentGroup, name: str, default: int, text: str) -> None:
    group.add_argument(
        name, type=positive, default=default, metavar="N", help=f"{text} (default {default})"
    )


def run(args: argparse.Namespace) -> int:
    """Measure one thing."""
    if args.write_random_model is not None:
        return _write(args)
    if args.rollback is not None:
        return _rollback(args)
    return _splits(args) if args.splits else _steps(args)


def _write(args: argparse.Namespace) -> int:
    path = args.write_random_model
    write_random_model(path, size=args.size, quant=args.quant)
    n_bytes = path.stat().st_size
    if args.json:
        print_json({"path": str(path), "size": args.size, "quant": args.quant, "bytes": n_bytes})
    else:
        print(f"{path}: {size(n_bytes)}, random weights, the same ones every time")
    return 0


def _rollback(args: argparse.Namespace) -> int:
    if args.model or args.model_option or args.demo:
        raise OptionError("--rollback is measured without a model.", "Leave the model out.")
    if max(args.widths) > _MOST_STATES + 1:
        raise OptionError(
            f"--widths {max(args.widths)} is above {_MOST_STATES + 1}.",
            f"A draft has at most {_MOST_STATES} tokens.",
        )
    if args.n_rs_seq is not None and args.n_rs_seq > _MOST_STATES:
        raise OptionError(f"--n-rs-seq is above {_MOST_STATES}.", "Choose fewer snapshots.")
    import torch

    from engine.bench.rollback import bench_rollback, bench_shape

    shape = bench_shape(args.heads, args.dim, args.layers, args.conv_dim)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = bench_rollback(
        args.rollback,
        args.widths,
        shape,
        keep=args.keep,
        n_rs_seq=args.n_rs_seq,
        repeats=args.repeat,
    )
    facts = {
        "heads": args.heads,
        "dim": args.dim,
        "layers": args.layers,
        "conv_dim": args.conv_dim,
        "state_bytes": shape.n_bytes,
        "threads": torch.get_num_threads(),
        "repeat": args.repeat,
    }
    if args.json:
        print_json({**facts, "rows": [asdict(row) for row in rows]})
    else:
        for line in rollback_lines(facts, rows):
            print(line, flush=True)
    return 0


def _splits(args: argparse.Namespace) -> int:
    if args.sequences > _MOST_STATES or args.draft > _MOST_STATES:
        raise OptionError(
            f"--sequences or --draft is above {_MOST_STATES}.", "Choose a smaller number."
        )
    model, facts = _model(args)
    from engine.bench.splits import bench_splits

    result = bench_splits(model, n_seqs=args.sequences, n_draft=args.draft, rounds=args.repeat)
    if args.json:
        print_json({**facts, **asdict(result)})
    else:
        print("\n".join(split_lines(facts, result)))
    return 0


def _steps(args: argparse.Namespace) -> int:
    model, facts = _model(args)
    from engine.bench.steps import bench_steps

    rows = bench_steps(model, args.steps, repeats=args.repeat, outputs=args.outputs)
    facts["outputs"] = args.outputs
    if args.json:
        print_json({**facts, "rows": [asdict(row) for row in rows]})
    else:
        print("\n".join(step_lines(facts, rows)))
    return 0


def _model(args: argparse.Namespace) -> tuple[HybridModel, dict[str, Any]]:
    """The model to measure and what a reader of the figures must know of it."""
    path = target_path(args)
    check_files(path)
    with GgufFile.open(path) as file:
        info = describe(file)
    if args.steps and max(args.steps) > info.n_ctx_train:
        raise OptionError(
            f"--steps {max(args.steps)} is longer than the trained context of {info.n_ctx_train}.",
            "Lower it.",
        )
    import torch

    from engine.model.loader import load_model

    with GgufFile.open(path) as file:
        model = load_model(file, compute=args.compute, progress=loading_line())
    use_threads(args.threads, info)
    facts = {
        "model": path.name,
        "n_params": info.n_params,
        "compute": model.compute,
        "threads": torch.get_num_threads(),
        "repeat": args.repeat,
    }
    return model, facts


def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return ROLLBACK_POLICIES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ROLLBACK_POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a policy")
    return names


def _widths(text: str) -> Sequence[int]:
    return tuple(dict.fromkeys(positive(word.strip()) for word in text.split(",")))
