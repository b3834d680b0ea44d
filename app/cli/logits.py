"""`draftscope logits`: logits at every position, as an .npz file."""

from __future__ import annotations

import argparse

import numpy as np

from app.cli.common import add_compute, add_model, open_session, target_path
from app.cli.option_lines import OptionLines
from app.cli.output import print_report
from engine.files import written_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = add_model(parser)
    add_compute(group)
    OptionLines(parser).add(
        """
        --tokens IDS  token ids, for example 1,2,3
        --out FILE:output  file to write: array `logits`, float32 [n, n_vocab]
        -ub, --ubatch-size N  most tokens in one forward pass (default 512)
        --json  print the shape as a JSON object
        """,
        tokens={"required": True},
        out={"required": True},
    )


def run(args: argparse.Namespace) -> int:
    path, out = target_path(args), args.out
    session = open_session(args, path)
    logits = session.logits(args.tokens, n_ubatch=args.ubatch_size)
    with written_whole(out) as part, part.open("wb") as file:
        np.savez(file, logits=logits)
    facts = {"compute": session.compute, "device": str(session.device)}
    report = {"out": str(out), "shape": list(logits.shape), **facts}
    print_report(
        args, report, [f"{out}: logits {report['shape']}, compute {', '.join(facts.values())}"]
    )
    return 0
