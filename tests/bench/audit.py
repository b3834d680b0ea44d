"""The cost of a run's audit: python -m tests.bench.audit [MODEL] [-md DRAFT] [--pairs 8]

Runs with an audit and without one, by turns, in one process; CPU time of all threads, so that other
processes hardly matter. The first pair warms up and is not counted.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from engine.audit.run_audit import audit_of
from engine.options import RunOptions, SamplerOptions, SpecOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET

_PROMPT = "def quicksort(arr):\n"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _once(session: Session, options: RunOptions, asked: bool | None) -> tuple[float, Any]:
    """CPU seconds of a run, and the fact of its audit."""
    prompts, since = [session.prompt(_PROMPT)], _cpu()
    audit = audit_of(session, prompts, options, asked=asked)
    run = session.start(prompts, options, audit=audit)
    while run.advance():
        pass
    return _cpu() - since, run.trace.runs[run.run_id].get("audit")


def _pairs(
    session: Session, options: RunOptions, asked: bool | None, n: int
) -> tuple[list[tuple[float, float]], Any]:
    """CPU seconds without and with the audit, n times, and what the last audit found."""
    found, fact = [], None
    for i in range(n + 1):
        seconds = {}
        for which in (False, asked) if i % 2 else (asked, False):
            seconds[which], one = _once(session, options, which)
            fact = one or fact
        found.append((seconds[False], seconds[asked]))
    return found[1:], fact


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=DEMO_TARGET)
    parser.add_argument("-md", dest="draft", action="append")
    parser.add_argument("--types", nargs="+", default=["none", "draft-mtp", "ngram-simple"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 200, 600])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--synth-rates", type=float, nargs="+", default=[])
    parser.add_argument("--whole", action="store_true", help="as run --audit")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    drafts = args.draft or ([DEMO_DRAFT, DEMO_EAGLE3] if args.model == DEMO_TARGET else [])
    session = Session.open(args.model, drafts)
    out = sys.stdout.write
    out("| drafter | tokens | CPU s | audit, min | audit, median | tokens | rounds | drafts |\n")
    out("| --- | --- | --- | --- | --- | --- | --- | --- |\n")
    for name in args.types:
        for length in args.lengths:
            is_plain = name == "none"
            rates = () if is_plain else tuple(args.synth_rates)
            options = RunOptions(
                n_predict=length,
                ignore_eos=True,
                sampler=SamplerOptions(temp=args.temp),
                spec=SpecOptions(types=() if is_plain else (name,), synth_rates=rates),
            )
            pairs, fact = _pairs(session, options, True if args.whole else None, args.pairs)
            without, with_audit = (min(column) for column in zip(*pairs, strict=True))
            middle = statistics.median(b / a for a, b in pairs)
            drafted = sum(one["what"] == "judged" for one in fact["drafts"])
            out(
                f"| `{name}` | {length} | {without:.2f} | {100 * (with_audit / without - 1):+.0f} %"
                f" | {100 * (middle - 1):+.0f} % | {fact['n_tokens']} |"
                f" {fact['n_rounds_sampled']} | {drafted} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
