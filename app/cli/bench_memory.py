"""`draftscope bench --rollback` without a model: rounds of made-up states."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from app.cli.bench_tables import rollback_lines
from app.cli.common import print_json
from engine.errors import OptionError

_MOST_STATES = 64
_MOST = {"heads": 1024, "dim": 1024, "layers": 1024, "conv_dim": 1 << 18}


def run(args: argparse.Namespace) -> int:
    """Measure and print the policies."""
    if max(args.widths) > _MOST_STATES + 1:
        raise OptionError(
            f"--widths {max(args.widths)} is above {_MOST_STATES + 1}.",
            f"A draft has at most {_MOST_STATES} tokens.",
        )
    for name, most in _MOST.items():
        if getattr(args, name) > most:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is above {most}.", "No model has layers of that size.")
    if args.n_rs_seq is not None and not 1 <= args.n_rs_seq <= _MOST_STATES:
        raise OptionError(
            f"--n-rs-seq is outside 1..{_MOST_STATES}.", "Choose another number of snapshots."
        )
    import torch

    from engine.bench.rollback import bench_layout, bench_rollback

    layout = bench_layout(args.heads, args.dim, args.layers, args.conv_dim)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = bench_rollback(
        args.rollback,
        args.widths,
        layout,
        keep=args.keep,
        n_rs_seq=args.n_rs_seq,
        repeats=args.repeat,
    )
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
        print_json({**facts, "rows": [asdict(row) for row in rows]})
    else:
        for line in rollback_lines(facts, rows):
            print(line, flush=True)
    return 0
