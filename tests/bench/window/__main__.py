"""python -m tests.bench.window: frames, slow-down of the engine, start and opening, next to their
goals."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from tests.bench.window.figure import Figure, figure_table
from tests.bench.window.processes import measure_slowdown, measure_start
from tests.bench.window.scene import use_some_display
from tests.bench.window.window_thread import measure_frames, measure_layouts, measure_opening


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Exit status: 0 done (goals met or not), 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.window", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="streaming (default 10)")
    parser.add_argument("--pairs", type=int, default=7, help="processes each way")
    parser.add_argument("-n", "--n-predict", type=int, default=1500, help="tokens of such a run")
    parser.add_argument("--starts", type=int, default=5, help="starts, of which the median")
    parser.add_argument("--rows", type=int, default=500_000, help="rows of the opened trace")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    measures: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
        "frames": lambda o: measure_frames(o.seconds),
        "layouts": lambda _: measure_layouts(),
        "engine": lambda o: measure_slowdown(o.pairs, o.n_predict),
        "start": lambda o: measure_start(o.starts),
        "open": lambda o: measure_opening(o.rows),
    }
    parser.add_argument(
        "--only", metavar="NAME", action="append", help=f"one of {', '.join(measures)} (repeatable)"
    )
    options = parser.parse_args(arguments)
    for name in ("seconds", "pairs", "n_predict", "starts", "rows"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    names = options.only or list(measures)
    if unknown := [name for name in names if name not in measures]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(measures)}")
    facts = {
        "display": use_some_display(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    figures = [figure for name in names for figure in measures[name](options)]
    if options.json:
        rows = [asdict(figure) | {"met": figure.met} for figure in figures]
        print(json.dumps({**facts, "figures": rows}, indent=1))
        return 0
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    print(figure_table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
