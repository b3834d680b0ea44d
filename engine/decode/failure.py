"""The failure of a run: what its memory and its drafters held when an error ended it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ContextFullError, DraftscopeError, RollbackRefusedError
from engine.memory.hybrid import HybridMemory

_ROOT = Path(__file__).resolve().parents[2]


class HeldSequence(NamedTuple):
    """A sequence when a run fails. seq: of the memory; n_tokens: of its text that memory must have
    at least; drafters: tokens that each drafter with a memory holds, by its name."""

    seq_id: int
    seq: int
    n_tokens: int
    drafters: Mapping[str, int]


def note_failure(
    facts: dict[str, Any],
    error: BaseException,
    memory: HybridMemory,
    round_: int,
    sequences: Iterable[HeldSequence],
) -> None:
    """Add `failure` to the facts of a run, if the error is no user's: a refused rollback, a full
    context, or what no part of the engine raises on purpose."""
    own = isinstance(error, (RollbackRefusedError, ContextFullError))
    if not isinstance(error, Exception) or (isinstance(error, DraftscopeError) and not own):
        return
    recurrent = memory.recurrent
    rows = []
    for one in sequences:
        cells = memory.attention.holding(one.seq)
        row = {"seq_id": one.seq_id, "n_tokens": one.n_tokens, "drafters": dict(one.drafters)}
        row |= {"attention_pos": cells.pos_max, "cells": cells.used, "duplicates": cells.duplicates}
        if recurrent:
            row["recurrent_pos"] = recurrent.seq_pos_max(one.seq)
            row["pending"], row["n_rs_seq"] = recurrent.pending(one.seq), recurrent.n_rs_seq
            row["valid_depth"] = recurrent.valid_depth(one.seq)
        rows.append(row)
    facts["failure"] = {
        "type": type(error).__name__,
        "message": str(error),
        "place": _place(error),
        "round": round_,
        "sequences": rows,
    }


def _place(error: BaseException) -> str:
    """The innermost function of this program that the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(_ROOT)] or frames
    return f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else ""
