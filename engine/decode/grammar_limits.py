"""What a grammar does to drafts, and what is noted where it ends a sequence."""

from __future__ import annotations

from engine.decode.sequences import SlotAssignment
from engine.draft.drafter import Draft
from engine.sampling.distribution import Distribution
from engine.sampling.grammar import GrammarState
from engine.trace.facts import RunFacts

REASON = "grammar"
"""Why a draft ends, of engine.draft.spec.COMMON_REASONS, and why a sequence does."""


def cut_draft(slots: SlotAssignment, index: int, draft: Draft) -> None:
    """End the draft of the sequence in a slot before the first token that its grammar forbids."""
    grammar = slots.sequences[slots.holders[index]].sampler.grammar
    if grammar:
        cut_at_forbidden(draft, grammar)


def cut_at_forbidden(draft: Draft, grammar: GrammarState) -> None:
    """End a draft before the first token that the grammar forbids.

    Where tokens were drawn, a forbidden one is no draft at all, so what is drafted is distributed
    over the allowed ones: each q is divided among them.
    """
    if not draft.q:
        draft.cut(grammar.n_fitting(draft.tokens), REASON)
        return
    at = grammar.clone()
    for i, token in enumerate(draft.tokens):
        allowed = at.allowed()
        if at.error or not allowed.holds(token):
            draft.cut(i, REASON)
            return
        q = draft.q[i]
        kept = allowed.among(q.ids)
        draft.q[i] = Distribution.of_weights(q.ids[kept], q.probs[kept])
        at.accept(token)


def note_grammar_error(facts: RunFacts, round_: int, seq_id: int, pos: int, why: str) -> None:
    """Note under the fact `grammar_errors` why a sequence ended. pos: where a token is missing."""
    facts.add_to("grammar_errors", {"round": round_, "seq_id": seq_id, "pos": pos, "why": why})
