"""How much slower the engine is while the window shows what it does."""

from __future__ import annotations

from statistics import median

from app.bench.child import run_child
from app.bench.figure import Figure

GOAL_PERCENT = 5.0
_MODULE = "app.bench.demo_run"


def measure_slowdown(pairs: int, n_predict: int) -> list[Figure]:
    """Run the demo without and with the window in turns, each in a fresh process."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        # the order changes, so that a machine that warms up favours neither
        for window in (False, True) if pair % 2 == 0 else (True, False):
            arguments = ["-n", str(n_predict), *(["--window"] if window else [])]
            speeds[window].append(float(run_child(_MODULE, *arguments)["tokens_per_second"]))
    ratios = [alone / shown for alone, shown in zip(speeds[False], speeds[True], strict=True)]
    name = "engine"
    return [
        Figure(name, "headless", median(speeds[False]), "tokens/s"),
        Figure(name, "with the window", median(speeds[True]), "tokens/s"),
        Figure(name, "slow-down", 100 * (median(ratios) - 1), "%", GOAL_PERCENT),
    ]
