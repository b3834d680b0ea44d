"""Rules about where a batch starts: after what memory holds, and after the same text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.rule import CACHE, ERROR, MEMORY, PASS, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, rounds_text


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
        what = f"leaves out {gap} after" if gap > 0 else f"repeats {-gap} of"
        (purpose,) = passes.texts("purpose", np.array([row]))
        yield RuleHit(
            int(passes["round"][row]),
            seq,
            f"A {purpose} pass {what} the positions that memory holds.",
            f"ubatch {passes['ubatch'][row]} of sequences {seq_ids}; "
            f"{rounds_text(passes['round'][gaps])}",
        )


def _ends(run: ExaminedRun) -> tuple[np.ndarray, np.ndarray]:
    """By how many positions attention cells and recurrent state end beyond the last accepted token
    of a round: int [n] each. 0 where that is not known; where only one part is, both are that."""
    rounds = run.rounds
    own = np.maximum(rounds["num_target_tokens"], 1)
    end = rounds["pos0"] + rounds["num_accepted_draft_tokens"] + own - 1
    judged = run.is_later & observed(rounds["num_accepted_draft_tokens"])
    judged &= observed(rounds["num_target_tokens"]) & observed(rounds["pos0"])
    judged &= ~rounds.is_text("rollback_path", "", "refused")
    # what goes back beyond its batch was not undone by a round
    judged &= rounds["rollback_depth"] <= rounds["verify_width"]
    columns = [rounds[f"{part}_pos_max"] for part in ("attention", "recurrent")]
    known = [judged & observed(column) & (column >= 0) for column in columns]
    cells, state = (
        np.where(mine, column - end, 0) for mine, column in zip(known, columns, strict=True)
    )
    return np.where(known[0], cells, state), np.where(known[1], state, cells)


def recurrent_alone(run: ExaminedRun) -> np.ndarray:
    """Rounds after which the recurrent state ends elsewhere, and cells where they should."""
    cells, state = _ends(run)
    return (cells == 0) & (state != 0)


def _rollback_end(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    cells, state = _ends(run)
    for seq, rows in rounds.by_sequence((cells == state) & (cells != 0)):
        first = rows[0]
        n = int(cells[first])
        kept = "keeps {} beyond" if n > 0 else "takes {} too many:"
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"The rollback {kept.format('1 token' if abs(n) == 1 else f'{abs(n)} tokens')} the "
            "last accepted one.",
            f"{rounds_text(rounds['round'][rows])}; pass of {rounds['verify_width'][first]} from "
            f"position {rounds['pos0'][first]}, {rounds['num_accepted_draft_tokens'][first]} "
            f"accepted; memory ends at {rounds['attention_pos_max'][first]}, rollback path "
            f"{rounds.texts('rollback_path', rows[:1])[0]}",
        )


def _recurrent_position(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    _, state = _ends(run)
    for seq, rows in rounds.by_sequence(recurrent_alone(run)):
        first = rows[0]
        n = int(state[first])
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"The recurrent memory counts {abs(n)} {'more' if n > 0 else 'fewer'} than the "
            "accepted tokens, and attention cells do not.",
            f"{rounds_text(rounds['round'][rows])}; recurrent position "
            f"{rounds['recurrent_pos_max'][first]}, attention "
            f"{rounds['attention_pos_max'][first]}, rollback path "
            f"{rounds.texts('rollback_path', rows[:1])[0]}",
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
        "rollback-end",
        ERROR,
        "Rolled back to the wrong position",
        "After a round memory has to end at the last accepted token: the newest one is decoded "
        "with the next batch. Here all parts of it end earlier or later.",
        "Keep the first token of the batch and the accepted drafts: remove from pos0 + accepted + "
        "1 on, and decode just these again after a restore.",
        _rollback_end,
        MEMORY,
    ),
    Rule(
        "recurrent-position",
        ERROR,
        "Recurrent position counted wrong",
        "The recurrent memory names another last position than attention cells and the accepted "
        "tokens have. The next rollback is then as far off.",
        "Set the position to p0 - 1 at a rollback, to the last token of a pass, and to that of the "
        "checkpoint at a restore.",
        _recurrent_position,
        MEMORY,
    ),
    Rule(
        "position-gap",
        ERROR,
        "Batch at the wrong position",
        "The first position of a batch has to follow the last one that attention cells and "
        "recurrent state hold. After a gap tokens are missing from the state, without one they "
        "are in it twice.",
        "Start at seq_pos_max + 1 after a rollback, a restore or a reused prompt.",
        _position_gap,
        PASS,
    ),
    Rule(
        "cache-mismatch",
        ERROR,
        "Prompt cache holds another text",
        "A prompt went on from a sequence whose tokens are not the prompt's: more was kept than "
        "both have in common.",
        "Cut the sequence to the common prefix, and decode the first token that differs.",
        _cache_mismatch,
        CACHE,
    ),
)
