"""`draftscope logits`: logits at every position, as an .npz file."""

from __future__ import annotations

import argparse

import numpy as np

from app.cli.common import open_session, target_path
from app.cli.output import print_report
from engine.files import written_whole


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
