"""What a rule is and what it finds; where a lane diverges by more than the noise explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.analysis.findings.run_rows import POLICY, ExaminedRun
from engine.analysis.verdict import is_beyond

ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)
"""error: the output is not the target's. warning: it may be, or speculation does nothing; figures
mislead. info: a cost or a setting to know about, or a difference that is not a fault."""


@dataclass(frozen=True, slots=True)
class RuleHit:
    """One sequence of a run, or a whole run (seq_id None), in which a rule's condition holds.

    round: the first offending one, None if it is the run as a whole. message: one sentence.
    evidence: the numbers after it. suggestion: in place of the rule's.
    """

    round: int | None
    seq_id: int | None
    message: str
    evidence: str
    suggestion: str = ""


CACHE, PASS, LOGITS, TOKENS, SAMPLER, MEMORY, DRAFTS, ACCEPTANCE = PARTS = (
    "cache",
    "pass",
    "logits",
    "tokens",
    "sampler",
    "memory",
    "drafts",
    "acceptance",
)
"""Where a fault may be, in the order of a round: a pass starts at a place and gives logits, tokens
are chosen, and the sampler and memory are left after those that were accepted. Acceptance is
counted over all rounds, and what is wrong anywhere before lowers it."""
_TEXT = (PASS, LOGITS, TOKENS, MEMORY, DRAFTS, ACCEPTANCE)
FOLLOWS: dict[str, tuple[str, ...]] = {
    CACHE: (CACHE, *_TEXT),
    PASS: _TEXT,
    LOGITS: _TEXT,
    SAMPLER: (SAMPLER, *_TEXT),
    TOKENS: (SAMPLER, *_TEXT),
    MEMORY: _TEXT,
    DRAFTS: (DRAFTS, ACCEPTANCE),
    ACCEPTANCE: (),
}
"""What a fault in a part goes on to spoil, from its round on."""


Check = Callable[[ExaminedRun], Iterator[RuleHit]]
"""At most one hit per sequence of a run; it reads the run's rows and nothing else."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A known failure. means: what it is and where it comes from. part: where the fault is, a key
    of FOLLOWS; "" for what neither causes other findings nor follows from them. The texts are in
    findings.toml."""

    id: str
    check: Check
    severity: str
    title: str
    means: str
    suggestion: str
    part: str = ""


_LEAST_STATE = 1e-4
"""Relative error of a state that rounding never reaches in float32."""
_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class LaneErrors:
    """Per row of `divergence`, bool [n]: logits beyond the bound, wrong S, wrong window. The
    last two are False where states were not compared. limit: relative error of a state that
    noise explains."""

    run: ExaminedRun
    logits_are_wrong: np.ndarray
    state_is_wrong: np.ndarray
    conv_is_wrong: np.ndarray
    limit: float

    @classmethod
    def of(cls, run: ExaminedRun) -> LaneErrors | None:
        """None for a run that is not a policy lane, or has no noise lane to be measured by.

        The bound on states is that of the logits as an amplitude, with some room: both are made
        of the same activations, and states collect their errors; or what noise does to states, if
        that is more. Wrong ones are off by about 1.
        """
        bound = run.bound
        if run.kind != POLICY or bound is None:
            return None
        rows = run.divergence
        limit = max(_LEAST_STATE, _MARGIN * max(float(np.sqrt(bound)), run.noise_of_states))
        limit = min(limit, run.state_ceiling)
        state, conv = (rows[name] > limit for name in ("state_error", "conv_error"))
        beyond = is_beyond(run.trace, run.run_id, rows["nmse"], bound)
        return cls(run, beyond, state, conv, limit)

    def first_wrong(self, seq: int) -> int | None:
        """The first row of a sequence in which anything is wrong."""
        wrong = self.logits_are_wrong | self.state_is_wrong | self.conv_is_wrong
        rows = np.flatnonzero(wrong & (self.run.divergence["seq_id"] == seq))
        return int(rows[0]) if rows.size else None
