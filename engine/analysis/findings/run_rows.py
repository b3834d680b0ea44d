"""Rule definitions, the view of a run that rules read, and the divergence of lanes above noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engine.analysis.acceptance.counts import draft_counts
from engine.analysis.acceptance.shapes import shapes
from engine.analysis.noise_ceiling import rows_beyond, state_ceiling
from engine.analysis.verdict import failed_checks, is_beyond, noise_bound, types_text
from engine.trace.facts import AuditFacts, Finding, RunFacts, StateOriginFacts
from engine.trace.records import MISSING, NOISE, REFERENCE
from engine.trace.run_ref import RunColumns, comparison_of
from engine.trace.store import TraceStore

POLICY = "policy"
"""Kind of the lanes that verify drafts and roll back."""


def _table(name: str) -> cached_property[RunColumns]:
    """The run's rows of a table, as an attribute of ExaminedRun."""
    return cached_property(lambda run: RunColumns(run.trace, name, run.run_id))


class ExaminedRun:
    """One run. lane: its name in a comparison; kind: reference, noise or policy; both "" for a run
    on its own."""

    def __init__(self, trace: TraceStore, run_id: int) -> None:
        self.trace, self.run_id = trace, run_id
        self.facts = RunFacts(trace.runs[run_id])
        self.facts.requests = self.facts.requests  # read once: rules ask thousands of times
        self.lane, self.kind = self.facts.lane or "", lane_kind(self.facts)

    rounds, tokens, ubatches, memory, divergence = map(
        _table, ("rounds", "tokens", "ubatches", "memory", "divergence")
    )
    asked = _table("drafts")
    """Drafters that were asked for drafts."""
    states = _table("states")
    """Errors of states by layer."""

    @cached_property
    def is_later(self) -> np.ndarray:
        """Rows of `rounds` after the prompt of their sequence: bool [n]."""
        return ~self.rounds.is_prompt

    def option(self, *path: str) -> Any:
        """An effective option, such as option("spec", "n_min"); None if not recorded."""
        value: Any = self.facts.options
        for name in path:
            value = getattr(value, name, None)
        return value

    @cached_property
    def lanes(self) -> range:
        """The runs of the comparison that this run is a lane of."""
        return comparison_of(self.trace, self.run_id)

    @cached_property
    def noise_runs(self) -> list[int]:
        """Noise lanes of that comparison with this lane's reference."""
        mine = self.facts.lane_against
        return [
            i
            for i in self.lanes
            if lane_kind(facts := self.trace.runs[i]) == NOISE and facts.lane_against == mine
        ]

    @cached_property
    def bound(self) -> float | None:
        """NMSE explained by the noise lane, None without one."""
        return noise_bound(self.trace, self.noise_runs) if self.noise_runs else None

    @cached_property
    def state_ceiling(self) -> float:
        """Allowed relative error of a lane's state, infinite as long as its noise lanes are
        fine."""
        wrong = (ExaminedRun(self.trace, i).noise_is_wrong for i in self.noise_runs)
        return state_ceiling(self.facts.compute or "") if any(wrong) else math.inf

    @cached_property
    def noise_is_wrong(self) -> bool:
        """Whether this is a noise lane with more noise than rounding causes."""
        check = self.facts.noise_check
        return check is not None and bool(
            failed_checks(check)
            or rows_beyond(self.divergence["nmse"], check.ceiling, check.share).size
        )

    @cached_property
    def noise_of_states(self) -> float:
        """Largest error of a state or window in the noise lane where it comes from rounding: for
        llama.cpp, and for our states in a shorter type. 0 for our other lanes, whose noise is added
        on purpose and measured by its logits."""
        if "lane_margin" not in self.facts and not types_text(self.facts):
            return 0.0
        lanes = (ExaminedRun(self.trace, i).divergence for i in self.noise_runs)
        errors = (rows[name] for rows in lanes for name in ("state_error", "conv_error"))
        return max((float(np.nanmax(found, initial=0.0)) for found in errors), default=0.0)

    @property
    def audit(self) -> AuditFacts:
        """What the audit of the run found (engine.audit.run_audit)."""
        return self.facts.audit or AuditFacts()

    @cached_property
    def audited(self) -> list[dict[str, Any]]:
        """The audit's errors of sequences, from a possibly damaged file."""
        return [one for one in self.audit.wrong if _is_audited(one)]

    @cached_property
    def audit_notes(self) -> list[dict[str, Any]]:
        """The audit's errors of the sampler, likewise."""
        named = {"round": int, "seq_id": int, "what": str}
        return [note for note in self.audit.sampler if _has(note, named)]

    @cached_property
    def audited_drafts(self) -> list[dict[str, Any]]:
        """The audit's errors of drafts (engine.audit.drafts), likewise."""
        named = {"seq_id": int, "drafter": str, "what": str, "evidence": str}
        rows = [one for one in self.audit.drafts if _has(one, named)]
        return [one for one in rows if isinstance(one.get("round"), int | None)]

    @property
    def state_origins(self) -> list[StateOriginFacts]:
        """Explanations of the first wrong states of each sequence."""
        return self.facts.state_origins or []

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters, from options or another engine's server."""
        types = self.option("spec", "types") or self.facts.speculative_types or ()
        return [name for name in types if name != "none"]

    @cached_property
    def acceptance_shapes(self) -> list[Finding]:
        """Shapes found in the acceptance of its drafts, unless it was scripted."""
        is_given = self.facts.synthetic or self.facts.draft_accept is not None
        if is_given or (self.lane and not self.drafts):
            return []
        found = draft_counts(self.facts, self.rounds, self.is_later, self.drafters)
        return [shape for counts in found for shape in shapes(counts)]

    @cached_property
    def drafts(self) -> bool:
        """Whether its drafts are attributed to this run. Lanes share theirs: the first one answers
        for all; reference and noise lanes verify none."""
        if not self.lane:
            return bool(self.drafters)
        policy = (i for i in self.lanes if lane_kind(self.trace.runs[i]) == POLICY)
        return next(policy, None) == self.run_id


def _has(row: dict[str, Any], named: dict[str, type]) -> bool:
    return all(
        isinstance(row.get(name), (int, float) if kind is float else kind)
        for name, kind in named.items()
    )


_AUDITED: dict[str, dict[str, type]] = {
    "state": {"round": int, "layer": int, "name": str, "error": float},
    "cells": {"round": int, "n_cells": int},
    "logits": {"round": int, "pos": int, "error": float, "n_rows": int},
    "token": {"round": int, "pos": int, "expected_id": int},
}
"""What may be wrong in a sequence, and the required keys of its record."""


def _is_audited(one: dict[str, Any]) -> bool:
    if not _has(one, {"round": int, "seq_id": int, "what": str}) or one["what"] not in _AUDITED:
        return False
    cells = one.get("cells")
    if isinstance(cells, dict) and cells.get("n_cells") == 0:
        more = {"pos": int, "cache_layer": int, "kind": str, "n": int}
        if not _has(cells, more) or cells["kind"] not in ("k", "v"):
            return False
    return isinstance(one.get(one["what"]), dict) and all(
        name not in one or (isinstance(one[name], dict) and _has(one[name], named))
        for name, named in _AUDITED.items()
    )


def lane_kind(facts: RunFacts) -> str:
    """The kind of a lane, by its name in traces without kinds; "" for a run on its own."""
    lane = facts.lane or ""
    return facts.lane_kind or (lane if lane in ("", REFERENCE, NOISE) else POLICY)


def observed(values: np.ndarray) -> np.ndarray:
    """Which values of an integer column were observed (not MISSING): bool [n]."""
    return values != MISSING


def rounds_text(rounds: np.ndarray) -> str:
    """A list of round numbers [n] as short text for evidence."""
    first, last = int(rounds[0]), int(rounds[-1])
    if len(rounds) == 1:
        return f"round {first}"
    return f"{len(rounds)} rounds, the first {first}, the last {last}"


ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)
"""error: the output is not the target's. warning: it may be, or speculation has no effect, or
figures mislead. info: a cost or a setting to know about, or a harmless difference."""


class FoundRows:
    """Rows of one sequence that match a rule: their indices `at`; [NAME]: a column of the first of
    them."""

    def __init__(self, rows: RunColumns, seq: int, at: np.ndarray) -> None:
        self._rows, self.seq, self.at = rows, seq, at

    def __getitem__(self, name: str) -> Any:
        return self._rows[name][self.at[0]]

    def text(self, name: str) -> str:
        """A text column of the first of them."""
        return self._rows.texts(name, self.at[:1])[0]

    def hit(self, message: str, *evidence: str, counts: bool = True) -> Finding:
        """A finding in the round of the first; if counts, the evidence starts with all rounds."""
        rounds = rounds_text(self._rows["round"][self.at]) if counts else ""
        said = "; ".join(filter(None, (rounds, *evidence)))
        return Finding(message, said, int(self["round"]), self.seq)


def by_sequence(rows: RunColumns, chosen: np.ndarray) -> Iterator[FoundRows]:
    """The chosen rows (bool [n]) by sequence."""
    return (FoundRows(rows, seq, at) for seq, at in rows.by_sequence(chosen))


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
"""Places of a fault in the order of a round: a pass starts from a cache and gives logits, tokens
are sampled, and sampler and memory are left after the accepted ones. Acceptance is counted over all
rounds and suffers from any earlier fault."""
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
"""Parts affected by a fault in a part, from its round on."""


Check = Callable[[ExaminedRun], Iterator[Finding]]
"""Finds at most one hit per sequence of a run, from the run's rows only."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A known failure. means: what it is and where it comes from. part: place of the fault, a key
    of FOLLOWS; "" if it neither causes nor follows from other findings. The texts are in
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
    """Per row of `divergence`, bool [n]: logits above the bound, wrong S, wrong window. The last
    two are False where states were not compared. limit: relative error of a state explained by
    noise."""

    run: ExaminedRun
    logits_are_wrong: np.ndarray
    state_is_wrong: np.ndarray
    conv_is_wrong: np.ndarray
    limit: float

    @classmethod
    def of(cls, run: ExaminedRun) -> LaneErrors | None:
        """None for a run that is not a policy lane, or without a noise lane.

        The bound on states is the amplitude of the logits' bound, with a margin, because both
        derive from the same activations and states accumulate their errors; or the effect of noise
        on states, if that is larger. Wrong states are off by about 1.
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
        """The first row of a sequence with any error."""
        wrong = self.logits_are_wrong | self.state_is_wrong | self.conv_is_wrong
        rows = np.flatnonzero(wrong & (self.run.divergence["seq_id"] == seq))
        return int(rows[0]) if rows.size else None
