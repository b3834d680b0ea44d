"""Comparisons on golden models, run to their end."""

from __future__ import annotations

import numpy as np

from engine.analysis.verdict import LaneVerdict
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec


def finish(comparison: Comparison) -> Comparison:
    while comparison.step():
        pass
    return comparison


def specs(*texts: str) -> list[LaneSpec]:
    return [NOISE_LANE, *map(LaneSpec.parse, texts)]


def verdicts(comparison: Comparison) -> dict[str, LaneVerdict]:
    return {verdict.lane: verdict for verdict in comparison.results()}


def rounds_of(comparison: Comparison, lane: str) -> dict[str, np.ndarray]:
    """Columns of the rounds of one lane."""
    trace = comparison.trace
    mine = trace.rounds.column("run_id") == verdicts(comparison)[lane].run_id
    names = (
        "round",
        "seq_id",
        "pos0",
        "rollback_depth",
        "kv_cells_duplicate",
        "verify_width",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "kv_cells_used",
    )
    columns = {name: trace.rounds.column(name)[mine] for name in names}
    return columns | {"path": np.array(trace.rounds.texts("rollback_path"))[mine]}


def differences_of(comparison: Comparison, lane: str) -> dict[str, np.ndarray]:
    """Columns of the divergence rows of one lane."""
    rows = comparison.trace.divergence
    mine = rows.column("run_id") == verdicts(comparison)[lane].run_id
    names = (
        "round",
        "seq_id",
        "pos",
        "token_id",
        "nmse",
        "state_error",
        "conv_error",
        "cells_differ",
        "rank",
    )
    return {name: rows.column(name)[mine] for name in names}
