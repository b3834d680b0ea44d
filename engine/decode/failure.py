"""Failures of a run: the memory contents when an error ends it, and non-finite logits."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.decode.sequences import DecodingSequence
from engine.errors import ContextFullError, DraftscopeError, NonFiniteError, RollbackRefusedError
from engine.memory.hybrid import HybridMemory
from engine.options import RunOptions
from engine.trace.facts import RunFacts

_ROOT = Path(__file__).resolve().parents[2]


HeldSequence = tuple[int, int, int, Mapping[str, int]]
"""A sequence at the time of a failure: its id, its memory sequence, how many tokens the memory must
hold at least, and how many each stateful drafter holds, by name."""


def note_failure(
    facts: RunFacts,
    error: BaseException,
    memory: HybridMemory,
    round_: int,
    sequences: Iterable[HeldSequence],
) -> None:
    """Add `failure` to the facts of a run, unless the error is the user's: for a refused rollback,
    a full context, or an exception that the engine does not raise on purpose."""
    own = isinstance(error, (RollbackRefusedError, ContextFullError))
    if not isinstance(error, Exception) or (isinstance(error, DraftscopeError) and not own):
        return
    recurrent = memory.recurrent
    rows = []
    for seq_id, seq, n_tokens, drafters in sequences:
        used, duplicates, pos_max = memory.attention.holding(seq)
        row = {"seq_id": seq_id, "n_tokens": n_tokens, "drafters": dict(drafters)}
        row |= {"attention_pos": pos_max, "cells": used, "duplicates": duplicates}
        if recurrent:
            row["recurrent_pos"] = recurrent.seq_pos_max(seq)
            row["pending"], row["n_rs_seq"] = recurrent.pending(seq), recurrent.n_rs_seq
            row["valid_depth"] = recurrent.valid_depth(seq)
        rows.append(row)
    facts.update(
        failure={
            "type": type(error).__name__,
            "message": str(error),
            "place": _place(error),
            "round": round_,
            "sequences": rows,
        }
    )


def _place(error: BaseException) -> str:
    """The innermost function of this program in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(_ROOT)] or frames
    return f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else ""


_OF_DRAFTER = {
    "draft-mtp": "MTP head",
    "draft-simple": "draft model",
    "draft-eagle3": "EAGLE-3 drafter",
    "draft-dflash": "DFlash drafter",
    "draft-dspark": "DSpark drafter",
}
"""Drafter names as they appear in messages."""


def note_non_finite(
    facts: RunFacts,
    options: RunOptions,
    round_: int,
    sequence: DecodingSequence,
    first_pos: int,
    drafter: str,
    found: tuple[int, float] | None,
) -> None:
    """Note a row of non-finite logits in the fact `non_finite`, the first of each sequence, and end
    the sequence with NonFiniteError unless the options allow it.

    first_pos: position of the token that row 0 chooses. drafter: empty for the target. found: the
    row, if any, and its largest logit, NaN if a logit is NaN.
    """
    if found is None:
        return
    (n, largest), seq_id = found, sequence.seq_id
    pos, what = first_pos + n, "NaN" if math.isnan(largest) else "infinity"
    where = _OF_DRAFTER.get(drafter, drafter) if drafter else "trunk"
    if seq_id not in {row.seq_id for row in facts.non_finite or ()}:
        row = {"round": round_, "seq_id": seq_id, "pos": pos, "where": where, "what": what}
        facts.add_to("non_finite", row)
    if options.allow_non_finite:
        return
    sequence.stop = "error"
    raise NonFiniteError(
        f"The {where}'s logits for position {pos} of sequence {seq_id}, in round {round_}, "
        f"contain {what}.",
        "Load the file again, or in another compute mode (--compute f32); --allow-non-finite "
        "continues anyway.",
    )
