"""What a verified batch or a decoded prompt part came to, as a row of the trace."""

from __future__ import annotations

import torch

from engine.batch import Span
from engine.decode.rollback import Undone
from engine.decode.round_facts import RoundFacts
from engine.decode.slot import Slot
from engine.decode.verify import Acceptance, TargetFacts, TargetRows
from engine.draft.drafter import Draft


def verified_facts(
    slot: Slot,
    span: Span,
    draft: Draft | None,
    acceptance: Acceptance,
    undone: Undone,
    n_emitted: int,
    logits: torch.Tensor,
) -> RoundFacts:
    """span: as it was decoded, filler included. acceptance: before a replay added to it.
    logits: [drafted + 1, n_vocab]."""
    width = len(span.tokens) - span.n_padding
    accepted, final, drafted = acceptance.tokens, undone.accepted, span.tokens[1:width]
    n_judged = min(len(drafted), len(accepted))
    # a replacement is chosen from the row that judged the token it replaces
    at = [*range(n_judged), len(accepted) - 1]
    asked = [*drafted[:n_judged], final[min(len(accepted), len(final)) - 1]]
    kinds = ["target" if draft is None else "replacement"]
    if draft is not None and len(accepted) > len(drafted):
        kinds = ["bonus"]
    if undone.extra is not None:
        at.append(len(logits))
        logits = torch.cat((logits, undone.extra))
        asked.append(final[-1])
        kinds.append("bonus")
    return RoundFacts(
        slot.seq_id,
        slot.index,
        span.pos0,
        span.pos0 + 1,
        width,
        draft,
        final[:n_emitted],
        len(final) - len(kinds),
        kinds,
        TargetRows(logits, asked, at),
        rollback_depth=width - len(accepted),
        memory_rollback=len(span.tokens) - len(accepted),
        rollback_path=undone.path,
        n_replays=undone.n_replays,
        rule_p=[*acceptance.judged_p, *undone.own_p],
        rule_q=acceptance.judged_q,
    )


def prompt_facts(
    slot: Slot, span: Span, first: Acceptance | None, logits: torch.Tensor | None
) -> RoundFacts:
    """first, logits [1, n_vocab]: the token behind the last part, None behind others."""
    n = len(span.tokens)
    tokens: list[int] = []
    rule_p: list[float] = []
    target: TargetFacts | TargetRows = TargetFacts([], [], [], [], [])
    if first is not None and logits is not None:
        tokens, rule_p = first.tokens, [first.own_p]
        target = TargetRows(logits, tokens, [0])
    return RoundFacts(
        slot.seq_id,
        slot.index,
        span.pos0,
        span.pos0 + n,
        n,
        None,
        tokens,
        None,
        ["target"] * len(tokens),
        target,
        rule_p=rule_p,
    )
