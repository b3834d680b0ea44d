"""`draftscope bench forward`: forward passes of a model, by width or by split."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from app.cli.bench_requests import REPEAT, REPEATED
from app.cli.common import check_files, loading_line, target_path
from app.cli.option_lines import declare, refuse_given
from app.cli.output import print_report
from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.gguf.part_file import ModelFiles
from engine.machine.host_memory import wait_for_huge_pages
from engine.model.info import describe
from engine.plain_text import counted

if TYPE_CHECKING:
    from engine.model.hybrid import HybridModel

_MOST = 64
_USUAL = (1, 2, 4, 8, 16)
_SPLIT_HEADS = "split  passes        ms  tokens/s  |"
_SPLIT = "{:<6} {n_ubatches:>6} {ms:>9.2f} {tokens_per_second:>9.1f}  |"
_STEP_HEADS = "    T    min ms median ms  in kernels  tokens/s"
_STEP = "{width:>5} {min_ms:>9.2f} {median_ms:>9.2f} {inside:>11} {tokens_per_second:>9.1f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, usual=",".join(map(str, _USUAL)), **REPEATED)
    parser.set_defaults(steps=None)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises OptionError."""
    args.repeat = args.repeat or REPEAT
    if args.splits:
        refuse_given(args, "--steps", "--outputs", "--batch-invariant")
        return _splits(args)
    refuse_given(args, "--splits", "--sequences", "--draft")
    args.steps = args.steps or _USUAL
    return _steps(args)


def _splits(args: argparse.Namespace) -> int:
    """Several sequences in one forward pass against one sequence per pass."""
    if args.sequences > _MOST or args.draft > _MOST:
        raise OptionError(f"--sequences or --draft is above {_MOST}.", "Choose a smaller number.")
    model, facts = _model(args)
    from engine.experiments.bench.forward import bench_splits

    result = bench_splits(model, n_seqs=args.sequences, n_draft=args.draft, rounds=args.repeat)
    ModelFiles(model.files).check()
    print_report(args, {**facts, **result}, _split_lines(facts, result))
    return 0


def _steps(args: argparse.Namespace) -> int:
    """The time of a forward pass by its number of tokens."""
    model, facts = _model(args)
    from engine.experiments.bench.forward import bench_steps

    rows = bench_steps(
        model,
        args.steps,
        repeats=args.repeat,
        outputs=args.outputs,
        batch_invariant=args.batch_invariant,
    )
    ModelFiles(model.files).check()
    facts |= {"outputs": args.outputs, "batch_invariant": args.batch_invariant}
    print_report(args, {**facts, "rows": rows}, _step_lines(facts, rows))
    return 0


def _model(args: argparse.Namespace) -> tuple[HybridModel, dict[str, Any]]:
    """Load the model; also returns the facts at the head of its figures. Raises OptionError."""
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

    from engine.machine.device import device_name, resolve_device
    from engine.model.loader import load_model
    from engine.threads import use_threads

    with GgufFile.open(path) as file:
        model = load_model(
            file,
            compute=args.compute,
            device=resolve_device(args.device),
            mmap=args.mmap,
            progress=loading_line(),
        )
    use_threads(args.threads, info)
    wait_for_huge_pages()
    facts = {
        "model": path.name,
        "n_params": info.n_params,
        "compute": model.compute,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "repeat": args.repeat,
    }
    return model, facts


def _split_lines(said: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    """Both splits, with the parts of their time, and the ratio."""
    yield (
        f"{_headline(said)}: {counted(result['n_seqs'], 'sequence')} x "
        f"{counted(result['n_tokens'], 'token')}, "
        f"--rollback {result['rollback']}, median of {counted(said['repeat'], 'round')}"
    )
    yield ""
    sections = list(next(iter(result["figures"].values()))["sections"])
    yield _SPLIT_HEADS + "".join(f" {name:>8}" for name in sections)
    for mode, figures in result["figures"].items():
        spent = (f" {figures['sections'][name]:>{max(8, len(name))}.2f}" for name in sections)
        yield _SPLIT.format(mode, **figures) + "".join(spent)
    yield ""
    yield f"equal is {result['ratio']:.2f} times as fast as seq (median of the rounds' ratios)"


def _step_lines(said: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per width; kernel time is a part of the median."""
    yield (
        f"{_headline(said)}: after one token, logits of {said['outputs']}, "
        f"{said['repeat']} repetitions"
    )
    yield ""
    yield _STEP_HEADS
    for row in rows:
        inside = "" if row["kernels_ms"] is None else f"{row['kernels_ms']:.2f}"
        yield _STEP.format(**row, inside=inside)


def _headline(said: dict[str, Any]) -> str:
    return (
        f"{said['model']} ({said['n_params'] / 1e6:,.0f} M parameters), compute "
        f"{said['compute']}, {said['device']}, {counted(said['threads'], 'thread')}"
    )
