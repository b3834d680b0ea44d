"""Rules about lanes whose sequences are copied and go on in turns (engine.compare.policy_lane)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.analysis.findings.rule import ERROR, MEMORY, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.trace.facts import CopyFacts


def _first_wrong(run: ExaminedRun) -> Iterator[tuple[int, CopyFacts]]:
    """Per sequence the first round that it or a copy got wrong, and what is noted of the first
    pass that did: one that started from a wrong state, so that its logits are wrong, too."""
    notes = run.facts.lane_copies
    errors = LaneErrors.of(run) if notes else None
    if errors is None or run.bound is None:
        return
    wrong = [
        note
        for note in notes or ()
        if _is_beyond(note.nmse, run.bound) or _is_beyond(note.state_error, errors.limit)
    ]
    for seq in sorted({note.seq_id for note in wrong}):
        mine = [note for note in wrong if note.seq_id == seq]
        if _is_beyond(mine[0].nmse, run.bound):
            yield min(note.round for note in mine), mine[0]


def _is_beyond(error: float | None, limit: float) -> bool:
    return error is None or error > limit


def _is_carried(note: CopyFacts) -> bool:
    return bool(note.again)


def _is_fork(note: CopyFacts) -> bool:
    first = note.source is not None and not note.n_verified and not note.n_idle
    return first and not _is_carried(note)


def _is_neighbour(note: CopyFacts) -> bool:
    other = _is_fork(note) or _is_carried(note)
    return not other and bool(note.n_idle or len(note.together) > 1)


def _hits(
    applies: Callable[[CopyFacts], bool], message: str
) -> Callable[[ExaminedRun], Iterator[RuleHit]]:
    def check(run: ExaminedRun) -> Iterator[RuleHit]:
        for since, note in _first_wrong(run):
            if applies(note):
                policy = run.option("rollback") or "unknown"
                yield RuleHit(since, note.seq_id, message, f"{_text(note)}; policy {policy}")

    return check


def _text(note: CopyFacts) -> str:
    nmse, state = (
        "not finite" if error is None else f"{error:.1e}" for error in (note.nmse, note.state_error)
    )
    whose = f"sequence {note.sequence}"
    if note.source is not None:
        whose += (
            f", a copy of {note.source} made in round {note.made_in} with "
            f"{note.pending} tokens pending"
        )
    idle = f", idle in {note.n_idle} passes before" if note.n_idle else ""
    beside = " ".join(map(str, note.together))
    return (
        f"{whose}: NMSE {nmse} in round {note.round}, verified in round "
        f"{note.verified_in} in a pass of sequences {beside}{idle}; state off by {state}"
    )


_fork_wrong = _hits(_is_fork, "A copy of the sequence goes on from another state than its source.")
_neighbour_wrong = _hits(
    _is_neighbour, "Decoding other sequences changes the state that this one goes on from."
)
_carried_wrong = _hits(
    _is_carried, "A state from before the last batch, kept through it, is another one."
)

RULES = (
    Rule(
        "fork-wrong",
        ERROR,
        "Copy of a sequence wrong",
        "The first pass of a copy (seq_cp) starts from another state. The copy shares the cells or "
        "slots of its source until one of them decodes: a slot that is not counted, a row that is "
        "read or written where the source's lies, or a pending rollback that is lost.",
        "Look at seq_cp and at the first pass after it: positions, pending rollback, reference "
        "counts, and which row is read when the copy moves to a place of its own.",
        _fork_wrong,
        MEMORY,
    ),
    Rule(
        "neighbour-state-wrong",
        ERROR,
        "State disturbed by other sequences",
        "The state was right when this sequence was last decoded. Then others were, or it was "
        "next to them in another order, and it goes on from another state: rows read by cell "
        "instead of by source after an exchange, an idle state moved from the wrong plane, or a "
        "pending rollback that a move did not consume.",
        "Look at how a pass places its sequences, which rows it reads, and what it does to the "
        "cells that lie between them.",
        _neighbour_wrong,
        MEMORY,
    ),
    Rule(
        "carried-state-wrong",
        ERROR,
        "Carried state wrong",
        "A rollback reached back beyond the last batch, to a state that was kept through it "
        "(carried planes, older slots of a ring or log), and that state is not the one of its "
        "position.",
        "Look at which planes a pass carries on while a rollback is pending: they start at the "
        "plane that is read, in the row that the state came from. In a ring, look whether another "
        "sequence has overwritten a slot that is still held.",
        _carried_wrong,
        MEMORY,
    ),
)
