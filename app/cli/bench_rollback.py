"""`draftscope bench rollback`: policies on rounds of synthetic states, without a model."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from app.cli.bench_requests import REPEAT, REPEATED
from app.cli.common import loading_line
from app.cli.option_lines import declare
from app.cli.output import print_json, print_line
from engine.errors import OptionError
from engine.options import ROLLBACK_POLICIES
from engine.plain_text import size_text

_MOST_STATES = 64
_MOST = {"heads": 1024, "dim": 1024, "layers": 1024, "conv_dim": 1 << 18}
_LINE = (
    "{:>3} {:>4} {:<10} {:>7} {:>8} {:>8} {:>7} {:>8} {:>8} {:>8} {:>7} {:>8} {:>8} {:>7} {:>8} "
    "{:>8} {:>8} {:>6}"
)
_PHASES = ("save", "verify", "rollback", "restore", "replay", "total")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, **REPEATED)
    parser.set_defaults(rollback=tuple(ROLLBACK_POLICIES))


def run(args: argparse.Namespace) -> int:
    """Measure the policies of --rollback and print a row for each at every width."""
    args.repeat = args.repeat or REPEAT
    if max(args.widths) > _MOST_STATES + 1:
        raise OptionError(
            f"--widths {max(args.widths)} is above {_MOST_STATES + 1}.",
            f"A draft has at most {_MOST_STATES} tokens.",
        )
    for name, most in _MOST.items():
        if getattr(args, name) > most:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is above {most}.", "Use a realistic, smaller size.")
    if args.n_rs_seq is not None and not 1 <= args.n_rs_seq <= _MOST_STATES:
        raise OptionError(
            f"--n-rs-seq is outside 1..{_MOST_STATES}.", "Choose another number of snapshots."
        )
    import torch

    from engine.experiments.bench.rollback import bench_layout, bench_rollback

    layout = bench_layout(args.heads, args.dim, args.layers, args.conv_dim)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    made = bench_rollback(
        args.rollback,
        args.widths,
        layout,
        keep=args.keep,
        n_rs_seq=args.n_rs_seq,
        repeats=args.repeat,
    )
    rows = _watched(made, len(args.widths) * len(args.rollback))
    facts = {
        "heads": args.heads,
        "dim": args.dim,
        "layers": args.layers,
        "conv_dim": args.conv_dim,
        "state_bytes": layout.n_bytes,
        "threads": torch.get_num_threads(),
        "repeat": args.repeat,
    }
    if args.json:
        print_json({**facts, "rows": list(rows)})
    else:
        for line in _lines(facts, rows):
            print_line(line)
    return 0


def _watched(rows: Iterable[dict[str, Any]], n: int) -> Iterator[dict[str, Any]]:
    """Pass rows on, showing their number on a terminal while waiting for the next."""
    progress = loading_line()
    for i, row in enumerate(rows, 1):
        if progress is not None:
            progress(n, n, "")  # the row takes its line
        yield row
        if progress is not None and i < n:
            progress(i, n, f"{i} of {n} rows measured")


_SIZES = ("written", "copied", "saved", "restored", "held", "beyond")


def _lines(said: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A heading, then each row as soon as it is available, with a blank line between widths."""
    yield (
        "{layers} layers of {heads} heads x {dim} x {dim} and a convolution of {conv_dim} channels"
    ).format(**said) + f": {size_text(said['state_bytes'])} a state, float32"
    yield (
        "medians of {repeat} rounds, threads: {threads}; times in ms, sizes in MiB per round"
    ).format(**said)
    yield ("min: fastest total; x none: total over none; beyond: memory beyond one live state")
    yield ""
    yield _LINE.format("T", "kept", "policy", *_PHASES, "min", "x none", *_SIZES, "error")
    width = None
    for row in rows:
        if width not in (None, row["width"]):
            yield ""
        width = row["width"]
        yield _LINE.format(
            row["width"],
            row["kept"],
            row["policy"],
            *(f"{row['ms'][phase]:.2f}" if row["ms"][phase] else "-" for phase in _PHASES),
            f"{row['min_ms']:.2f}",
            f"{row['over_none']:.2f}",
            *(_mib(row[name]) for name in _SIZES),
            "-" if row["state_nmse"] is None else f"{row['state_nmse']:.0e}",
        )


def _mib(n_bytes: int) -> str:
    if n_bytes == 0:
        return "0"
    mib = n_bytes / 2**20
    return f"{mib:.2f}" if mib >= 0.01 else "<0.01"
