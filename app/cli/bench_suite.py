"""`draftscope bench MODEL`: the prompt suite, and `--compare` for two of its results."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from app.cli.bench_requests import facts, headline, open_session, progress, prompt_set, write_out
from app.cli.common import print_json
from app.cli.run import make_prompt
from app.cli.suite_tables import diff_lines, suite_lines
from engine.bench.suite_compare import KIND, VERSION, compare_results, read_result
from resources import SUITES

N_PREDICT = 192
"""Tokens per request, as in llama.cpp #22400."""


def run(args: argparse.Namespace) -> int:
    """Measure; what is done is printed and written, also after an error or Ctrl-C."""
    set_name, named = prompt_set(args, SUITES)
    opened = open_session(args)
    session = opened.session
    from engine.bench.suite import Suite
    from engine.bench.suite_report import suite_report

    prompts = [(prompt.name, make_prompt(session, args, prompt.text)) for prompt in named]
    suite = Suite(session, prompts, opened.configurations, repeats=args.repeat)
    n_done = 0
    try:
        progress(0, suite.n_requests, "warm-up, not counted")
        suite.warm_up()
        for done in suite.requests():
            n_done += 1
            progress(
                n_done,
                suite.n_requests,
                f"{done.prompt}, {done.configuration}: {done.predicted_n} tokens, "
                f"{done.predicted_per_second:.1f} tok/s",
            )
    finally:
        if n_done:
            report: dict[str, Any] = {
                "kind": KIND,
                "version": VERSION,
                "complete": n_done == suite.n_requests,
                "repeat": args.repeat,
                **facts(args, session, set_name),
                "configurations": suite_report(suite.configurations, suite.done),
            }
            if args.json:
                print_json(report)
            else:
                print("\n".join([headline(args, report), *suite_lines(report)]))
            write_out(args.out, report)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print what differs between two result files."""
    a, b = (read_result(path) for path in args.compare)
    diff = compare_results(a, b)
    if args.json:
        print_json({"a": str(args.compare[0]), "b": str(args.compare[1]), **asdict(diff)})
    else:
        first, second = args.compare
        print("\n".join(diff_lines(str(first), str(second), diff)))
    return 0
