"""How far the states of a lane are from its leader's, layer by layer along the text."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.trace.run_columns import RunColumns
from engine.trace.store import TraceStore

_POINTS = 64


def state_drift(trace: TraceStore, run_id: int) -> list[dict[str, Any]]:
    """An object per sequence and recurrent layer of a lane, [] for one without states.

    pos: last positions of at most 64 spans of rounds; state_error, conv_error: the largest relative
    error within each, None where the layer has no such part. rejected: tokens that the lane had
    undone in the sequence until then.
    """
    rows, rounds = RunColumns(trace, "states", run_id), RunColumns(trace, "rounds", run_id)
    found = []
    for seq in np.unique(rows["seq_id"]).tolist():
        mine = rounds["seq_id"] == seq
        undone = np.cumsum(np.maximum(rounds["memory_rollback"][mine], 0))
        for layer in np.unique(rows["layer"]).tolist():
            here = np.flatnonzero((rows["seq_id"] == seq) & (rows["layer"] == layer))
            spans = np.array_split(here, min(_POINTS, len(here)))
            last = np.array([span[-1] for span in spans], np.int64)
            behind = np.searchsorted(rounds["round"][mine], rows["round"][last], side="right")
            found.append(
                {
                    "seq_id": seq,
                    "layer": layer,
                    "pos": rows["pos"][last].tolist(),
                    "rejected": [int(undone[i - 1]) if i else 0 for i in behind.tolist()],
                    **{
                        name: [_largest(rows[name][span]) for span in spans]
                        for name in ("state_error", "conv_error")
                    },
                }
            )
    return found


def _largest(errors: np.ndarray) -> float | None:
    known = errors[~np.isnan(errors)]
    return float(known.max()) if known.size else None
