"""Outcomes of rollback checks, for readers. Does not import torch.

A baseline is the output of `draftscope check-rollback --json` for an earlier build. A check that
failed there too, with whatever outcome, is not new.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import OptionError
from engine.files import user_text
from engine.foreign import JsonError, parse_json

RIGHT, WRONG, FAILED, REFUSED = "right", "WRONG", "FAILED", "refused"
KNOWN, ABSENT, UNREAD = "known defect", "no planes", "not judged"
BAD = (WRONG, FAILED, KNOWN)
_MOST_BYTES = 1 << 24
_REMEDY = "Write one with draftscope check-rollback MODEL --llama-cpp BUILD --json > FILE."


def is_new(outcome: str, before: str, *, strict: bool = False) -> bool:
    """Whether a check fails the gate. before: its outcome in the baseline, empty if missing. A
    known defect is new if the baseline had it fixed; strict: always."""
    if outcome not in BAD or before in BAD:
        return False
    return outcome != KNOWN or strict or bool(before)


def read_baseline(path: Path) -> dict[str, str]:
    """Outcomes by check name. Raises OptionError if the file is not a result of check-rollback."""
    try:
        found = parse_json(user_text(path, _MOST_BYTES))
    except JsonError as error:
        raise OptionError(f"{path} is not JSON: {error}.", _REMEDY) from error
    lanes = found.get("lanes") if isinstance(found, dict) else None
    names = [
        (lane.get("name"), lane.get("outcome"))
        for lane in (lanes if isinstance(lanes, list) else [])
        if isinstance(lane, dict)
    ]
    if not names or not all(isinstance(word, str) for pair in names for word in pair):
        raise OptionError(f"{path} is not a result of check-rollback.", _REMEDY)
    return {str(name): str(outcome) for name, outcome in names}
