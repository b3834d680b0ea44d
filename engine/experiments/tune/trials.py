"""A search by real runs over what no recording can tell: threads, rollback policy, batch split."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import DraftscopeError, OptionError
from engine.experiments.tune.confirm import timed_run
from engine.options import ROLLBACK_POLICIES, SPLITS, Prompt, RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.session import Session


def check_optuna() -> None:
    """Raises OptionError where Optuna is not installed."""
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
    """Try settings, the first one as it is now; the trials from the fastest on: values by name,
    and tokens_per_second, 0 for one that this model cannot run. Raises OptionError without Optuna.
    """
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
            with _threads(threads):
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


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
