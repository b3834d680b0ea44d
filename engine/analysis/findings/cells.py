"""Rules about attention cells that a rollback left behind (llama.cpp #19493)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings import positions
from engine.analysis.findings.rule import DRAFTS, ERROR, MEMORY, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, rounds_text

_MIN_STEPS = 8
_RISE = 0.05


def _duplicate_kv_cells(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(rounds["kv_cells_duplicate"] > 0):
        surplus, path = rounds["kv_cells_duplicate"][rows], rounds.texts("rollback_path", rows[:1])
        yield RuleHit(
            int(rounds["round"][rows[0]]),
            seq,
            f"Attention holds up to {surplus.max()} cells beyond one per position.",
            f"{rounds_text(rounds['round'][rows])}; {surplus[0]} at first, after the rollback "
            f"path {path[0]}; {rounds['kv_cells_used'][rows[-1]]} cells used at the end",
        )


def _missing_kv_cells(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    used, duplicate = rounds["kv_cells_used"], rounds["kv_cells_duplicate"]
    last = np.maximum(rounds["attention_pos_max"], rounds["recurrent_pos_max"])
    known = observed(used) & observed(duplicate) & observed(rounds["attention_pos_max"])
    lacking = last + 1 + duplicate - used
    # a position that the recurrent memory alone counts has no cell, and needs none
    known &= ~positions.recurrent_alone(run)
    for seq, rows in rounds.by_sequence(known & (lacking > 0)):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"Attention lacks {lacking[first]} of {last[first] + 1} positions.",
            f"{rounds_text(rounds['round'][rows])}; {used[first]} cells used up to position "
            f"{rounds['attention_pos_max'][first]}, rollback path "
            f"{rounds.texts('rollback_path', rows[:1])[0]}",
        )


def _attention_ahead(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    attention, recurrent = rounds["attention_pos_max"], rounds["recurrent_pos_max"]
    both = observed(attention) & observed(recurrent)
    # next to duplicates it is the same fault, which has its own name
    alone = both & (attention > recurrent) & ~(rounds["kv_cells_duplicate"] > 0)
    alone &= ~positions.recurrent_alone(run)
    for seq, rows in rounds.by_sequence(alone):
        ahead = attention[rows] - recurrent[rows]
        yield RuleHit(
            int(rounds["round"][rows[0]]),
            seq,
            f"Attention cells reach {ahead.max()} positions beyond the recurrent state.",
            f"{rounds_text(rounds['round'][rows])}; attention at {attention[rows[0]]}, "
            f"recurrent state at {recurrent[rows[0]]}",
        )


def _acceptance_rises(run: ExaminedRun) -> Iterator[RuleHit]:
    if run.lane:
        return  # lanes are given their accepted tokens
    rounds = run.rounds
    drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
    for seq, rows in rounds.by_sequence(run.is_later & (drafted > 0) & observed(accepted)):
        surplus = rounds["kv_cells_duplicate"][rows]
        half = len(rows) // 2
        if half < _MIN_STEPS or surplus[-1] <= max(0, int(surplus[half - 1])):
            continue
        early, late = (
            float(accepted[part].sum() / drafted[part].sum()) for part in (rows[:half], rows[half:])
        )
        if late > early + _RISE:
            first = rows[np.argmax(surplus > 0)]
            yield RuleHit(
                int(rounds["round"][first]),
                seq,
                f"Acceptance rose from {early:.2f} to {late:.2f} while duplicate cells grew to "
                f"{surplus[-1]}.",
                f"{len(rows)} drafts, halves compared; {surplus[half - 1]} duplicates in the "
                f"middle, {surplus[-1]} at the end",
            )


RULES = (
    Rule(
        "duplicate-kv-cells",
        ERROR,
        "Duplicate KV cells",
        "A restore rewound the recurrent state and left attention cells above the checkpoint. "
        "Replaying their positions makes second cells, and keys of rejected tokens get weight.",
        "After a restore remove the cells above the checkpoint: seq_rm(seq, pos_max + 1, -1).",
        _duplicate_kv_cells,
        MEMORY,
    ),
    Rule(
        "missing-kv-cells",
        ERROR,
        "Missing KV cells",
        "Positions of the text have no attention cell: a removal took more than was rejected, or "
        "a batch was decoded without some of its tokens. Later tokens cannot attend to them.",
        "Remove cells from the first rejected position on: seq_rm(seq, p0, -1) with the position "
        "after the last accepted token.",
        _missing_kv_cells,
        MEMORY,
    ),
    Rule(
        "attention-ahead",
        ERROR,
        "Attention ahead of the recurrent state",
        "After a round both parts of a hybrid memory have to end at the same position; later "
        "attention cells become duplicates as soon as generation reaches them.",
        "Roll back both parts together, the recurrent one first because only it can refuse.",
        _attention_ahead,
        MEMORY,
    ),
    Rule(
        "acceptance-rises-with-duplicates",
        WARNING,
        "Acceptance rises with duplicates",
        "Ghost keys favour text that repeats, which drafts foresee well: a high acceptance rate "
        "is not evidence of a right state.",
        "Judge by the divergence from plain decoding, not by acceptance.",
        _acceptance_rises,
        DRAFTS,
    ),
)
