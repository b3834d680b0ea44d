"""`draftscope bench random-model`: a model or drafter with random weights, for measurements."""

from __future__ import annotations

import argparse

from app.cli.option_lines import declare
from app.cli.output import print_report
from engine.experiments.random_models.quant_mixes import QUANTS
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_file import RANDOM_DRAFTERS
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.plain_text import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        __name__,
        architectures=tuple(RANDOM_FAMILIES),
        families={arch: tuple(sizes) for arch, sizes in RANDOM_FAMILIES.items()},
        drafters=tuple(RANDOM_DRAFTERS),
        types=QUANTS,
    )


def run(args: argparse.Namespace) -> int:
    path = args.write_random_model
    size = args.size or next(iter(RANDOM_FAMILIES[args.arch]))
    if args.drafter is None:
        write_random_model(path, arch=args.arch, size=size, quant=args.quant)
    else:
        write_random_drafter(
            path, drafter=args.drafter, arch=args.arch, size=size, quant=args.quant
        )
    n_bytes = path.stat().st_size
    print_report(
        args,
        {
            "path": str(path),
            "arch": args.arch,
            "size": size,
            "drafter": args.drafter,
            "quant": args.quant,
            "bytes": n_bytes,
        },
        [f"{path}: {size_text(n_bytes)}, random weights, the same ones every time"],
    )
    return 0
