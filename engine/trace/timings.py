"""Figures of a run, computed from its `rounds` table and nothing else.

Counting follows llama-server's rules:

- *Prompt rows* are a sequence's first row and those after it that decode more of the prompt; the
  last of them emits one token, the free one. A *step* is a later row that verified a draft of at
  least one token.
- A draft counts once, when it is fresh, with its length after trimming. A replay decodes
  accepted tokens again inside the same row: it adds neither drafted nor accepted tokens.
- Accepted tokens count when their verification is complete, before stop conditions are tested,
  so tokens that a stop drops from the output still count. Replacement and bonus tokens never do.

Figures under an earlier rule are next to today's and say so in their names.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np

from engine.trace.peer_figures import with_told
from engine.trace.records import MISSING, PHASES
from engine.trace.round_rows import RoundRows
from engine.trace.step_sums import joint_counts, per_position
from engine.trace.store import TraceStore

_MIN_MS = 1e-3  # a time that was too short for the clock


def timings(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, int | float]:
    """llama-server's `timings` object for one sequence, one run (seq_id None) or all runs.

    cache_n: prompt tokens that needed no processing. prompt_n, predicted_n: tokens processed
    and emitted. prompt_ms: forward passes over the prompt; where sequences shared them, each
    row carries its part. predicted_ms: from the end of the last prompt row to the end of the last
    row; over several sequences, time in which any of them was generating. The first token of
    each sequence is free, so the rates of predicted tokens take one token less per sequence;
    those ending in _n_gen take them all, as llama-server did when the figures of #22400 were
    measured. Times in milliseconds; an unknown rate is 0. The draft figures are absent while
    nothing was drafted.

    draft_n_accepted_with_replayed counts as llama-server did while a verified replay of n tokens
    added n - 1: the correction, which the target had chosen itself, came back inside the replayed
    list and passed for an accepted token. Acceptance under checkpoints looked higher than under
    partial rollback for that reason (0.85 against 0.72 in #22400). That it was counted shows in
    `predicted_n - 1 == accepted + steps`, which holds where every round drafts and nothing is
    dropped: with this figure under replayed checkpoints, with draft_n_accepted elsewhere.
    """
    return timings_of(RoundRows.select(store.rounds, run_id, seq_id))


def timings_of(rows: RoundRows) -> dict[str, int | float]:
    """`timings` of rows that have been selected already."""
    runs, prompt_end = rows.run_id[rows.first], rows.t_ms[rows.prompt_end]
    prompt_n = _total(rows.verify_width[rows.is_prompt])
    prompt_ms = float(rows.verify_ms[rows.is_prompt].sum())
    predicted_n = _total(rows.num_emitted)
    predicted_ms = max(_covered(runs, prompt_end, rows.t_ms[rows.last]), _MIN_MS)
    timed_n = max(predicted_n - _total(rows.num_emitted[rows.is_prompt]), 0)
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
        "predicted_per_token_ms_n_gen": predicted_ms / predicted_n if predicted_n else 0.0,
        "predicted_per_second_n_gen": 1e3 * predicted_n / predicted_ms,
    }
    drafted = _total(rows.num_drafted[rows.is_step])
    if not rows.t_ms.any():  # another engine's rows, without times
        figures |= {
            name: 0.0 for name in figures if name.startswith(("predicted_ms", "predicted_per"))
        }
    if drafted:
        figures["draft_n"] = drafted
        accepted = figures["draft_n_accepted"] = _total(rows.num_accepted[rows.is_step])
        replayed = np.maximum(rows.num_target[rows.is_step] - 1, 0)
        figures["draft_n_accepted_with_replayed"] = accepted + int(replayed.sum())
    return figures


def acceptance(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, Any]:
    """How drafts fared, over the steps of one sequence, one run or all runs.

    Names are those of vLLM and AIPerf. num_spec_steps: what llama-server calls verif_steps;
    mean_acceptance_length = 1 + accepted / steps, the 1 being the replacement or bonus token;
    draft_acceptance_rate = accepted / drafted; acceptance_histogram[k] = steps with k accepted
    tokens. Per index i in the draft: num_draft_tokens_per_pos and num_accepted_tokens_per_pos
    count steps that drafted and accepted a token there; acceptance_per_position has three rates,
    "unconditional" = accepted at i / steps, "unconditional_given_drafted" = accepted at i /
    steps that drafted more than i tokens, "conditional" = accepted at i / accepted at i - 1.
    per_step_drafted, per_step_accepted: one entry per step, as recorded. A figure without a
    single observation is None.
    """
    rows = RoundRows.select(store.rounds, run_id, seq_id)
    drafted = rows.num_drafted[rows.is_step]
    accepted = np.maximum(rows.num_accepted[rows.is_step], 0)  # a step cut short counts as 0
    counts = joint_counts(drafted, accepted)
    return {
        **acceptance_of(rows),
        "acceptance_histogram": counts.sum(0).tolist() if len(drafted) else [],
        **per_position(counts),
        "per_step_drafted": drafted.tolist(),
        "per_step_accepted": accepted.tolist(),
    }


def acceptance_of(rows: RoundRows) -> dict[str, Any]:
    """The figures of `acceptance` that are one number, of rows that have been selected already."""
    steps, n_accepted = int(rows.is_step.sum()), _total(rows.num_accepted[rows.is_step])
    n_drafted = _total(rows.num_drafted[rows.has_draft])
    n_confirmed = _total(rows.num_accepted[rows.has_draft])
    return {
        "num_spec_steps": steps,
        "mean_acceptance_length": 1 + n_accepted / steps if steps else None,
        "draft_acceptance_rate": n_confirmed / n_drafted if n_drafted else None,
    }


def summary(
    store: TraceStore, run_id: int | None = None, seq_id: int | None = None
) -> dict[str, Any]:
    """timings and acceptance in one object, with rollbacks and the time per phase; without the
    lists per step, which grow with the run.

    rollback_depth_histogram[d] = rounds after the prompt that undid d drafted tokens. phase_ms:
    the sum of each phase's column after the prompt rows, None for a phase never observed.
    drafters: counters of each drafter (engine.draft.chain), for a whole run only. What another
    engine gave of its run goes before what the rows say (`engine.trace.peer_figures`); None is not
    known.
    """
    rows = RoundRows.select(store.rounds, run_id, seq_id)
    later = ~rows.is_prompt
    fared = acceptance(store, run_id, seq_id)
    for name in ("per_step_drafted", "per_step_accepted"):
        del fared[name]
    depth = rows.rollback_depth[later]
    facts = store.runs.get(run_id) if run_id is not None and seq_id is None else None
    drafters = facts.drafters if facts is not None else None
    figures = {
        **timings(store, run_id, seq_id),
        **fared,
        "rollback_depth_histogram": np.bincount(depth[depth >= 0]).tolist(),
        "phase_ms": {phase: _sum_observed(rows.phases[phase][later]) for phase in PHASES},
        "drafters": deepcopy(drafters or {}),
    }
    return with_told(figures, store, run_id, seq_id)


def _total(values: np.ndarray) -> int:
    return int(values[values != MISSING].sum())


def _sum_observed(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nansum(values))


def _covered(runs: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of intervals, each run on its own clock, in the unit given."""
    total = 0.0
    for run in np.unique(runs).tolist():
        until = -np.inf
        for start, end in sorted(zip(starts[runs == run], ends[runs == run], strict=True)):
            total += max(0.0, float(end - max(start, until)))
            until = max(until, end)
    return total
