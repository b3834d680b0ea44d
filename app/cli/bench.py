"""`draftscope bench` without a kind of measurement: the suite."""

from __future__ import annotations

import argparse

from app.cli import bench_suite
from app.cli.parser import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite's options, and what else can be measured."""
    bench_suite.add_arguments(parser)
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


run = bench_suite.run
