"""What one round did to one sequence, before it becomes rows of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.decode.verify import TargetFacts, TargetRows
    from engine.draft.drafter import Draft


@dataclass(slots=True)
class RoundFacts:
    """What one round did to one sequence; most fields are columns of the rounds table.

    pos_next: position of the first emitted token. tokens: the accepted list (matching draft
    prefix and the target's own tokens), cut at a stop. n_accepted: drafted tokens confirmed, None
    for a prompt. own_kinds: kinds of the target's own tokens, none behind a part of a prompt.
    target, rule_p: facts about each judged draft token, then about each of the target's own;
    target may still be what they are worked out from.
    rule_q: of each judged draft token. accept_rule: the rule that judged, empty without a draft.
    """

    seq_id: int
    seq: int
    pos0: int
    pos_next: int
    verify_width: int
    draft: Draft | None
    tokens: Sequence[int]
    n_accepted: int | None
    own_kinds: Sequence[str]
    target: TargetFacts | TargetRows
    rollback_depth: int = 0
    memory_rollback: int = 0
    rollback_path: str = "none"
    valid_depth: int | None = None
    rs_idx_before: int | None = None
    rs_idx_after: int | None = None
    n_replays: int = 0
    checkpoint_bytes: int = 0
    restored_bytes: int = 0
    cache_wrong: int | None = None
    accept_rule: str = ""
    rule_p: Sequence[float] = ()
    rule_q: Sequence[float] = ()
