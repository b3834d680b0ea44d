"""The rows of `tokens` that a round brings: drafted, decoded again, and the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decode.round_facts import RoundFacts
    from engine.decode.verify import TargetFacts
    from engine.draft.drafter import Draft


def token_rows(facts: RoundFacts, target: TargetFacts) -> Iterator[dict[str, Any]]:
    """Columns of each row but run_id, round and seq_id, in the order they are written."""
    draft = facts.draft
    n_kept = min(facts.n_accepted or 0, len(facts.tokens))
    own = list(enumerate(zip(facts.own_kinds, facts.tokens[n_kept:], strict=False)))
    n_judged = len(target.prob) - len(facts.own_kinds)
    for i in range(len(draft.tokens) if draft else 0):
        assert draft is not None
        kind = "accepted" if i < n_kept else "ignored"
        if i == facts.n_accepted and i < n_judged:
            kind = "rejected"
            if own and draft.tokens[i] == own[0][1][1]:
                # an end token inside the draft counts as the target's own (llama.cpp); and a
                # replay may choose what was drafted where the first verification did not
                kind = own.pop(0)[1][0]
        row = {
            "pos": facts.pos_next + i,
            "kind": kind,
            "token_id": draft.tokens[i],
            "draft_index": i,
        }
        _add_drafted(row, draft, i)
        if i < n_judged:
            _add_target(row, facts, target, i)
            if draft.probs:
                row["draft_top_forbidden"] = _forbidden(facts, i, draft.top_ids[i])
        yield row
    yield from _unverified_rows(facts, len(draft.tokens) if draft else 0)
    if facts.n_replays:
        for i in range(n_kept):
            yield {
                "pos": facts.pos_next + i,
                "kind": "replayed",
                "token_id": facts.tokens[i],
                "draft_index": i,
            }
    for i, (kind, token) in own:
        row = {"pos": facts.pos_next + n_kept + i, "kind": kind, "token_id": token}
        _add_target(row, facts, target, n_judged + i)
        yield row


def _unverified_rows(facts: RoundFacts, n_verified: int) -> Iterator[dict[str, Any]]:
    for i, token in enumerate(facts.unverified.tokens if facts.unverified else ()):
        assert facts.unverified is not None
        index = n_verified + i
        row = {
            "pos": facts.pos_next + index,
            "kind": "ignored",
            "token_id": token,
            "draft_index": index,
        }
        _add_drafted(row, facts.unverified, i)
        yield row


def _add_drafted(row: dict[str, Any], draft: Draft, i: int) -> None:
    if draft.probs:  # else looked up: the drafter has no confidence in it
        row["draft_p"] = draft.probs[i]
        row["draft_top_id"] = draft.top_ids[i]
        row["draft_top_p"] = draft.top_probs[i]
    if draft.sure:
        row["draft_conf"] = draft.sure[i]


def _add_target(row: dict[str, Any], facts: RoundFacts, target: TargetFacts, i: int) -> None:
    """Columns about the token that a row of the target's logits was asked about."""
    row["target_p"] = target.prob[i]
    row["rule_p"] = facts.rule_p[i] if i < len(facts.rule_p) else None
    row["rule_q"] = facts.rule_q[i] if i < len(facts.rule_q) else None
    row["target_rank"] = target.rank[i]
    row["target_entropy"] = target.entropy[i]
    row["target_top_id"] = target.top_ids[i]
    row["target_top_p"] = target.top_probs[i]
    row["target_top_forbidden"] = _forbidden(facts, i, target.top_ids[i])


def _forbidden(facts: RoundFacts, i: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that a grammar forbids at a judged place; None if nobody asked it."""
    allowed = facts.allowed[i] if i < len(facts.allowed) else None
    return None if allowed is None else [int(not allowed.holds(token)) for token in ids]
