"""`draftscope bench suite`: a set of prompts, with and without speculation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from app.cli.bench_requests import declare_requests, deliver, facts, open_bench, progress
from app.cli.option_lines import check_output
from app.cli.output import tell
from app.cli.parser import KINDS
from app.cli.recorded import check_report, deliver_report
from app.cli.run import make_prompt
from engine.errors import OptionError
from engine.experiments.bench.request import PLAIN
from engine.experiments.bench.suite import PromptSuite, SuiteWriter, suite_result
from engine.experiments.bench.suite_report import (
    OVERVIEW_HEADS,
    options_of,
    overview_cells,
    suite_page,
)
from engine.plain_text import counted
from resources import SUITES

_OVERVIEW = "{:<{width}}  {:>8}  {:>8}  {:>6}  {:>12}  {:>7}  {:>7}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "\n".join(f"  {kind:<14} {about}" for kind, about in KINDS["bench"].items())
    declare_requests(parser, __name__, kinds=kinds)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; after an error or Ctrl-C, the finished part."""
    check_report(args)
    args.repeat = args.repeat or 1
    if args.model is not None and not args.model.exists():
        for kind in get_close_matches(args.model.name, KINDS["bench"], n=1):
            raise OptionError(f"There is no bench {args.model}.", f"Did you mean bench {kind}?")
    args.folder, args.out = _folder_and_file(args.out)
    set_name, named, session, configurations = open_bench(args, SUITES)
    prompts = [(prompt.name, make_prompt(session, args, prompt.text)) for prompt in named]
    suite = PromptSuite(session, prompts, configurations, repeats=args.repeat)
    options, texts = options_of(suite.configurations), {one.name: one.text for one in named}
    known = {"repeat": args.repeat, **facts(args, session, set_name)}
    with ExitStack() as undo:
        writer = None
        if args.folder is not None:
            writer = undo.enter_context(
                SuiteWriter(args.folder, known, options, texts, suite.n_requests)
            )
            suite.measured |= writer.measured
        try:
            _measure(suite, writer)
        finally:
            if suite.measured:
                report = suite_result(known, options, texts, suite.measured, suite.n_requests)
                printed = deliver_report(args, lambda words: suite_page(report, words))
                deliver(args, report, None if printed else suite_lines(report))
                if writer is not None:
                    tell(f"results written to {writer.path}")
    return 0


def _folder_and_file(out: Path | None) -> tuple[Path | None, Path | None]:
    """The folder of a results file, or the JSON file, from --out."""
    if out is None or out.suffix.lower() != ".json":
        return out, None
    check_output(out, "--out")
    return None, out


def _measure(suite: PromptSuite, writer: SuiteWriter | None) -> None:
    """Measure the rest of the suite, writing each result as soon as it is measured."""
    n_done, n_all = len(suite.measured), suite.n_requests
    if n_done:
        tell(f"{n_done} of {n_all} requests have results already")
    if n_done == n_all:
        return
    progress(n_done, n_all, "warm-up, not counted")
    suite.warm_up()
    for done, repeat in suite.requests():
        n_done += 1
        if writer is not None:
            writer.add(done, repeat)
        progress(
            n_done,
            n_all,
            f"{done.prompt}, {done.configuration}: {counted(done.predicted_n, 'token')}, "
            f"{done.predicted_per_second:.1f} tok/s",
        )


def suite_lines(report: dict[str, Any]) -> Iterator[str]:
    """One block per configuration, then one line for each."""
    configurations = report["configurations"]
    for one in configurations:
        yield ""
        yield f"{one['name']}:"
        for row in one["rows"]:
            yield row_line(row)
        yield f"Aggregate: {json.dumps(one['aggregate'])}"
        if one["name"] != PLAIN:
            yield from split_lines(one)
    yield ""
    width = max(len("configuration"), *(len(one["name"]) for one in configurations))
    yield _OVERVIEW.format(*OVERVIEW_HEADS, width=width)
    for one in configurations:
        yield _OVERVIEW.format(*overview_cells(one), width=width)
    if not report["complete"]:
        yield ""
        yield "not complete: the suite was stopped"


def row_line(row: dict[str, Any]) -> str:
    """A prompt's line: llama.cpp #22400's columns, then the speed-up and whether the tokens are
    those of plain decoding."""
    same = {True: "yes", False: "NO", None: "n/a"}[row["same"]]
    return (
        f"{row['name']:<18} pred={row['predicted_n']:>4} draft={row['draft_n']:>4} "
        f"acc={row['draft_n_accepted']:>4} rate={number(row['accept_rate'], 3):>5} "
        f"tok/s={number(row['predicted_per_second'], 1):>6} "
        f"speed-up={number(row['speed_up'], 2):>5} same={same}"
    )


def split_lines(one: dict[str, Any]) -> Iterator[str]:
    """The parts of a round's time, and what would make it faster than plain decoding."""
    split = one["split"]
    if split is None:
        return
    yield (
        f"{split['tokens_per_round']:.2f} tokens per round of {split['round_ms']:.2f} ms: "
        f"drafting {split['draft_ms']:.2f}, verifying {split['verify_ms']:.2f}, rest "
        f"{split['rest_ms']:.2f}; a plain step takes {split['plain_step_ms']:.2f} ms"
    )
    needed = split["break_even_acceptance"]
    if needed is None:
        yield "nothing was drafted"
    else:
        rate = one["aggregate"]["aggregate_accept_rate"]
        verdict = "faster" if split["tokens_per_round"] > split["break_even_tokens"] else "slower"
        cannot = ", impossible with this draft length" if needed > 1 else ""
        yield (
            f"break-even at {split['break_even_tokens']:.2f} tokens per round, an acceptance of "
            f"{needed:.3f}{cannot}; measured {rate:.3f}: {verdict} than plain decoding"
        )
    if one["num_same"] < len(one["rows"]):
        yield "some texts differ from plain decoding: `draftscope match` shows where"


def number(value: float | None, digits: int) -> str:
    """A figure with its decimals, "n/a" for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"
