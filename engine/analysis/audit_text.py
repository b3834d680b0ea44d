"""The result of a run's audit, in words."""

from __future__ import annotations

from collections.abc import Iterator

from engine.foreign_numbers import is_whole
from engine.trace.facts import AuditFacts, RunFacts

GOING_ON, NOT_AUDITED, STOPPED = "going on", "not audited", "stopped"
"""The verdict of an audit until there is one, where there is none, and where it was stopped before
it had one."""


def audit_goes_on(facts: RunFacts) -> bool:
    """Whether a run has all its tokens and is being compared with plain decoding."""
    return facts.audit is not None and facts.audit.verdict == GOING_ON


def audit_text(facts: RunFacts) -> Iterator[str]:
    """A line on the audit of a run with these facts, and one for each thing that it did not judge;
    nothing of a run without one."""
    audit = facts.audit
    if audit is None:
        return
    if audit.verdict == NOT_AUDITED:
        yield audit_sentence(facts)
        return
    took = "" if audit.seconds is None else f" ({audit.seconds:.1f} s)"
    yield (
        f"audit: {audit.verdict}, {audit.n_tokens} of {audit.n_text} tokens against plain "
        f"decoding, {audit.n_drawn} drawn again, states of {audit.n_rounds_sampled} rounds{took}"
    )
    for reason in audit.not_judged:
        yield f"  not judged: {reason}"


def audit_sentence(facts: RunFacts) -> str:
    """The result in a few words, empty for a run without an audit and while it goes on.

    Raises nothing for facts of an opened trace, whatever they are.
    """
    audit = facts.audit
    if audit is None:
        return ""
    verdict = audit.verdict
    why = audit.not_judged[0].rstrip(".") if audit.not_judged else ""
    if verdict == "differs":
        wrong = [*audit.wrong, *audit.sampler]
        rounds = [one["round"] for one in wrong if is_whole(one.get("round"))]
        return f"Audit: wrong from round {min(rounds):,}" if rounds else "Audit: wrong"
    if verdict == "agrees":
        return f"Audit: {_judged(audit)}{f'; not judged: {why}' if why else ''}"
    if verdict == STOPPED:
        return "Audit stopped"
    if verdict == NOT_AUDITED:
        return f"Not audited because {why}" if why else "Not audited"
    return f"Audit without a verdict: {why}" if why and verdict != GOING_ON else ""


def _judged(audit: AuditFacts) -> str:
    """What agreed: the text or a part of it, and the rounds whose states were compared."""
    n, n_text, n_rounds = audit.n_tokens or 0, audit.n_text or 0, audit.n_rounds_sampled or 0
    if not n:
        return "every token is drawn by the rule; there was no time to decode the text again"
    text = f"{n:,} of {n_text:,} tokens" if n < n_text else "text"
    rounds = f" and {n_rounds:,} round{'s' if n_rounds > 1 else ''}" if n_rounds else ""
    return f"{text}{rounds} equal to plain decoding"
