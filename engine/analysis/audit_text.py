"""What the audit of a run found, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FACT, GOING_ON = "audit", "going on"
"""Where the facts of a run have the result of its audit, and the verdict until there is one."""


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
    took = f" ({seconds:.1f} s)" if isinstance(seconds, int | float) else ""
    names = ("n_tokens", "n_text", "n_drawn", "n_rounds_sampled")
    counted = "{} of {} tokens against plain decoding, {} drawn again, states of {} rounds".format(
        *(audit.get(name) for name in names)
    )
    yield f"audit: {verdict}, {counted}{took}"
    reasons = audit.get("not_judged")
    for reason in reasons if isinstance(reasons, list) else ():
        yield f"  not judged: {reason}"
