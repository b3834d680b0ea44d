"""The position that all views share."""

from __future__ import annotations

from dataclasses import dataclass

from engine.trace.run_ref import RunRef


@dataclass(frozen=True)
class Position:
    """A place in the trace: a round of one sequence, and a token position inside it if known."""

    run: RunRef
    seq_id: int
    round: int
    pos: int | None
