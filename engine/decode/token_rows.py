"""The rows of `tokens` that a round brings: drafted, decoded again, and the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decode.round import Round
    from engine.draft.drafter import Draft


def token_rows(round_: Round) -> Iterator[dict[str, Any]]:
    """Columns of each row but run_id, round and seq_id, in the order they are written."""
    n_kept = min(round_.n_accepted, len(round_.emitted))
    own = list(enumerate(zip(round_.own_kinds, round_.emitted[n_kept:], strict=False)))
    n_judged = round_.n_judged
    for i, token in enumerate(round_.drafted):
        kind = "accepted" if i < n_kept else "ignored"
        if i == round_.n_accepted and i < n_judged:
            kind = "rejected"
            if own and token == own[0][1][1]:
                # an end token inside the draft counts as the target's own (llama.cpp); and a
                # replay may choose what was drafted where the first verification did not
                kind = own.pop(0)[1][0]
        row = {"pos": round_.pos_next + i, "kind": kind, "token_id": token, "draft_index": i}
        assert round_.draft is not None  # it has this token
        _add_drafted(row, round_.draft, i)
        if i < n_judged:
            _add_target(row, round_, i, i)
            if round_.draft.probs:
                row["draft_top_forbidden"] = _forbidden(round_, i, round_.draft.top_ids[i])
        yield row
    for i, token in enumerate(round_.unverified.tokens if round_.unverified else ()):
        assert round_.unverified is not None  # it has this token
        index = len(round_.drafted) + i
        pos = round_.pos_next + index
        row = {"pos": pos, "kind": "ignored", "token_id": token, "draft_index": index}
        _add_drafted(row, round_.unverified, i)
        yield row
    if round_.n_replays:
        for i, token in enumerate(round_.emitted[:n_kept]):
            pos = round_.pos_next + i
            yield {"pos": pos, "kind": "replayed", "token_id": token, "draft_index": i}
    for i, (kind, token) in own:
        row = {"pos": round_.pos_next + n_kept + i, "kind": kind, "token_id": token}
        _add_target(row, round_, n_judged + i, round_.n_accepted + i)
        yield row


def _add_drafted(row: dict[str, Any], draft: Draft, i: int) -> None:
    if draft.probs:  # else looked up: the drafter has no confidence in it
        row["draft_p"] = draft.probs[i]
        row["draft_top_id"] = draft.top_ids[i]
        row["draft_top_p"] = draft.top_probs[i]
    if draft.sure:
        row["draft_conf"] = draft.sure[i]


def _add_target(row: dict[str, Any], round_: Round, i: int, logits_row: int) -> None:
    """Columns about the i-th examined token, judged or chosen by that row of the logits."""
    target = round_.target
    assert target is not None  # worked out before rows are written
    row["target_p"] = target.prob[i]
    row["rule_p"] = round_.rule_p[i] if i < len(round_.rule_p) else None
    row["rule_q"] = round_.rule_q[i] if i < len(round_.rule_q) else None
    row["target_rank"] = target.rank[i]
    row["target_entropy"] = target.entropy[i]
    row["target_top_id"] = target.top_ids[i]
    row["target_top_p"] = target.top_probs[i]
    row["target_top_forbidden"] = _forbidden(round_, logits_row, target.top_ids[i])


def _forbidden(round_: Round, logits_row: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that the grammar forbids there; None without a grammar."""
    allowed = round_.allowed.get(logits_row)
    return None if allowed is None else [int(not allowed.holds(token)) for token in ids]
