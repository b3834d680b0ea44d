"""What one round did to one sequence, before it becomes rows of the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.decode.verify import FactsRequest, TargetFacts
from engine.draft.drafter import Draft
from engine.sampling.grammar import AllowedTokens

_NOTHING = TargetFacts([], [], [], [], [])


@dataclass(slots=True)
class RoundFacts:
    """What one round did to one sequence; most fields are columns of the rounds table.

    pos_next: position of the first emitted token. tokens: the accepted list (matching draft
    prefix and the target's own tokens), cut at a stop. n_accepted: drafted tokens confirmed, None
    for a prompt. own_kinds: kinds of the target's own tokens, none behind a part of a prompt.
    target, rule_p: facts about each judged draft token, then about each of the target's own;
    target may still be what they are worked out from.
    rule_q: of each judged draft token. accept_rule: the rule that judged, empty without a draft.
    allowed: what a grammar allowed at the same places as target and rule_p.
    unverified: drafted tokens behind the draft that the target was not shown.
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
    target: TargetFacts | FactsRequest
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
    allowed: Sequence[AllowedTokens | None] = ()
    sampler_wrong: int | None = None
    sampler_draws: int | None = None
    unverified: Draft | None = None


def round_facts(
    *,
    seq_id: int,
    seq: int,
    pos0: int,
    width: int,
    tokens: Sequence[int],
    n_own: int,
    logits: torch.Tensor | None,
    draft: Draft | None = None,
    n_emitted: int | None = None,
    n_kept: int | None = None,
    n_padding: int = 0,
    is_prompt: bool = False,
    rule_p: Sequence[float] = (),
    rule_q: Sequence[float] = (),
    valid_depth: int | None = None,
    allowed: Mapping[int, AllowedTokens] | None = None,
) -> RoundFacts:
    """The facts of a round in which nothing was restored.

    width: tokens decoded at pos0, pos0 + 1, … without filler. tokens: the accepted list in full,
    of which the last n_own are the target's own and the first n_emitted (None: all) are output.
    logits: row i chose tokens[i] and judged the drafted token i; None if nothing was chosen.
    n_kept: tokens of the batch that stay in memory, None = all but the filler. allowed: what a
    grammar allowed, by row of the logits.
    """
    n_accepted, drafted = len(tokens) - n_own, draft.tokens if draft else ()
    n_judged = min(len(drafted), n_accepted + 1)
    own = range(n_accepted, len(tokens))
    first = "target" if draft is None else "replacement"
    if draft is not None and n_accepted >= len(drafted):
        first = "bonus"
    kinds = [first] + ["target" if draft is None else "bonus"] * (n_own - 1) if n_own else []
    rows = [*range(n_judged), *own]
    target: TargetFacts | FactsRequest = _NOTHING
    if logits is not None:
        asked = [*drafted[:n_judged], *tokens[n_accepted:]]
        target = FactsRequest(logits, asked, rows)
    n_kept = width if n_kept is None else n_kept
    may = allowed or {}
    return RoundFacts(
        seq_id,
        seq,
        pos0,
        pos0 + (width if is_prompt else 1),
        width,
        draft,
        tokens[:n_emitted],
        None if is_prompt else n_accepted,
        kinds,
        target,
        rollback_depth=width - n_kept,
        memory_rollback=width + n_padding - n_kept,
        valid_depth=valid_depth,
        rule_p=rule_p,
        rule_q=rule_q,
        allowed=[may.get(row) for row in rows] if may else (),
    )
