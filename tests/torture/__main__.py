"""Plays the campaigns: python -m tests.torture [--only NAME] [--seed N] [--minutes M] [--json].

`--part 1/2` and `--part 2/2` play half of them each, for two processes at once.
The time is shared out to the campaigns, with the processor time that each of them needs to begin;
what one takes longer, those after it have less. `--new M` plays a seed that no one has seen for
M minutes more, next to the other. A case that fails is made small and written to the corpus, which
`--replay FILE…` and the suite play again. `--plant NAME` plants a fault of `tests.torture.plants`
first. Exit status 1 when a threshold is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# before torch is imported: children are forked, so that no other thread may be there
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["QT_QPA_PLATFORM"] = "offscreen"

from kernels.kernel_files import VARIABLE as KERNELS
from kernels.kernel_files import cache_folder
from tests.torture import corpus
from tests.torture.children import play
from tests.torture.listed import NAMES, campaign
from tests.torture.plants import PLANTS
from tests.torture.play import campaign_for
from tests.torture.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--only", choices=NAMES, action="append", metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N")
    parser.add_argument("--new", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each campaign")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--any-pace", action="store_true", help="a replay may stall")
    parser.add_argument("--corpus", type=Path, default=corpus.FOLDER, help="where failures go")
    parser.add_argument("--plant", choices=PLANTS, metavar="NAME")
    parser.add_argument(
        "--first", action="store_true", help="end a campaign with its first failure"
    )
    args = parser.parse_args()
    # whatever a campaign keeps for its cases goes with it
    tempfile.tempdir = tempfile.mkdtemp(prefix="draftscope-torture-")
    scratch = Path(tempfile.tempdir)
    # but for compiled kernels, which are the same in every run
    os.environ.setdefault(KERNELS, str(cache_folder() / "kernels"))
    os.environ["DRAFTSCOPE_DATA_DIR"] = str(scratch / "data")
    if args.plant:
        PLANTS[args.plant][1]()
    try:
        return _replay(args, scratch) if args.replay else _campaigns(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _part(text: str) -> tuple[int, int]:
    part, _, n_parts = text.partition("/")
    if not 1 <= int(part) <= int(n_parts):
        raise ValueError
    return int(part), int(n_parts)


def _campaigns(args: argparse.Namespace, scratch: Path) -> int:
    part, n_parts = args.part
    chosen = [campaign(name) for name in (args.only or NAMES)[part - 1 :: n_parts]]
    minutes = {args.seed: args.minutes}
    if args.new:
        minutes[secrets.randbelow(10**9)] = args.new
    whole = sum(minutes.values())
    left = 60 * whole
    broken: list[str] = []
    for i, one in enumerate(chosen):
        own = left * one.share / sum(later.share for later in chosen[i:])
        begun = time.process_time()
        try:
            one.prepare()
        except Exception as error:
            traceback.print_exc()
            broken.append(f"{one.name}: it cannot be prepared: {error}")
            continue
        prepared = time.process_time() - begun
        left -= prepared
        for seed, its_minutes in minutes.items():
            seconds = (own - prepared) * its_minutes / whole
            keep = None if args.first else args.corpus
            report = campaign_for(one, seed, seconds, scratch / one.name, keep)
            left -= report.seconds
            _tell(report, sys.stdout.write, as_json=args.json)
            broken += report.broken()
    for line in broken:
        sys.stderr.write(f"{line}\n")
    return int(bool(broken))


def _tell(report: Report, write: Callable[[str], object], *, as_json: bool) -> None:
    line = report.line()
    if as_json:
        write(json.dumps(line) + "\n")
    else:
        write("  ".join(f"{name} {value}" for name, value in line.items()) + "\n")
    for failure in report.failures.values():
        sys.stderr.write(f"{report.campaign.name}: {failure}\n")
    sys.stdout.flush()


def _replay(args: argparse.Namespace, scratch: Path) -> int:
    """Neighbours of one campaign share a child, which prepares what it needs: less than all."""
    status, left = 0, [(path, corpus.load(path)) for path in args.replay]
    while left:
        name = left[0][1].campaign
        n_done = next((i for i, (_, one) in enumerate(left) if one.campaign != name), len(left))
        cases = [(i, case) for i in range(n_done) for case in left[i][1].cases]
        one = campaign(name)
        one = replace(one, stalled_s=None) if args.any_pace else one
        played = play(one, [case for _, case in cases], scratch / name)
        for outcome, (i, _) in zip(played, cases, strict=False):
            if outcome.trouble:
                sys.stderr.write(f"{left[i][0].name}: {outcome.trouble}\n{outcome.told}\n")
                status, n_done = 1, i + 1
        left = left[n_done:]
    return status


if __name__ == "__main__":
    sys.exit(main())
