"""Figures of a run, computed from its `rounds` table; `summary` also takes what another engine
reported.

Counting follows llama-server's rules:

- *Prompt rows* are a sequence's first row and later ones that decode more of the prompt; the
  last of them emits one token, the free one. A *step* is a later row that verified a draft of at
  least one token.
- A draft counts once, when it is fresh, with its length after trimming. A replay decodes
  accepted tokens again inside the same row: it adds neither drafted nor accepted tokens.
- Accepted tokens count when their verification is complete, before stop conditions are tested,
  so tokens that a stop removes from the output still count. Replacement and bonus tokens never
  do.

Figures under an earlier rule are given in addition, and their names say so.

StepSums grow row by row, for figures that follow a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, PHASES
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore


class StepSums:
    """Counts and milliseconds of a run's rows after the prompts.

    counts[d, a]: steps that drafted d >= 1 tokens of which a were accepted, int64 [K + 1, K + 1]
    with K the longest draft so far. widths: the verify widths seen, ascending; width_n, width_ms:
    rows and verify time of each. step_ms: time in steps by phase; plain_ms: by phase in the n_plain
    rows without a draft. n_untimed: rows without a verify time.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((1, 1), np.int64)
        self.widths: np.ndarray = np.zeros(0, np.int64)
        self.width_n: np.ndarray = np.zeros(0, np.int64)
        self.width_ms: np.ndarray = np.zeros(0)
        self.step_ms: dict[str, float] = {}
        self.plain_ms: dict[str, float] = {}
        self.step_tokens = 0
        self.n_plain = 0
        self.n_untimed = 0
        self._begun: set[int] = set()

    @property
    def n_steps(self) -> int:
        """Rows that verified a draft."""
        return int(self.counts.sum())

    def is_prompt(self, seq_ids: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Whether each of the rows that follow those added so far decodes a prompt, bool [n]."""
        prompt = drafted == MISSING
        ids, first = np.unique(seq_ids, return_index=True)
        for seq_id, row in zip(ids.tolist(), first.tolist(), strict=True):
            if seq_id not in self._begun:
                self._begun.add(seq_id)
                prompt[row] = True
        return prompt

    def add(
        self,
        seq_ids: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        widths: np.ndarray,
        phases: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Add the next rows of one run, [n] each; returns which of them are steps, bool [n].

        widths: verify_width. phases: milliseconds by phase, NaN where not observed.
        """
        later = ~self.is_prompt(seq_ids, drafted)
        # a row that sums up several rounds has no width and is neither
        steps = later & (drafted > 0) & (widths != MISSING)
        plain = later & (drafted <= 0)
        self.counts = _joint(self.counts, drafted[steps], accepted[steps])
        self.n_plain += int(plain.sum())
        known = later & (widths > 0) & np.isfinite(phases["verify"])
        self.n_untimed += int(later.sum() - known.sum())
        self._time(widths[known], phases["verify"][known])
        self.step_tokens += int(np.maximum(widths[steps], 0).sum())
        for sums, chosen in ((self.step_ms, steps), (self.plain_ms, plain)):
            for phase, values in phases.items():
                sums[phase] = sums.get(phase, 0.0) + float(np.nansum(values[chosen]))
        return steps

    def _time(self, widths: np.ndarray, ms: np.ndarray) -> None:
        """Add verify times, [n], by width."""
        every = np.concatenate([self.widths, widths])
        self.widths, at = np.unique(every, return_inverse=True)
        every_n = np.concatenate([self.width_n, np.ones(len(widths), np.int64)])
        every_ms = np.concatenate([self.width_ms, ms])
        self.width_n = np.bincount(at, every_n, len(self.widths)).astype(np.int64)
        self.width_ms = np.bincount(at, every_ms, len(self.widths))


def joint_counts(drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Steps by tokens drafted (rows) and accepted (columns), int64 [K + 1, K + 1]."""
    return _joint(np.zeros((1, 1), np.int64), drafted, accepted)


def per_position(counts: np.ndarray) -> dict[str, Any]:
    """Acceptance by index in the draft, from counts of `joint_counts`.

    num_draft_tokens_per_pos, num_accepted_tokens_per_pos: steps that drafted and accepted a token
    there; acceptance_per_position: the three rates of `engine.trace.timings.acceptance`.
    """
    by_drafted, by_accepted = counts.sum(1).tolist(), counts.sum(0).tolist()
    return rates_by_index(at_least(by_drafted), at_least(by_accepted), counts.diagonal().tolist())


def rates_by_index(
    offered: list[int], reached: list[int], whole: Sequence[int] = ()
) -> dict[str, Any]:
    """The same from the number of steps that drafted and accepted at least k tokens, k from 0.
    whole: steps that drafted k and accepted all; if unknown, every draft counts as long enough."""
    _, *offered = offered
    steps = reached[0]
    judged = [n - ended for n, ended in zip_longest(reached, whole, fillvalue=0)]
    return {
        "num_draft_tokens_per_pos": offered,
        "num_accepted_tokens_per_pos": reached[1:],
        "acceptance_per_position": {
            "unconditional": [n / steps if steps else None for n in reached[1:]],
            "unconditional_given_drafted": [
                n / of if of else None for n, of in zip(reached[1:], offered, strict=True)
            ],
            "conditional": [
                n / of if of else None for n, of in zip(reached[1:], judged, strict=False)
            ],
        },
    }


def at_least(n_of: Sequence[int]) -> list[int]:
    """Counts of k or more, from counts of exactly k, k from 0."""
    return list(accumulate(reversed(n_of)))[::-1]


def _joint(counts: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    accepted = np.clip(accepted, 0, drafted)  # a step cut short counts as 0
    size = max(len(counts), int(drafted.max(initial=0)) + 1)
    cells = np.bincount(drafted * size + accepted, minlength=size * size).reshape(size, size)
    cells[: len(counts), : len(counts)] += counts
    return cells


_COUNTS = ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted")
BY_STEP = (
    "num_spec_steps",
    "mean_acceptance_length",
    "acceptance_histogram",
    "num_draft_tokens_per_pos",
    "num_accepted_tokens_per_pos",
    "acceptance_per_position",
)


def with_told(
    figures: dict[str, Any], store: TraceStore, run_id: int, seq_id: int | None = None
) -> dict[str, Any]:
    """Figures of `engine.trace.timings.summary`, computed from rows, overridden by those reported
    in the run's facts; None is neither reported nor known.

    `told` of the run, and of a request in `requests`: figures by name. `told_timings`: the server's
    own counters by sequence, which are all that is known of sequences without rows.
    """
    facts = store.runs.get(run_id, RunFacts())
    known, reported = facts.told_timings or [], facts.told
    if seq_id is not None:
        known = known[seq_id : seq_id + 1]
        requests = facts.requests or ()
        reported = next((request.told for request in requests if seq_id in request.seq_ids), None)
    if not known:
        return figures | (reported or {})
    has_rows = set(RunColumns(store, "rounds", run_id)["seq_id"].tolist())
    rowless = [one for seq, one in enumerate(known, seq_id or 0) if seq not in has_rows]
    return _with_timings(figures, known, rowless)


def _with_timings(
    figures: dict[str, Any],
    timings: list[dict[str, Any] | None],
    rowless: list[dict[str, Any] | None],
) -> dict[str, Any]:
    """timings: of all sequences. rowless: of those without rows, whose counts are in no row."""
    known = [one for one in timings if one is not None]
    if not known:
        return figures
    found = dict(figures)
    for one in filter(None, rowless):
        for name in _COUNTS:
            found[name] = (found.get(name) or 0) + one[name]
    if any(one is None or one["draft_n"] for one in rowless):
        found |= dict.fromkeys(BY_STEP)
    if found.get("draft_n"):
        found["draft_acceptance_rate"] = found["draft_n_accepted"] / found["draft_n"]
    prompt_ms = found["prompt_ms"] = sum(one["prompt_ms"] for one in known)
    found |= speeds("prompt", prompt_ms, found["prompt_n"])
    if len(timings) == 1:
        found["predicted_ms"] = known[0]["predicted_ms"]
    elif rowless:  # when they were generated is unknown
        found["predicted_ms"] = 0.0
    # the first token belongs to the prompt
    n = found["predicted_n"]
    return found | answer_speeds(found["predicted_ms"], n, max(n - len(timings), 0))


def speeds(name: str, ms: float, n: int, of: str = "") -> dict[str, float]:
    """Milliseconds per token and tokens per second of n tokens; 0 = unknown. name: `prompt` or
    `predicted`; of: suffix of the figures' names."""
    return {
        f"{name}_per_token_ms{of}": ms / n if n else 0.0,
        f"{name}_per_second{of}": 1e3 * n / ms if ms else 0.0,
    }


def n_timed(ms: float, n: int, speed: float | None) -> int:
    """How many of a reply's n tokens the time covers: all if the server's own tokens per second
    imply that, as in some builds, else those after the first."""
    return n if speed is not None and speed * ms > 1e3 * (n - 0.5) else max(n - 1, 0)


def answer_speeds(ms: float, n: int, n_timed: int) -> dict[str, float]:
    """The same for a reply's n tokens, of which n_timed arrived in this time, and for all."""
    return speeds("predicted", ms, n_timed) | speeds("predicted", ms, n, "_n_gen")


_MIN_MS = 1e-3  # a time too short for the clock
_TIMES = ("t_ms", "verify_ms")


def timings(store: TraceStore, run_id: int, seq_id: int | None = None) -> dict[str, int | float]:
    """llama-server's `timings` object for one sequence, or one run (seq_id None).

    cache_n: prompt tokens that needed no processing. prompt_n, predicted_n: tokens processed and
    emitted. prompt_ms: forward passes over the prompt; if sequences shared them, each row has its
    part. predicted_ms: from the end of the last prompt row to the end of the last row; over several
    sequences, time in which any of them was generating. The first token of each sequence is free,
    so rates of predicted tokens omit one token per sequence; those ending in _n_gen include all, as
    in llama-server when the figures of #22400 were measured. Times in milliseconds; an unknown rate
    is 0. The draft figures are absent while nothing was drafted.

    draft_n_accepted_with_replayed counts as llama-server did while a verified replay of n tokens
    added n - 1: the correction, which the target had chosen itself, was in the replayed list and
    counted as an accepted token. So acceptance under checkpoints looked higher than under partial
    rollback (0.85 against 0.72 in #22400). That it was counted shows in `predicted_n - 1 ==
    accepted + steps`, which holds if every round drafts and nothing is dropped: with this figure
    under replayed checkpoints, with draft_n_accepted elsewhere.
    """
    return timings_of(RunColumns(store, "rounds", run_id, seq_id))


def timings_of(rows: RunColumns) -> dict[str, int | float]:
    """`timings` of selected rows."""
    first, prompt_end, last = rows.ends
    t_ms, verify_ms = (np.nan_to_num(rows[name], posinf=0.0, neginf=0.0) for name in _TIMES)
    emitted = rows["num_emitted"]
    prompt_n = _total(rows["verify_width"][rows.is_prompt])
    prompt_ms = float(verify_ms[rows.is_prompt].sum())
    predicted_n = _total(emitted)
    predicted_ms = max(_covered(t_ms[prompt_end], t_ms[last]), _MIN_MS)
    timed_n = max(predicted_n - _total(emitted[rows.is_prompt]), 0)
    figures: dict[str, int | float] = {
        "cache_n": _total(rows["pos0"][first]),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        **speeds("prompt", prompt_ms, prompt_n),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        **answer_speeds(predicted_ms, predicted_n, timed_n),
    }
    drafted = _total(rows["num_draft_tokens"][rows.is_step])
    if not t_ms.any():  # rows of another engine, without times
        figures |= {
            name: 0.0 for name in figures if name.startswith(("predicted_ms", "predicted_per"))
        }
    if drafted:
        figures["draft_n"] = drafted
        accepted = figures["draft_n_accepted"] = _total(
            rows["num_accepted_draft_tokens"][rows.is_step]
        )
        replayed = np.maximum(rows["num_target_tokens"][rows.is_step] - 1, 0)
        figures["draft_n_accepted_with_replayed"] = accepted + int(replayed.sum())
    return figures


def acceptance(store: TraceStore, run_id: int, seq_id: int | None = None) -> dict[str, Any]:
    """Acceptance of drafts, over the steps of one sequence, or of one run.

    Names are those of vLLM and AIPerf. num_spec_steps: verif_steps of llama-server;
    mean_acceptance_length = 1 + accepted / steps, the 1 being the replacement or bonus token;
    draft_acceptance_rate = accepted / drafted; acceptance_histogram[k] = steps with k accepted
    tokens. Per index i in the draft: num_draft_tokens_per_pos and num_accepted_tokens_per_pos count
    steps that drafted and accepted a token there; acceptance_per_position has three rates,
    "unconditional" = accepted at i / steps, "unconditional_given_drafted" = accepted at i / steps
    that drafted more than i tokens, "conditional" = accepted at i / steps that drafted more than i
    tokens and accepted those before i. per_step_drafted, per_step_accepted: one entry per step, as
    recorded. A figure without a single observation is None.
    """
    rows = RunColumns(store, "rounds", run_id, seq_id)
    drafted = rows["num_draft_tokens"][rows.is_step]
    # a step cut short counts as 0
    accepted = np.maximum(rows["num_accepted_draft_tokens"][rows.is_step], 0)
    counts = joint_counts(drafted, accepted)
    return {
        **acceptance_of(rows),
        "acceptance_histogram": counts.sum(0).tolist() if len(drafted) else [],
        **per_position(counts),
        "per_step_drafted": drafted.tolist(),
        "per_step_accepted": accepted.tolist(),
    }


def acceptance_of(rows: RunColumns) -> dict[str, Any]:
    """The single-number figures of `acceptance`, of selected rows."""
    drafted, accepted = rows["num_draft_tokens"], rows["num_accepted_draft_tokens"]
    steps, n_accepted = int(rows.is_step.sum()), _total(accepted[rows.is_step])
    n_drafted = _total(drafted[rows.has_draft])
    return {
        "num_spec_steps": steps,
        "mean_acceptance_length": 1 + n_accepted / steps if steps else None,
        "draft_acceptance_rate": _total(accepted[rows.has_draft]) / n_drafted
        if n_drafted
        else None,
    }


def summary(store: TraceStore, run_id: int, seq_id: int | None = None) -> dict[str, Any]:
    """timings and acceptance in one object, with rollbacks and the time per phase; without the
    lists per step, which grow with the run.

    rollback_depth_histogram[d] = rounds after the prompt that undid d drafted tokens. phase_ms: the
    sum of each phase's column after the prompt rows, None for a phase never observed. drafters:
    counters of each drafter (engine.draft.chain), for a whole run only. Figures reported by another
    engine take precedence over those of the rows (`with_told`); None = unknown.
    """
    rows = RunColumns(store, "rounds", run_id, seq_id)
    later = ~rows.is_prompt
    fared = acceptance(store, run_id, seq_id)
    for name in ("per_step_drafted", "per_step_accepted"):
        del fared[name]
    depth = rows["rollback_depth"][later]
    facts = store.runs.get(run_id) if seq_id is None else None
    figures = {
        **timings_of(rows),
        **fared,
        "rollback_depth_histogram": np.bincount(depth[depth >= 0]).tolist(),
        "phase_ms": {phase: _sum_observed(rows[f"{phase}_ms"][later]) for phase in PHASES},
        "drafters": deepcopy((facts.drafters if facts else None) or {}),
    }
    source = facts.source.engine if facts and facts.source else None
    if facts and source not in (None, "draftscope") and not facts.told_timings:
        figures |= dict.fromkeys(_unobserved(rows))
    return with_told(figures, store, run_id, seq_id)


def _total(values: np.ndarray) -> int:
    return int(values[values != MISSING].sum())


def _unobserved(rows: RunColumns) -> Iterator[str]:
    """Figures of `timings_of` that rows of another engine do not support."""
    if not len(rows["seq_id"]):
        return
    prompts, (first, *_) = rows.is_prompt, rows.ends
    has_width = (rows["verify_width"][prompts] != MISSING).any()
    is_timed = has_width and not np.isnan(rows["verify_ms"][prompts]).all()
    if (rows["pos0"][first] == MISSING).all():
        yield "cache_n"
    yield from () if has_width else ("prompt_n",)
    yield from () if is_timed else ("prompt_ms", *speeds("prompt", 0.0, 0))
    if not np.nan_to_num(rows["t_ms"]).any():
        yield from ("predicted_ms", *answer_speeds(0.0, 0, 0))


def _sum_observed(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nansum(values))


def _covered(starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of intervals, in their unit."""
    total, until = 0.0, -np.inf
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(0.0, float(end - max(start, until)))
        until = max(until, end)
    return total
