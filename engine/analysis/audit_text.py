"""What the audit of a run found, in words."""

from __future__ import annotations

from collections.abc import Iterator

from engine.trace.facts import RunFacts

GOING_ON = "going on"
"""Where the facts of a run have the result of its audit, and the verdict until there is one."""


def audit_goes_on(facts: RunFacts) -> bool:
    """Whether a run has all its tokens and is being compared with plain decoding."""
    return facts.audit is not None and facts.audit.verdict == GOING_ON


def audit_text(facts: RunFacts) -> Iterator[str]:
    """A line on the audit of a run with these facts, and one for each thing that it did not judge;
    nothing of a run without one."""
    audit = facts.audit
    if audit is None:
        return
    took = "" if audit.seconds is None else f" ({audit.seconds:.1f} s)"
    yield (
        f"audit: {audit.verdict}, {audit.n_tokens} of {audit.n_text} tokens against plain "
        f"decoding, {audit.n_drawn} drawn again, states of {audit.n_rounds_sampled} rounds{took}"
    )
    for reason in audit.not_judged:
        yield f"  not judged: {reason}"
