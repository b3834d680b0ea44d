"""tune --server on a real llama-server under synthetic acceptance of three shapes, next to the grid
of all its settings.

`python -m tests.support.server_tune_campaign 'llama-server -m r.gguf -t 1' DIR [--budget S]` plays
what DIR does not hold yet, and prints one table. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from engine.experiments.bench.request import PLAIN
from engine.experiments.tune.lengths import DraftSetting
from engine.experiments.tune.on_server import ServerPlan, _Tuner, tune_server

SHAPES = {
    "high": (0.92, 0.85, 0.78, 0.72, 0.66, 0.61, 0.56, 0.51),
    "fading": (0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.03, 0.01),
    "low": (0.25, 0.06, 0.02, 0.01, 0.005, 0.002, 0.001, 0.001),
}
TEXTS = ("def quicksort(arr):", "Once upon a time", "class Stack:\n", "import os\n")
_MARK = f"DRAFTSCOPE_CAMPAIGN={os.getpid()}"
CLOSE = 0.97
"""Of the best of the grid, what a recommended setting has to have."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _File:
    """Measurements by name, a line of JSON each; what was measured once is not measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known: dict[str, list[float]] = {}
        for line in lines:
            one = json.loads(line)
            self.known.setdefault(one["name"], []).append(one["value"])

    def add(self, name: str, value: float) -> None:
        self.known.setdefault(name, []).append(value)
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, "value": value}) + "\n")


def started_here() -> list[int]:
    """Processes that this one started and what they started, parents gone or not: all that have its
    mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def _plan(command: str, shape: str, folder: Path, budget: float) -> ServerPlan:
    return ServerPlan(
        TEXTS,
        command,
        drafters=("draft-mtp",),
        rates=SHAPES[shape],
        n_predict=512,
        most_s=budget,
        ignore_eos=True,
        kept=folder / f"{shape}.jsonl",
    )


def _grid(plan: ServerPlan, file: _File, shape: str, seconds: float) -> dict[str, float]:
    """Tokens per second of every setting, medians of passes in alternation. seconds: for all."""
    tuner = _Tuner(plan, lambda what: None)
    names = [PLAIN, *(tuner._name(DraftSetting("draft-mtp", n)) for n in plan.lengths)]
    began, n_passes = time.monotonic(), 0
    with ExitStack() as stack:
        servers = {}
        while n_passes < 9 and (n_passes < 2 or time.monotonic() - began < seconds):
            for name in [*names[n_passes % len(names) :], *names[: n_passes % len(names)]]:
                if len(file.known.get(f"{shape} {name}", ())) > n_passes:
                    continue
                if name not in servers:
                    servers[name] = stack.enter_context(tuner._server(name))
                text = TEXTS[n_passes % len(TEXTS)]
                done = tuner._ask(servers[name], [text], 96)
                file.add(f"{shape} {name}", done.speed(plan.rates))
            n_passes += 1
    return {name: statistics.median(file.known[f"{shape} {name}"]) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of each tune")
    parser.add_argument("--grid", type=float, default=180.0, help="seconds of each grid")
    args = parser.parse_args()
    name, _, value = _MARK.partition("=")
    os.environ[name] = value
    args.folder.mkdir(parents=True, exist_ok=True)
    file, bad = _File(args.folder / "grid.jsonl"), 0
    rows = ["shape | recommended | of the best | best | tune, s | grid, tokens/s"]
    for shape in SHAPES:
        plan = _plan(args.command, shape, args.folder, args.budget)
        began = time.monotonic()
        found = tune_server(plan)
        if f"{shape} s" not in file.known:
            file.add(f"{shape} s", time.monotonic() - began)
        grid = _grid(plan, file, shape, args.grid)
        best = max(grid, key=lambda name: grid[name])
        chosen = found.verdict.chosen
        share = grid[chosen] / grid[best]
        took_s = file.known[f"{shape} s"][0]
        bad += share < CLOSE or took_s > args.budget
        speeds = ", ".join(f"{speed:.2f}" for speed in grid.values())
        rows.append(f"{shape} | {chosen} | {share:.1%} | {best} | {took_s:.0f} | {speeds}")
        _say(rows[-1])
        _say(f"  {found.verdict.lines[0]}")
    _say("\n" + "\n".join(rows))
    left = started_here()
    _say(f"servers left: {len(left)}{''.join(f', {pid}' for pid in left)}")
    return bad + len(left)


if __name__ == "__main__":
    sys.exit(main())
