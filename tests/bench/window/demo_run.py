"""The demo run of the slow-down measure, in a process of its own: python -m
tests.bench.window.demo_run.

Prints one JSON object: tokens decoded per second of the run's own clock, the median of RUNS runs.
One alone takes a second, in which whatever else the machine does is as much as the window.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median

from app.engine_thread.jobs.engine import StartRun
from engine.options import RunOptions, SpecOptions
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_TARGET, demo_prompts

WARM_UP = 32
RUNS = 3
"""Runs that count. The first shows a window what it has never shown before, the others do not."""
REST_S, FULL_N = 1.0, 200
"""Between two runs of that many tokens, with the window or without: what it does after one belongs
to no other."""
_SELDOM_MS = 500


def main() -> int:
    """Decode the first demo prompt, with the window open or without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.window.demo_run")
    parser.add_argument("--window", action="store_true")
    parser.add_argument("-n", type=int, default=400)
    args = parser.parse_args()
    decode = _with_window if args.window else _headless
    store = decode([WARM_UP, *[args.n] * RUNS])
    speeds = [_speed(store, run_id) for run_id in list(store.runs)[-RUNS:]]
    print(json.dumps({"tokens_per_second": median(speeds), "runs": speeds}))
    return 0


def options(n_predict: int) -> RunOptions:
    """Options of the measured run, the same with and without the window."""
    return RunOptions(n_predict=n_predict, ignore_eos=True, spec=SpecOptions(types=("draft-mtp",)))


def _speed(store: TraceStore, run_id: int) -> float:
    mine = store.rounds.column("run_id") == run_id
    emitted = int(store.rounds.column("num_emitted")[mine].sum())
    return 1e3 * emitted / float(store.rounds.column("t_ms")[mine][-1])


def _rest(n_predict: int) -> float:
    return REST_S * min(1.0, n_predict / FULL_N)


def _headless(lengths: Sequence[int]) -> TraceStore:
    from engine.experiments.bench.request import run_to_end
    from engine.session import Session
    from engine.threads import use_threads

    session = Session.open(DEMO_TARGET, DEMO_DRAFT)
    use_threads(None, session.info)  # as `draftscope run` does
    prompt = session.prompt(demo_prompts()[0])
    store = TraceStore()
    for length in lengths:
        run = session.start([prompt], options(length), store)
        run_to_end(run)
        time.sleep(_rest(length))
    return store


def _with_window(lengths: Sequence[int]) -> TraceStore:
    from app.engine_thread.events import State
    from tests.bench.window.scene import settle, shown_window, wait_until

    with shown_window() as window:
        bridge = window.bridge
        window.open_demo()
        wait_until(lambda: bridge.state is State.READY)
        for length in lengths:
            bridge.ask(StartRun([demo_prompts()[0]], options(length)))
            wait_until(lambda: bridge.state is State.READY, check_ms=_SELDOM_MS)
            settle(_rest(length))
        assert bridge.live is not None
        return bridge.live.store


if __name__ == "__main__":
    sys.exit(main())
