"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.findings.run_rows import RunRows

ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)
"""error: the output is not the target's. warning: it may be, or speculation does nothing; figures
mislead. info: a cost or a setting to know about, or a difference that is no fault."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One sequence of a run, or a whole run (seq_id None), in which a rule's condition holds.

    round: the first offending one, None if it is the run as a whole. message: one sentence.
    evidence: the numbers behind it.
    """

    round: int | None
    seq_id: int | None
    message: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A known failure. means: what it is and where it comes from. check: at most one hit per
    sequence of a run; it reads the run's rows and nothing else."""

    id: str
    severity: str
    title: str
    means: str
    suggestion: str
    check: Callable[[RunRows], Iterator[Hit]]
