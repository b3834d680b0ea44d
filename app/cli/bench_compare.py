"""`draftscope bench compare`: two result files of the suite, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from app.cli.bench_suite import number
from app.cli.output import print_report
from engine.experiments.bench.suite import compare_results, read_result

_DIFF_HEADS = "prompt                   A tok/s    B tok/s     B/A  A rate  B rate"
_DIFF = "{name:<21} {a_tok_s:>10.1f} {b_tok_s:>10.1f} {:>7} {:>7} {:>7}"


def run(args: argparse.Namespace) -> int:
    a, b = (read_result(path) for path in args.compare)
    diff = compare_results(a, b)
    first, second = map(str, args.compare)
    print_report(args, {"a": first, "b": second, **diff}, diff_lines(first, second, diff))
    return 0


def diff_lines(a: str, b: str, diff: dict[str, Any]) -> Iterator[str]:
    """Two result files, named a and b: aggregate fields, then a line per prompt of both."""
    yield f"A: {a}"
    yield f"B: {b}"
    for pair in diff["pairs"]:
        yield ""
        same_name = pair["a_name"] == pair["b_name"]
        yield f"{pair['a_name']}:" if same_name else f"{pair['a_name']} (A), {pair['b_name']} (B):"
        for name, (own, other) in pair["aggregate"].items():
            yield f"{name:<21} {_plain(own):>10} {_plain(other):>10}"
        yield _DIFF_HEADS
        for row in pair["prompts"]:
            rates = (number(row[name], 3) for name in ("a_rate", "b_rate"))
            yield _DIFF.format(number(row["ratio"], 2), *rates, **row)
    for file, names in (("A", diff["only_a"]), ("B", diff["only_b"])):
        if names:
            yield f"only in {file}: {', '.join(names)}"


def _plain(value: float | None) -> str:
    return "n/a" if value is None else str(value)
