"""`draftscope bench random-model`: a model or a drafter with random weights, to measure."""

from __future__ import annotations

import argparse

from app.cli.option_lines import OptionLines
from app.cli.output import print_report
from engine.experiments.random_models.quant_mixes import QUANTS
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_file import RANDOM_DRAFTERS
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.plain_text import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "draftscope bench random-model FILE [options]"
    parser.epilog = (
        "examples:\n"
        "  draftscope bench random-model random.gguf\n"
        "  draftscope bench random-model dflash.gguf --drafter dflash"
    )
    group = OptionLines(parser).add(
        """
        write_random_model=FILE:output  GGUF file
        random-model: what is written
          --arch  architecture (default qwen35)
        """,
        arch={"choices": tuple(RANDOM_FAMILIES)},
    )
    sizes = "; ".join(f"{arch}: {', '.join(named)}" for arch, named in RANDOM_FAMILIES.items())
    OptionLines(group).add(
        f"""
        --size NAME  parameters, by default the first ({sizes})
        --drafter  write a drafter for a model of this architecture and size instead, for -md
        --quant  types of the matrices (default q8_0)
        """,
        drafter={"choices": tuple(RANDOM_DRAFTERS)},
        quant={"choices": QUANTS},
    )
    OptionLines(parser).add("--json  print one JSON object")


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
