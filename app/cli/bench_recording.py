"""`draftscope bench recording`: the share of a run that recording its trace takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from app.cli.bench_requests import (
    REPEAT,
    declare_requests,
    deliver,
    open_bench,
    progress,
    report_of,
)
from app.cli.run import make_prompt
from resources import SUITES

_HEADS = "{:<{width}}    run  tokens   seconds  recording s    share"
_LINE = "{:<{width}} {:>6} {predicted_n:>7} {wall_s:>9.3f} {recording_s:>12.4f} {percent:>6.2f} %"
_MEDIAN = "{name:<{width}} median {:>30} {percent:>6.2f} %"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare_requests(parser, __name__)


def run(args: argparse.Namespace) -> int:
    """Measure and print; after Ctrl-C, the finished part."""
    args.repeat = args.repeat or REPEAT
    args.ignore_eos = True  # -n sets the length of every run
    set_name, prompts, session, configurations = open_bench(args, SUITES)
    from engine.experiments.bench.forward import bench_recording
    from engine.experiments.bench.suite import PromptSuite

    prompt = make_prompt(session, args, prompts[0].text)
    suite = PromptSuite(session, [(prompts[0].name, prompt)], configurations, repeats=args.repeat)
    n_all = suite.n_requests
    runs: list[dict[str, Any]] = []
    try:
        progress(0, n_all, "warm-up, not counted")
        suite.warm_up()
        for done in bench_recording(session, prompt, configurations, repeats=args.repeat):
            runs.append(done)
            progress(len(runs), n_all, f"{done['configuration']}: {100 * done['share']:.2f} %")
    finally:
        if runs:
            by_name = [
                {
                    "name": one.name,
                    "options": asdict(one.options),
                    "runs": mine,
                    "median_share": median(run["share"] for run in mine),
                }
                for one in configurations
                if (mine := [run for run in runs if run["configuration"] == one.name])
            ]
            known = {"repeat": args.repeat, "prompt": prompts[0].name, "configurations": by_name}
            report = report_of("recording", len(runs) == n_all, args, session, set_name, **known)
            deliver(args, report, _lines(report))
    return 0


def _lines(report: dict[str, Any]) -> Iterator[str]:
    configurations = report["configurations"]
    width = max(len(one["name"]) for one in configurations)
    yield f"one prompt: {report['prompt']}"
    yield ""
    yield _HEADS.format("", width=width)
    for one in configurations:
        for number, run in enumerate(one["runs"], 1):
            percent = 100 * run["share"]
            yield _LINE.format(one["name"], number, width=width, percent=percent, **run)
        yield _MEDIAN.format("", width=width, percent=100 * one["median_share"], **one)
    yield ""
    yield "recording: writing the trace, and computing values that only the trace needs"
    if not report["complete"]:
        yield "not complete: the measurement was stopped"
