"""Logits that are no numbers: noted in the facts of the run, which then ends."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import NonFiniteError

TRUNK = "trunk"
OF_DRAFTER = {"draft-mtp": "MTP head", "draft-simple": "draft model"}


def note_non_finite(
    facts: dict[str, Any], round_: int, seq_id: int, pos: int, where: str, largest: float
) -> NonFiniteError:
    """Note a row of logits under facts["non_finite"], the first of each sequence; the error that
    ends the run.

    pos: of the token that the row is to choose. largest: of the row, NaN if any logit is.
    """
    what = "NaN" if math.isnan(largest) else "infinity"
    rows = facts.setdefault("non_finite", [])
    if seq_id not in {row["seq_id"] for row in rows}:
        rows.append({"round": round_, "seq_id": seq_id, "pos": pos, "where": where, "what": what})
    return NonFiniteError(
        f"The {where}'s logits for position {pos} of sequence {seq_id}, in round {round_}, "
        f"contain {what}.",
        "Load the file anew or in another compute mode (--compute f32); --allow-non-finite goes on "
        "all the same.",
    )
