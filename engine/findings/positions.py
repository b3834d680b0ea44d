"""Rules about where a batch starts: behind what memory holds, and behind the same text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.findings.rule import ERROR, Rule, RuleHit
from engine.findings.run_rows import ExaminedRun, observed, rounds_text


def _position_gap(run: ExaminedRun) -> Iterator[RuleHit]:
    passes = run.ubatches
    gaps = np.flatnonzero(observed(passes["pos_gap"]) & (passes["pos_gap"] != 0))
    told: set[int | None] = set()
    for row, seq_ids in zip(gaps, passes.texts("seq_ids", gaps), strict=True):
        seq = int(seq_ids) if seq_ids.isdecimal() else None
        if seq in told:
            continue
        told.add(seq)
        gap = int(passes["pos_gap"][row])
        what = f"leaves out {gap} behind" if gap > 0 else f"repeats {-gap} of"
        (purpose,) = passes.texts("purpose", np.array([row]))
        yield RuleHit(
            int(passes["round"][row]),
            seq,
            f"A {purpose} pass {what} the positions that memory holds.",
            f"ubatch {passes['ubatch'][row]} of sequences {seq_ids}; "
            f"{rounds_text(passes['round'][gaps])}",
        )


def _cache_mismatch(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(rounds["cache_wrong"] > 0):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"{rounds['cache_wrong'][first]} of the prompt tokens taken from the cache are others "
            "in memory.",
            f"the prompt goes on at position {rounds['pos0'][first]}",
        )


RULES = (
    Rule(
        "position-gap",
        ERROR,
        "Batch at the wrong position",
        "The first position of a batch has to follow the last one that attention cells and "
        "recurrent state hold. Behind a gap tokens are missing from the state, without one they "
        "are in it twice.",
        "Start at seq_pos_max + 1 after a rollback, a restore or a reused prompt.",
        _position_gap,
    ),
    Rule(
        "cache-mismatch",
        ERROR,
        "Prompt cache holds another text",
        "A prompt went on from a sequence whose tokens are not the prompt's: more was kept than "
        "both have in common.",
        "Cut the sequence to the common prefix, and decode the first token that differs.",
        _cache_mismatch,
    ),
)
