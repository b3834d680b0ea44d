"""`draftscope bench slots`: aggregate speed by number of slots."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from app.cli.bench_requests import declare_requests, deliver, open_bench, progress, report_of
from engine.errors import OptionError
from engine.experiments.bench.request import bench_slots
from resources import SUITES

_MOST = 64
_USUAL = (1, 4)
_HEADS = " " * 15 + "slots  tokens accepted     tok/s  seconds  ratio"
_LINE = (
    "{configuration:<14} {n_slots:>5} {predicted_n:>7} {accepted:>8} {tokens_per_second:>9.1f} "
    "{wall_s:>8.2f} {ratio:>6.2f}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare_requests(parser, __name__, usual=",".join(map(str, _USUAL)))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; after Ctrl-C, the finished part."""
    if max(args.slots) > _MOST:
        raise OptionError(f"--slots {max(args.slots)} is above {_MOST}.", "Choose fewer slots.")
    set_name, prompts, session, configurations = open_bench(args, SUITES)
    rows: list[dict[str, Any]] = []
    n_all = len(configurations) * len(args.slots)
    try:
        for row in bench_slots(
            session,
            [session.prompt(prompt.text) for prompt in prompts],
            configurations,
            args.slots,
            repeats=args.repeat or 1,
        ):
            rows.append(row)
            progress(len(rows), n_all, f"{row['configuration']}, {row['n_slots']} slots")
    finally:
        if rows:
            known = {"options": asdict(configurations[-1].options), "rows": rows}
            report = report_of("slots", len(rows) == n_all, args, session, set_name, **known)
            deliver(args, report, _lines(rows))
    return 0


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield _HEADS
    for row in rows:
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        yield _LINE.format(**row, accepted=accepted)
    yield ""
    yield "tok/s: of all slots together, without prompts; seconds: with prompts"
