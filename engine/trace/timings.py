"""Figures of a run, computed from its `rounds` table and nothing else.

Counting follows llama-server's rules:

- A *prompt row* is a sequence's first row: it holds the prompt's time and emits one token, the
  free one. A *step* is a later row that verified a draft of at least one token.
- A draft counts once, when it is fresh, with its length after trimming. A replay decodes
  accepted tokens again inside the same row: it adds neither drafted nor accepted tokens.
- Accepted tokens count when their verification is complete, before stop conditions are tested,
  so tokens that a stop drops from the output still count. Replacement and bonus tokens never do.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.trace.records import MISSING, PHASES
from engine.trace.store import Table, TraceStore

_MIN_MS = 1e-3  # a time that was too short for the clock


def timings(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, int | float]:
    """llama-server's `timings` object for one sequence, one run (seq_id None) or all runs.

    cache_n: prompt tokens that needed no processing. prompt_n, predicted_n: tokens processed
    and emitted. prompt_ms: forward passes over the prompt; where sequences shared them, each
    row carries its part. predicted_ms: from the end of the prompt row to the end of the last
    row; over several sequences, time in which any of them was generating. The first token of
    each sequence is free, so the rates of predicted tokens take one token less per sequence.
    Times in milliseconds; an unknown rate is 0. draft_n and draft_n_accepted are absent while
    nothing was drafted.
    """
    rows = _Rows.select(store.rounds, run_id, seq_id)
    runs, prompt_end = rows.run_id[rows.first], rows.t_ms[rows.first]
    prompt_n = _total(rows.verify_width[rows.first])
    prompt_ms = float(rows.prompt_ms.sum())
    predicted_n = _total(rows.num_emitted)
    predicted_ms = max(_covered(runs, prompt_end, rows.t_ms[rows.last]), _MIN_MS)
    timed_n = max(predicted_n - len(rows.first), 0)
    figures: dict[str, int | float] = {
        "cache_n": _total(rows.pos0[rows.first]),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / timed_n if timed_n else 0.0,
        "predicted_per_second": 1e3 * timed_n / predicted_ms,
    }
    drafted = _total(rows.num_drafted[rows.is_step])
    if drafted:
        figures["draft_n"] = drafted
        figures["draft_n_accepted"] = _total(rows.num_accepted[rows.is_step])
    return figures


def acceptance(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, Any]:
    """How drafts fared, over the steps of one sequence, one run or all runs.

    num_spec_steps; mean_acceptance_length = 1 + accepted / steps, the 1 being the replacement
    or bonus token; draft_acceptance_rate = accepted / drafted; acceptance_histogram[k] = steps
    with k accepted tokens; acceptance_per_position, three rates per index i in the draft:
    "unconditional" = accepted at i / steps, "unconditional_given_drafted" = accepted at i /
    steps that drafted more than i tokens, "conditional" = accepted at i / accepted at i - 1.
    A figure without a single observation is None.
    """
    rows = _Rows.select(store.rounds, run_id, seq_id)
    drafted = rows.num_drafted[rows.is_step]
    accepted = np.maximum(rows.num_accepted[rows.is_step], 0)  # a step cut short counts as 0
    steps = len(drafted)
    n_positions = int(drafted.max()) if steps else 0
    reached = [steps, *(int((accepted > i).sum()) for i in range(n_positions))]
    offered = [int((drafted > i).sum()) for i in range(n_positions)]
    n_accepted, n_drafted = int(accepted.sum()), int(drafted.sum())
    return {
        "num_spec_steps": steps,
        "mean_acceptance_length": 1 + n_accepted / steps if steps else None,
        "draft_acceptance_rate": _ratio(n_accepted, n_drafted),
        "acceptance_histogram": np.bincount(accepted, minlength=n_positions + 1).tolist()
        if steps
        else [],
        "acceptance_per_position": {
            "unconditional": [_ratio(n, steps) for n in reached[1:]],
            "unconditional_given_drafted": [
                _ratio(n, of) for n, of in zip(reached[1:], offered, strict=True)
            ],
            "conditional": [_ratio(n, of) for n, of in zip(reached[1:], reached[:-1], strict=True)],
        },
    }


def summary(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, Any]:
    """timings and acceptance in one object, with rollbacks and the time per phase.

    rollback_depth_histogram[d] = rounds after the prompt that undid d tokens. phase_ms: the sum
    of each phase's column after the prompt row, None for a phase that was never observed.
    drafters: counters of each drafter (engine.draft.chain), for a whole run only.
    """
    rows = _Rows.select(store.rounds, run_id, seq_id)
    later = rows.is_later
    depth = rows.rollback_depth[later]
    facts = store.runs.get(run_id, {}) if run_id is not None and seq_id is None else {}
    return {
        **timings(store, run_id, seq_id),
        **acceptance(store, run_id, seq_id),
        "rollback_depth_histogram": np.bincount(depth[depth >= 0]).tolist(),
        "phase_ms": {phase: _sum_observed(rows.phases[phase][later]) for phase in PHASES},
        "drafters": deepcopy(facts.get("drafters", {})),
    }


@dataclass(frozen=True, slots=True)
class _Rows:
    """The chosen rows of `rounds`, [n] each, in the order they were written.

    first, last: row indices of each sequence's first (prompt) and last row, sequences in the
    same order, with prompt_ms beside them: [n sequences].
    """

    run_id: np.ndarray
    t_ms: np.ndarray
    prompt_ms: np.ndarray
    pos0: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    rollback_depth: np.ndarray
    verify_width: np.ndarray
    phases: dict[str, np.ndarray]
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def select(cls, table: Table, run_id: int | None, seq_id: int | None) -> _Rows:
        n = len(table)  # the table may grow meanwhile
        chosen = np.ones(n, bool)
        if run_id is not None:
            chosen &= table.column("run_id", 0, n) == run_id
        if seq_id is not None:
            chosen &= table.column("seq_id", 0, n) == seq_id

        def pick(name: str) -> np.ndarray:
            return table.column(name, 0, n)[chosen]

        def milliseconds(name: str) -> np.ndarray:
            return np.nan_to_num(pick(name), posinf=0.0, neginf=0.0)

        runs = pick("run_id")
        sequences = (runs << 32) + pick("seq_id")
        first = np.unique(sequences, return_index=True)[1]
        last = len(runs) - 1 - np.unique(sequences[::-1], return_index=True)[1]
        return cls(
            run_id=runs,
            t_ms=milliseconds("t_ms"),
            prompt_ms=milliseconds("verify_ms")[first],
            pos0=pick("pos0"),
            num_drafted=pick("num_draft_tokens"),
            num_accepted=pick("num_accepted_draft_tokens"),
            num_emitted=pick("num_emitted"),
            rollback_depth=pick("rollback_depth"),
            verify_width=pick("verify_width"),
            phases={phase: pick(f"{phase}_ms") for phase in PHASES},
            first=first,
            last=last,
        )

    @property
    def is_later(self) -> np.ndarray:
        later = np.ones(len(self.run_id), bool)
        later[self.first] = False
        return later

    @property
    def is_step(self) -> np.ndarray:
        return (self.num_drafted > 0) & self.is_later


def _total(values: np.ndarray) -> int:
    return int(values[values != MISSING].sum())


def _sum_observed(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nansum(values))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _covered(runs: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of intervals, each run on its own clock, in the unit given."""
    total = 0.0
    for run in np.unique(runs).tolist():
        until = -np.inf
        for start, end in sorted(zip(starts[runs == run], ends[runs == run], strict=True)):
            total += max(0.0, float(end - max(start, until)))
            until = max(until, end)
    return total
