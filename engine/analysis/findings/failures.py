"""Rules about runs and lanes that an error ended: the invariant that was broken before it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.analysis.findings.rule import ERROR, MEMORY, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.trace.facts import FailureFacts, HeldFacts

_REFUSED, _FULL = "RollbackRefusedError", "ContextFullError"


def _depth_not_kept(run: ExaminedRun) -> Iterator[RuleHit]:
    for failure in _failures(run, _REFUSED):
        for row in failure.sequences:
            if not row.pending and row.valid_depth is not None:
                yield _hit(failure, row, "A rollback was refused that the policy had promised.")


def _depth_beyond(run: ExaminedRun) -> Iterator[RuleHit]:
    if failure := run.facts.failure:
        for row in filter(_is_too_deep, failure.sequences):
            said = f"A rollback of {row.pending} is pending, where {row.n_rs_seq} can be."
            yield _hit(failure, row, said)


def _is_too_deep(row: HeldFacts) -> bool:
    return (row.pending or 0) > (row.n_rs_seq or 0)


def _pending_at_refusal(run: ExaminedRun) -> Iterator[RuleHit]:
    for failure in _failures(run, _REFUSED):
        for row in failure.sequences:
            if row.pending and not _is_too_deep(row):
                said = f"A rollback was refused because one of {row.pending} is still pending."
                yield _hit(failure, row, said)


def _cells_left(run: ExaminedRun) -> Iterator[RuleHit]:
    for failure in _failures(run, _FULL):
        for row in failure.sequences:
            surplus = row.cells - row.n_tokens
            if row.duplicates or surplus > _most_new(run):
                said = f"The context is full, and holds {surplus} cells beyond the text."
                yield _hit(failure, row, said)


def _engine_failed(run: ExaminedRun) -> Iterator[RuleHit]:
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
        yield RuleHit(failure.round, None, f"{said}: {failure.message[:200]}", _evidence(None))


def _hit(failure: FailureFacts, row: HeldFacts, said: str) -> RuleHit:
    evidence = f"{failure.type}: {failure.message[:200]}; {_evidence(row)}"
    return RuleHit(failure.round, row.seq_id, said, evidence)


def _broken(row: HeldFacts) -> list[str]:
    """The invariants that a sequence's memory does not keep."""
    found = []
    attention = row.attention_pos
    recurrent = attention if row.recurrent_pos is None else row.recurrent_pos
    if attention != recurrent:
        found.append(f"attention ended at position {attention}, recurrent states at {recurrent}")
    if row.duplicates:
        found.append(f"attention held {row.duplicates} cells beyond one per position")
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
        return "memory keeps its invariants"
    names = ("attention_pos", "recurrent_pos", "pending", "valid_depth", "cells", "n_tokens")
    known = {name: getattr(row, name) for name in names}
    held = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return "; ".join([held, *_broken(row)])


def _failures(run: ExaminedRun, type: str) -> Iterator[FailureFacts]:
    if run.facts.failure and run.facts.failure.type == type:
        yield run.facts.failure


def _most_new(run: ExaminedRun) -> int:
    """Cells that one round may take beyond the text."""
    return int(run.option("spec", "n_max") or 0) + 1


RULES = (
    Rule(
        "rollback-still-pending",
        ERROR,
        "Rollback still pending",
        "A pass starts from the snapshot that the rollback before it chose, which is then done. "
        "Left pending it uses up the depth of the next one.",
        "Set the pending index to 0 when a pass is committed, and when a sequence ends.",
        _pending_at_refusal,
        MEMORY,
    ),
    Rule(
        "depth-not-kept",
        ERROR,
        "Promised depth not kept",
        "Before a batch the policy says how deep a rollback of it may be, and where that is not "
        "enough a checkpoint is taken. It then refused a rollback within its word.",
        "Let guaranteed_depth(n) never exceed valid_depth after a pass of n tokens, and undo only "
        "tokens of the batch.",
        _depth_not_kept,
        MEMORY,
    ),
    Rule(
        "rollback-beyond-snapshots",
        ERROR,
        "Rollback beyond the snapshots",
        "A rollback was accepted that is deeper than snapshots are kept at all; the index that it "
        "set is none of theirs.",
        "Bound rollbacks by min(tokens since the oldest snapshot, n_rs_seq), and let no promise go "
        "beyond n_rs_seq.",
        _depth_beyond,
        MEMORY,
    ),
    Rule(
        "cells-left-over",
        ERROR,
        "Attention cells left over",
        "Cells of rejected tokens, or of a sequence that ended, were never given back: the context "
        "is full before the text has its length.",
        "Remove cells wherever tokens are undone, restored or a sequence is forgotten.",
        _cells_left,
        MEMORY,
    ),
    Rule(
        "engine-failed",
        ERROR,
        "Error inside the engine",
        "An error that no part of the engine raises on purpose ended the run. What memory and "
        "drafters held then shows which invariant was broken before.",
        "Look at what set the position or the size named; it is wrong before the place of the "
        "error.",
        _engine_failed,
        MEMORY,
    ),
)
