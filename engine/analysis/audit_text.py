"""The result of a run's audit, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.foreign_numbers import is_whole

FACT, GOING_ON, NOT_AUDITED, STOPPED = "audit", "going on", "not audited", "stopped"
"""Where the facts of a run have the result of its audit, and its verdict until there is one, where
there is none, and where it was stopped before it had one."""


def audit_goes_on(facts: Mapping[str, Any]) -> bool:
    """Whether a run has all its tokens and is being compared with plain decoding."""
    audit = facts.get(FACT)
    return isinstance(audit, dict) and audit.get("verdict") == GOING_ON


def audit_text(facts: Mapping[str, Any]) -> Iterator[str]:
    """A line on the audit of a run with these facts, and one for each thing that it did not judge;
    nothing of a run without one."""
    audit = facts.get(FACT)
    if not isinstance(audit, dict):
        return
    verdict, seconds = audit.get("verdict"), audit.get("seconds")
    if verdict == NOT_AUDITED:
        yield audit_sentence(facts)
        return
    took = f" ({seconds:.1f} s)" if isinstance(seconds, int | float) else ""
    names = ("n_tokens", "n_text", "n_drawn", "n_rounds_sampled")
    counted = "{} of {} tokens against plain decoding, {} drawn again, states of {} rounds".format(
        *(audit.get(name) for name in names)
    )
    yield f"audit: {verdict}, {counted}{took}"
    reasons = audit.get("not_judged")
    for reason in reasons if isinstance(reasons, list) else ():
        yield f"  not judged: {reason}"


def audit_sentence(facts: Mapping[str, Any]) -> str:
    """The result in a few words, empty for a run without an audit and while it goes on.

    Raises nothing for facts of an opened trace, whatever they are.
    """
    audit = facts.get(FACT)
    if not isinstance(audit, dict):
        return ""
    verdict, reasons = audit.get("verdict"), audit.get("not_judged")
    why = str(reasons[0]).rstrip(".") if isinstance(reasons, list) and reasons else ""
    if verdict == "differs":
        lists = [
            found for name in ("wrong", "sampler") if isinstance(found := audit.get(name), list)
        ]
        wrong = [one for found in lists for one in found if isinstance(one, dict)]
        rounds = [one["round"] for one in wrong if is_whole(one.get("round"))]
        return f"Audit: wrong from round {min(rounds):,}" if rounds else "Audit: wrong"
    if verdict == "agrees":
        return f"Audit: {_judged(audit)}{f'; not judged: {why}' if why else ''}"
    if verdict == STOPPED:
        return "Audit stopped"
    if verdict == NOT_AUDITED:
        return f"Not audited because {why}" if why else "Not audited"
    return f"Audit without a verdict: {why}" if why and verdict != GOING_ON else ""


def _judged(audit: Mapping[str, Any]) -> str:
    """What agreed: the text or a part of it, and the rounds whose states were compared."""
    names = ("n_tokens", "n_text", "n_rounds_sampled")
    n, n_text, n_rounds = (int(audit[name]) if is_whole(audit.get(name)) else 0 for name in names)
    if not n:
        return "every token is drawn by the rule; there was no time to decode the text again"
    text = f"{n:,} of {n_text:,} tokens" if n < n_text else "text"
    rounds = f" and {n_rounds:,} round{'s' if n_rounds > 1 else ''}" if n_rounds else ""
    return f"{text}{rounds} equal to plain decoding"
