"""Random forks with equal options, each of which has to be the rest of its parent bit for bit.

The suite plays a few; `python -m tests.support.fork_campaign N [--seed S]` plays N in f32 at random
rounds of any family, drafter, policy, sampler and grammar, and prints those that are not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.errors import OptionError
from engine.fork import Fork
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, RunOptions
from engine.run import Run
from engine.run_checkpoints import RunCheckpoints
from engine.session import Session
from engine.trace.run_ref import RunRef
from tests.support import clean_settings
from tests.support.clean_settings import opened, pick, prompt_for
from tests.support.golden_runs import decode
from tests.support.recorded_runs import assert_same


def ref(run: Run) -> RunRef:
    return RunRef(run.trace, run.run_id)


def forked(
    open_: Session,
    fork: Fork,
    options: RunOptions,
    kept: RunCheckpoints | None = None,
    *,
    beside: bool = False,
) -> Run:
    """The fork, decoded to its end. beside: in the trace of its parent, as with checkpoints."""
    store = fork.parent.store if beside or kept else None
    run = open_.start(fork.prompts(), options, store, fork=fork, checkpoints=kept)
    while run.step():
        pass
    return run


def rounds_of(run: Run) -> int:
    return int(
        run.trace.rounds.column("round")[run.trace.rounds.column("run_id") == run.run_id].max()
    )


def play(seed: int) -> tuple[str, str, str] | None:
    """Compare one fork with its parent, every number that is recorded but for times, decoded again
    from the start and from a checkpoint; returns model, policy and whether one was there, None
    where the options do not go together or no round follows the prompt. Raises AssertionError where
    a number differs, and OptionError where it cannot be forked."""
    random = np.random.default_rng(seed)
    name = pick(random, clean_settings.models())
    drafted = pick(random, clean_settings.drafters_of(name))
    open_ = opened(name, "f32", drafted.file)
    prompts = [prompt_for(open_, name, random) for _ in range(int(pick(random, (1, 1, 2, 3))))]
    options = replace(
        clean_settings.options(random, drafted),
        rollback=str(pick(random, list(ROLLBACK_POLICIES))),
        split=str(pick(random, SPLITS)),
        kv=str(pick(random, KV_MODES)),
        parallel=int(random.integers(1, 4)),
    )
    try:
        kept = RunCheckpoints()
        parent = decode(open_, prompts, options, kept)
    except OptionError:
        return None
    last = rounds_of(parent)
    if last < 1:
        return None
    fork = Fork(ref(parent), int(random.integers(1, last + 1)))
    assert_same(forked(open_, fork, options), parent)
    rebuilt = forked(open_, fork, options, kept)
    assert_same(rebuilt, parent)
    origin = rebuilt.trace.runs[rebuilt.run_id].fork
    assert origin is not None
    return name, options.rollback, origin.rebuilt.split()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays them. Exit status 1 if one is not the rest of its parent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, help="forks that are compared")
    parser.add_argument("--seed", type=int, default=1, help="of the first one (default: 1)")
    options = parser.parse_args(arguments)
    seed, models, policies, wrong = options.seed, Counter[str](), Counter[str](), 0
    ways = Counter[str]()
    while models.total() < options.n:
        try:
            played = play(seed)
        except (AssertionError, OptionError) as error:
            played, wrong = ("", "", ""), wrong + 1
            sys.stdout.write(f"seed {seed}: {error}\n")
        if played is not None:
            models[played[0]] += 1
            policies[played[1]] += 1
            ways[played[2]] += 1
            sys.stderr.write(f"\r{models.total()} of {options.n}")
        seed += 1
    n = models.total()
    sys.stdout.write(f"\n{n - wrong} of {n} forks are the rest of their parents\n")
    for what, counts in (("models", models), ("policies", policies), ("ways", ways)):
        each = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()) if name)
        sys.stdout.write(f"{what}: {each}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
