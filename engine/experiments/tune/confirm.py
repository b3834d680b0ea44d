"""Confirmation of settings by real runs, alternating with plain decoding.

In each round every configuration decodes all prompts, one after another in one slot, and the order
changes from round to round, so that load of the machine affects them alike. A round gives one speed
per configuration; two configurations are compared by round with a sign test, which assumes no
distribution of times. Before its first counted run each configuration has an uncounted one, which
records passes for later ones.

Threads, rollback policy and batch split, which a recording does not cover, are also searched for by
real runs.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.analysis.run_cost import sign_test
from engine.errors import DraftscopeError, OptionError
from engine.experiments.bench.request import PLAIN, Configuration, TimedRun, timed_run
from engine.options import ROLLBACK_POLICIES, SPLITS, Prompt, RunOptions
from engine.session import Session
from engine.threads import temporary_threads

SIGNIFICANT = 0.05
"""Significance level; six rounds of equal sign have p = 0.031."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One configuration. speeds: tokens per second, one per round. same: prompts whose tokens equal
    plain decoding's. runs: one per round."""

    name: str
    speeds: tuple[float, ...]
    same: int
    n_prompts: int
    runs: tuple[TimedRun, ...]

    @property
    def median(self) -> float:
        """Median speed."""
        return statistics.median(self.speeds)


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """a against b, by round. wins: rounds in which a was faster. p: two-sided. ratio: median of a's
    speed over b's."""

    a: str
    b: str
    wins: int
    n: int
    p: float
    ratio: float

    @property
    def is_shown(self) -> bool:
        """Whether the difference is significant."""
        return self.p < SIGNIFICANT

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        odds = f"{self.wins} of {self.n} pairs, p {self.p:.3f}"
        if not self.is_shown:
            return f"no significant difference between {self.a} and {self.b} ({odds})"
        word = "faster" if self.wins * 2 > self.n else "slower"
        return f"{self.a} is {word} than {self.b}: {self.ratio:.2f} times its speed ({odds})"


def confirm(
    session: Session,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    pairs: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Confirmed]:
    """Measure. configurations: the plain one first. pairs: rounds. report: called with runs
    done and in all. Raises what Session.start raises."""
    if [one.name for one in configurations[:1]] != [PLAIN]:
        raise ValueError("the first configuration is not the plain one")
    taken: dict[str, list[TimedRun]] = {one.name: [] for one in configurations}
    total, done = pairs * len(configurations), 0
    for number in range(pairs):
        first = number % len(configurations)
        for one in [*configurations[first:], *configurations[:first]]:
            if not number:
                timed_run(session, prompts, one.options)
            taken[one.name].append(timed_run(session, prompts, one.options))
            done += 1
            report(done, total)
    plain = taken[PLAIN][0].tokens
    return [_confirmed(name, runs, plain) for name, runs in taken.items()]


def _confirmed(name: str, runs: Sequence[TimedRun], plain: Sequence[tuple[int, ...]]) -> Confirmed:
    same = sum(all(run.tokens[i] == tokens for run in runs) for i, tokens in enumerate(plain))
    return Confirmed(name, tuple(run.speed for run in runs), same, len(plain), tuple(runs))


def compare(a: Confirmed, b: Confirmed) -> SpeedComparison:
    """Round by round, as many as both have; ties count for neither."""
    pairs = [(x, y) for x, y in zip(a.speeds, b.speeds, strict=False) if x != y]
    wins = sum(x > y for x, y in pairs)
    ratios = [x / y for x, y in zip(a.speeds, b.speeds, strict=False) if y]
    ratio = statistics.median(ratios) if ratios else float("nan")
    return SpeedComparison(a.name, b.name, wins, len(pairs), sign_test(wins, len(pairs)), ratio)


def check_optuna() -> None:
    """Raises OptionError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "--trials needs Optuna, which is not installed.", "pip install draftscope[tune]"
        ) from error


def search(
    session: Session,
    prompts: Sequence[Prompt],
    options: RunOptions,
    n_trials: int,
    report: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Try settings, beginning with the current one. Returns the trials, fastest first: values by
    name, and tokens_per_second, 0 for one that this model cannot run. Raises OptionError without
    Optuna."""
    check_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    n_cores = os.cpu_count() or 1

    def measured(trial: Any) -> float:
        threads = trial.suggest_int("threads", 1, n_cores)
        rollback = trial.suggest_categorical("rollback", list(ROLLBACK_POLICIES))
        split = trial.suggest_categorical("split", list(SPLITS))
        try:
            tried = replace(options, rollback=rollback, split=split)
            with temporary_threads(threads):
                found = timed_run(session, prompts, tried).speed
        except DraftscopeError as error:
            report(f"trial {trial.number + 1}: {error.message}")
            return 0.0
        report(
            f"trial {trial.number + 1}: {threads} threads, {rollback}, {split}: {found:.1f} tok/s"
        )
        return found

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=options.sampler.seed)
    )
    now = {"threads": torch.get_num_threads(), "rollback": options.rollback, "split": options.split}
    study.enqueue_trial(now)
    study.optimize(measured, n_trials=n_trials)
    rows = [{**trial.params, "tokens_per_second": trial.value} for trial in study.trials]
    return sorted(rows, key=lambda row: -(row["tokens_per_second"] or 0.0))
