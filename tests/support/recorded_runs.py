"""Runs that are to be the same in all that was recorded of them but times."""

from __future__ import annotations

import numpy as np

from engine.run import Run
from engine.trace.store import Table
from tests.support.golden_runs import tokens_of


def facts(table: Table, run_id: int = 0) -> dict[str, np.ndarray]:
    """All columns of a run but times and the run's number."""
    wanted = [c for c in table.columns if not c.name.endswith("ms") and c.name != "run_id"]
    mine = table.column("run_id") == run_id
    # texts themselves: they are numbered as they come
    return {
        c.name: np.array(table.texts(c.name) if c.kind == "text" else table.column(c.name))[mine]
        for c in wanted
    }


def assert_same(recorded: Run, plain: Run) -> None:
    """Tokens and every table are equal, number for number."""
    assert tokens_of(recorded) == tokens_of(plain)
    for name in ("rounds", "tokens", "drafts", "ubatches", "memory"):
        ours, theirs = (facts(getattr(run.trace, name), run.run_id) for run in (recorded, plain))
        for column, values in theirs.items():
            np.testing.assert_array_equal(ours[column], values, f"{name}.{column}")
