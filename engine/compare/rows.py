"""Rows of the divergence and states tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.compare.divergence import LogitsDifference, MemoryDifference
from engine.trace.records import MISSING
from engine.trace.store import TraceStore


class DivergenceRows:
    """Writes the rows of one lane into the tables `divergence` and `states`."""

    def __init__(self, trace: TraceStore, run_id: int, lane: str) -> None:
        self._trace, self._run_id, self._lane = trace, run_id, lane

    def append(
        self,
        number: int,
        seq_id: int,
        first_pos: int,
        chosen: Sequence[int],
        logits: LogitsDifference,
        memories: MemoryDifference | None,
    ) -> None:
        """A row per chosen token, at first_pos, first_pos + 1, …

        memories: what differs behind the last but one of these positions, put into the last row.
        """
        n = len(chosen)
        state = conv = math.nan
        cells = MISSING
        if memories:
            cells = memories.n_cells
            if memories.layers:
                state, conv = _largest(memories.state), _largest(memories.conv)
                self.states(number, seq_id, first_pos + n - 2, memories)
        no_state = [math.nan] * (n - 1)
        columns: dict[str, list[Any]] = {
            **self._key(n, number, seq_id),
            "pos": list(range(first_pos, first_pos + n)),
            "token_id": list(chosen),
            "max_abs": logits.max_abs,
            "nmse": logits.nmse,
            "kl": logits.kl,
            "top1_equal": logits.top1_equal,
            "rank": logits.rank,
            "top2_gap": logits.top2_gap,
            "state_error": [*no_state, state],
            "conv_error": [*no_state, conv],
            "cells_differ": [*[MISSING] * (n - 1), cells],
        }
        self._trace.divergence.extend(columns)

    def states(self, number: int, seq_id: int, pos: int, memories: MemoryDifference) -> None:
        """A row per recurrent layer, for states whose last position is pos."""
        n = len(memories.layers)
        self._trace.states.extend(
            {
                **self._key(n, number, seq_id),
                "pos": [pos] * n,
                "layer": list(memories.layers),
                "state_error": memories.state,
                "conv_error": memories.conv,
            }
        )

    def _key(self, n: int, number: int, seq_id: int) -> dict[str, list[Any]]:
        return {
            "run_id": [self._run_id] * n,
            "lane": [self._lane] * n,
            "round": [number] * n,
            "seq_id": [seq_id] * n,
        }


def _largest(errors: Sequence[float]) -> float:
    """The largest, NaN if there is none."""
    return max((error for error in errors if not math.isnan(error)), default=math.nan)
