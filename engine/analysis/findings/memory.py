"""Memory rules: where memory ends after a round, its cells, its snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.run_rows import (
    Check,
    ExaminedRun,
    FoundRows,
    LaneErrors,
    by_sequence,
    observed,
    rounds_text,
)
from engine.options import MAX_REPLAYS
from engine.plain_text import counted
from engine.trace.facts import FailureFacts, Finding, HeldFacts
from engine.trace.run_ref import places_of, round_keys


def _position_gap(run: ExaminedRun) -> Iterator[Finding]:
    passes = run.ubatches
    gaps = np.flatnonzero(observed(passes["pos_gap"]) & (passes["pos_gap"] != 0))
    named: set[int | None] = set()
    for row, seq_ids in zip(gaps, passes.texts("seq_ids", gaps), strict=True):
        seq = int(seq_ids) if seq_ids.isdecimal() else None
        if seq in named:
            continue
        named.add(seq)
        gap = int(passes["pos_gap"][row])
        what = f"leaves out {gap} after" if gap > 0 else f"repeats {-gap} of"
        (purpose,) = passes.texts("purpose", np.array([row]))
        yield Finding(
            f"A {purpose} pass {what} the positions in memory.",
            f"ubatch {passes['ubatch'][row]} of sequences {seq_ids}; "
            f"{rounds_text(passes['round'][gaps])}",
            int(passes["round"][row]),
            seq,
        )


def _ends(run: ExaminedRun) -> tuple[np.ndarray, np.ndarray]:
    """Positions by which attention cells and recurrent state extend beyond the last accepted token
    of a round: int [n] each. 0 if unknown; if only one part exists, both are its."""
    rounds = run.rounds
    columns = [rounds[f"{part}_pos_max"] for part in ("attention", "recurrent")]
    if all(column.max(initial=-1) < 0 for column in columns):
        return np.zeros(rounds.n, np.int64), np.zeros(rounds.n, np.int64)
    own = np.maximum(rounds["num_target_tokens"], 1)
    end = rounds["pos0"] + rounds["num_accepted_draft_tokens"] + own - 1
    judged = run.is_later & observed(rounds["num_accepted_draft_tokens"])
    judged &= observed(rounds["num_target_tokens"]) & observed(rounds["pos0"])
    judged &= ~rounds.is_text("rollback_path", "", "refused")
    # deeper rollbacks than the batch were not made by a round
    judged &= rounds["rollback_depth"] <= rounds["verify_width"]
    known = [judged & observed(column) & (column >= 0) for column in columns]
    cells, state = (
        np.where(mine, column - end, 0) for mine, column in zip(known, columns, strict=True)
    )
    return np.where(known[0], cells, state), np.where(known[1], state, cells)


def _recurrent_alone(run: ExaminedRun) -> np.ndarray:
    """Rounds after which the recurrent state ends at the wrong place and the cells do not."""
    cells, state = _ends(run)
    return (cells == 0) & (state != 0)


def _rollback_end(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    cells, state = _ends(run)
    for one in by_sequence(rounds, (cells == state) & (cells != 0)):
        n = int(cells[one.at[0]])
        kept = "keeps {} beyond" if n > 0 else "takes {} too many:"
        yield one.hit(
            f"The rollback {kept.format(counted(abs(n), 'token'))} the last accepted one.",
            f"pass of {one['verify_width']} from "
            f"position {one['pos0']}, {one['num_accepted_draft_tokens']} "
            f"accepted; memory ends at {one['attention_pos_max']}, rollback path "
            f"{one.text('rollback_path')}",
        )


def _recurrent_position(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    _, state = _ends(run)
    for one in by_sequence(rounds, _recurrent_alone(run)):
        n = int(state[one.at[0]])
        yield one.hit(
            f"The recurrent memory's position is {abs(n)} {'above' if n > 0 else 'below'} that of "
            "the accepted tokens, the KV cells' is right.",
            f"recurrent position {one['recurrent_pos_max']}, attention "
            f"{one['attention_pos_max']}, rollback path {one.text('rollback_path')}",
        )


def _cache_mismatch(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for one in by_sequence(rounds, rounds["cache_wrong"] > 0):
        yield one.hit(
            f"{one['cache_wrong']} of the prompt tokens reused from the cache differ in memory.",
            f"the prompt continues at position {one['pos0']}",
            counts=False,
        )


_MIN_STEPS = 8
_RISE = 0.05


def _duplicate_kv_cells(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for one in by_sequence(rounds, rounds["kv_cells_duplicate"] > 0):
        surplus = rounds["kv_cells_duplicate"][one.at]
        yield one.hit(
            f"There are up to {surplus.max()} KV cells in addition to one per position.",
            f"{surplus[0]} at first, after the rollback path {one.text('rollback_path')}; "
            f"{rounds['kv_cells_used'][one.at[-1]]} cells used at the end",
        )


def _missing_kv_cells(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    used, duplicate = rounds["kv_cells_used"], rounds["kv_cells_duplicate"]
    last = np.maximum(rounds["attention_pos_max"], rounds["recurrent_pos_max"])
    known = observed(used) & observed(duplicate) & observed(rounds["attention_pos_max"])
    lacking = last + 1 + duplicate - used
    # a position counted only by the recurrent memory has no cell and needs none
    known &= ~_recurrent_alone(run)
    for one in by_sequence(rounds, known & (lacking > 0)):
        yield one.hit(
            f"There are no KV cells for {lacking[one.at[0]]} of {last[one.at[0]] + 1} positions.",
            f"{one['kv_cells_used']} cells used up to position "
            f"{one['attention_pos_max']}, rollback path {one.text('rollback_path')}",
        )


def _attention_ahead(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    attention, recurrent = rounds["attention_pos_max"], rounds["recurrent_pos_max"]
    both = observed(attention) & observed(recurrent)
    # together with duplicates it is the same fault, reported under its own name
    alone = both & (attention > recurrent) & ~(rounds["kv_cells_duplicate"] > 0)
    alone &= ~_recurrent_alone(run)
    for one in by_sequence(rounds, alone):
        ahead = (attention - recurrent)[one.at].max()
        yield one.hit(
            f"KV cells are {ahead} positions ahead of the recurrent state.",
            f"attention at {one['attention_pos_max']}, recurrent state at "
            f"{one['recurrent_pos_max']}",
        )


def _acceptance_rises(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    if run.lane or not rounds.has_values("kv_cells_duplicate"):
        return  # lanes are given their accepted tokens
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
            yield Finding(
                f"Acceptance rose from {early:.2f} to {late:.2f} while duplicate cells grew to "
                f"{surplus[-1]}.",
                f"{len(rows)} drafts, halves compared; {surplus[half - 1]} duplicates in the "
                f"middle, {surplus[-1]} at the end",
                int(rounds["round"][first]),
                seq,
            )


_MIN_REPLAYS, _MANY_REPLAYS = 3, 0.25


def _partial(run: ExaminedRun) -> np.ndarray:
    """Rows of `rounds` whose rollback moved an index only: bool [n]."""
    return run.rounds.is_text("rollback_path", "seq_rm") & (run.rounds["memory_rollback"] > 0)


def _wrong_index(run: ExaminedRun) -> np.ndarray:
    """Rows after which the pending index differs from the tokens undone: bool [n]."""
    rounds = run.rounds
    index, undone = rounds["rs_idx_after"], rounds["memory_rollback"]
    moves_none = rounds.is_text("rollback_path", "none") & (undone == 0)
    return (_partial(run) | moves_none) & observed(index) & (index != undone)


def _not_consumed(run: ExaminedRun) -> np.ndarray:
    """Rows after which the index pending before the pass is still pending: bool [n]."""
    before, rounds = run.rounds["rs_idx_before"], run.rounds
    later = rounds["rs_idx_after"] - rounds["memory_rollback"] == before
    return _wrong_index(run) & (before > 0) & later


def _pending_not_consumed(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for one in by_sequence(rounds, _not_consumed(run)):
        yield one.hit(
            f"The pass read the state of {counted(one['rs_idx_before'], 'token')} ago, but that "
            "rollback is still pending after it.",
            f"{counted(one['memory_rollback'], 'token')} undone, {one['rs_idx_after']} pending",
            _state_error(run, one),
        )


def _plane_off_by_one(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for one in by_sequence(rounds, _wrong_index(run) & ~_not_consumed(run)):
        yield one.hit(
            f"After a rollback of {counted(one['memory_rollback'], 'token')} the next batch "
            f"reads the state of {counted(one['rs_idx_after'], 'token')} ago.",
            _state_error(run, one),
        )


def _stale_plane(run: ExaminedRun) -> Iterator[Finding]:
    rounds, memory = run.rounds, run.memory
    pending = np.flatnonzero(memory.is_text("state", "pending"))
    if not pending.size:
        return
    at = places_of(round_keys(memory)[pending], round_keys(rounds))
    age, depth = memory["age"][pending][at], rounds["memory_rollback"]
    stale = _partial(run) & ~_wrong_index(run) & (at >= 0) & (age != depth)
    for one in by_sequence(rounds, stale):
        whose = "of rejected tokens or another sequence"
        if observed(age[one.at[0]]):
            whose = f"of {counted(age[one.at[0]], 'token')} ago"
        yield one.hit(
            f"A rollback of {counted(one['memory_rollback'], 'token')} was accepted, but its plane "
            f"holds a state {whose}.",
            f"verify width {one['verify_width']}, n_rs_seq {one['n_rs_seq']}",
            _state_error(run, one),
        )


def _depth_beyond_truth(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    depth, valid = rounds["memory_rollback"], rounds["valid_depth"]
    for one in by_sequence(rounds, _partial(run) & observed(valid) & (depth > valid)):
        yield one.hit(
            f"A rollback of {counted(one['memory_rollback'], 'token')} was accepted, but the "
            f"valid depth is {one['valid_depth']}.",
            _state_error(run, one),
        )


def _conv_not_rolled_back(run: ExaminedRun) -> Iterator[Finding]:
    errors = LaneErrors.of(run)
    if errors is None:
        return
    rows = run.divergence
    known = ~np.isnan(rows["conv_error"])
    undone = round_keys(run.rounds)[run.rounds["memory_rollback"] > 0]
    wrong = known & errors.conv_is_wrong & ~errors.state_is_wrong
    wrong &= np.isin(round_keys(rows), undone)
    # in a model with windows only, these are wrong in any case
    named = [hit for check in (_plane_off_by_one, _stale_plane) for hit in check(run)]
    for one in by_sequence(rows, wrong):
        number = one["round"]
        before = (rows["seq_id"] == one.seq) & (rows["round"] <= number)
        if (rows["cells_differ"][before] > 0).any():
            continue
        if any(hit.seq_id == one.seq and (hit.round or 0) <= number for hit in named):
            continue
        origins = [r for r in run.state_origins if (r.seq_id, r.round) == (one.seq, number)]
        if origins and all(r.kind != "rejected" or r.pos not in r.holds for r in origins):
            continue  # of other tokens, or written wrong: there is no right one to read
        has_state = not np.isnan(one["state_error"])
        # everything computed later from a wrong window is wrong too
        if errors.first_wrong(one.seq) == one.at[0]:
            yield one.hit(
                "The convolution window is wrong after a rollback that left the state right."
                if has_state
                else "The window is wrong after a rollback.",
                f"relative error {one['conv_error']:.2g} of the window"
                + (f", {one['state_error']:.2g} of the state; " if has_state else "; ")
                + rounds_text(rows["round"][one.at]),
                counts=False,
            )


def _replay_disagrees(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(rounds["replay_index"] > 0):
        twice = rows[rounds["replay_index"][rows] > 1]
        if len(twice) < _MIN_REPLAYS or len(twice) < _MANY_REPLAYS * len(rows):
            continue
        yield FoundRows(rounds, seq, twice).hit(
            f"{len(twice)} of {len(rows)} replays chose other tokens than were accepted.",
            f"up to {rounds['replay_index'][twice].max()} restores in a round",
        )


def _replay_livelock(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    for one in by_sequence(rounds, rounds["replay_index"] > MAX_REPLAYS):
        yield one.hit(
            f"Replaying the accepted tokens gave another result {MAX_REPLAYS} times.",
            f"position {one['pos0']}, {one['replay_index']} restores",
        )


def _state_error(run: ExaminedRun, one: FoundRows) -> str:
    """The state's error after the first row of rounds, in words; empty if no lane measured it."""
    rows = run.divergence
    here = (rows["round"] == one["round"]) & (rows["seq_id"] == one.seq)
    errors = rows["state_error"][here & ~np.isnan(rows["state_error"])]
    return f"relative error of the state {errors[-1]:.2g}" if errors.size else ""


_REFUSED, _FULL = "RollbackRefusedError", "ContextFullError"


def _depth_not_kept(run: ExaminedRun) -> Iterator[Finding]:
    for failure in _failures(run, _REFUSED):
        for row in failure.sequences:
            if not row.pending and row.valid_depth is not None:
                yield _hit(failure, row, "A rollback was refused that the policy had guaranteed.")


def _depth_beyond(run: ExaminedRun) -> Iterator[Finding]:
    if failure := run.facts.failure:
        for row in filter(_is_too_deep, failure.sequences):
            said = f"A rollback of {row.pending} is pending, but the most is {row.n_rs_seq}."
            yield _hit(failure, row, said)


def _is_too_deep(row: HeldFacts) -> bool:
    return (row.pending or 0) > (row.n_rs_seq or 0)


def _pending_at_refusal(run: ExaminedRun) -> Iterator[Finding]:
    for failure in _failures(run, _REFUSED):
        for row in failure.sequences:
            if row.pending and not _is_too_deep(row):
                said = f"A rollback was refused because one of {row.pending} is still pending."
                yield _hit(failure, row, said)


def _cells_left(run: ExaminedRun) -> Iterator[Finding]:
    most_new = int(run.option("spec", "n_max") or 0) + 1  # allowed in that one round
    for failure in _failures(run, _FULL):
        for row in failure.sequences:
            surplus = row.cells - row.n_tokens
            if row.duplicates or surplus > most_new:
                said = f"The context is full, with {surplus} cells that do not belong to the text."
                yield _hit(failure, row, said)


def _engine_failed(run: ExaminedRun) -> Iterator[Finding]:
    failure = run.facts.failure
    if failure is None or failure.type in (_REFUSED, _FULL):
        return
    if any(map(_is_too_deep, failure.sequences)):
        return
    broken = [row for row in failure.sequences if _broken(row)]
    said = f"{failure.type} in {failure.place}"
    for row in broken[:1]:
        yield _hit(failure, row, f"{said}; before it {_broken(row)[0]}.")
    if not broken:
        yield Finding(f"{said}: {failure.message[:200]}", _evidence(None), round=failure.round)


def _hit(failure: FailureFacts, row: HeldFacts, said: str) -> Finding:
    evidence = f"{failure.type}: {failure.message[:200]}; {_evidence(row)}"
    return Finding(said, evidence, failure.round, row.seq_id)


def _broken(row: HeldFacts) -> list[str]:
    """The invariants that a sequence's memory violates."""
    found = []
    attention = row.attention_pos
    recurrent = attention if row.recurrent_pos is None else row.recurrent_pos
    if attention != recurrent:
        found.append(f"attention ended at position {attention}, recurrent states at {recurrent}")
    if row.duplicates:
        found.append(f"there were {row.duplicates} duplicate KV cells")
    if min(attention, recurrent) < row.n_tokens - 1:
        found.append(f"memory ended at {min(attention, recurrent)}, the text at {row.n_tokens - 1}")
    found += [
        f"{name} held {n} tokens of a text of {row.n_tokens + 1}"
        for name, n in row.drafters.items()
        if n > row.n_tokens + 1
    ]
    return found


def _evidence(row: HeldFacts | None) -> str:
    if row is None:
        return "no invariant of memory is broken"
    names = ("attention_pos", "recurrent_pos", "pending", "valid_depth", "cells", "n_tokens")
    known = {name: getattr(row, name) for name in names}
    held = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return "; ".join([held, *_broken(row)])


def _failures(run: ExaminedRun, type: str) -> Iterator[FailureFacts]:
    if run.facts.failure and run.facts.failure.type == type:
        yield run.facts.failure


NAMES_STATES: dict[str, Check] = {
    "rollback-end": _rollback_end,
    "recurrent-position": _recurrent_position,
    "position-gap": _position_gap,
    "cache-mismatch": _cache_mismatch,
    "duplicate-kv-cells": _duplicate_kv_cells,
    "missing-kv-cells": _missing_kv_cells,
    "attention-ahead": _attention_ahead,
    "stale-plane": _stale_plane,
    "depth-beyond-truth": _depth_beyond_truth,
    "pending-not-consumed": _pending_not_consumed,
    "plane-off-by-one": _plane_off_by_one,
    "conv-not-rolled-back": _conv_not_rolled_back,
    "replay-livelock": _replay_livelock,
}
"""Rules that explain a wrong state."""
CHECKS = NAMES_STATES | {
    "acceptance-rises-with-duplicates": _acceptance_rises,
    "replay-disagrees": _replay_disagrees,
    "rollback-still-pending": _pending_at_refusal,
    "depth-not-kept": _depth_not_kept,
    "rollback-beyond-snapshots": _depth_beyond,
    "cells-left-over": _cells_left,
    "engine-failed": _engine_failed,
}
