"""State rules: wrong states by explanation, unexplained ones, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.analysis.findings.memory import NAMES_STATES
from engine.analysis.findings.run_rows import Check, ExaminedRun, LaneErrors, rounds_text
from engine.plain_text import counted
from engine.trace.facts import CopyFacts, Finding, StateOriginFacts
from engine.trace.run_ref import round_keys

_ROUNDING = 1e-2
"""Largest relative error of a state from rounding; different content is off by more."""
_SIZES = (("bf16", 4e-4, 3e-3), ("f16", 5e-5, 4e-4))
"""Relative cost of rounding all elements of a state to a type, decayed over some tokens."""


def _drift(run: ExaminedRun) -> Iterator[Finding]:
    errors = LaneErrors.of(run)
    if errors is None:
        return
    wrong = errors.state_is_wrong | errors.conv_is_wrong
    if not wrong.any():
        return
    named = {hit.seq_id for check in NAMES_STATES.values() for hit in check(run)}
    rows = run.divergence
    error = np.fmax(rows["state_error"], rows["conv_error"])
    rounds = run.rounds
    undone = round_keys(rounds)[rounds["memory_rollback"] > 0]
    for seq, chosen in rows.by_sequence(wrong):
        row = int(chosen[0])
        number, first = int(rows["round"][row]), float(error[row])
        measured = (rows["seq_id"] == seq) & ~np.isnan(error)
        behind = np.isin(round_keys(rows)[measured], undone)
        steps = np.diff(error[measured], prepend=0.0)
        with_rollback, without = float(steps[behind].sum()), float(steps[~behind].sum())
        is_here = bool(behind[rows["round"][measured] == number].any())
        if named & {seq, None} or first > _ROUNDING or not is_here or with_rollback <= without:
            continue
        layer = _first_layer_error(run, seq, number)
        type = next((t for t, low, high in _SIZES if low <= layer <= high), "")
        if not type:
            continue  # different content, however similar
        last = float(error[measured][-1])
        yield Finding(
            f"Rollbacks round the state: its error is {first:.1e} after that of round {number} "
            f"and {last:.1e} at the end.",
            f"the error grew by {with_rollback:.1e} in {int(behind.sum())} rounds with a rollback "
            f"and by {without:.1e} in {int((~behind).sum())} without; noise up to "
            f"{errors.limit:.1e}; {layer:.1e} in the first layer, as for rounding to {type}",
            number,
            seq,
        )


def _first_layer_error(run: ExaminedRun, seq: int, number: int) -> float:
    """The error of the first recurrent layer after a round, whose inputs are the reference's; 0 if
    not recorded."""
    states = run.states
    here = np.flatnonzero((states["round"] == number) & (states["seq_id"] == seq))
    found = [float(states[name][here[0]]) for name in ("state_error", "conv_error") if here.size]
    return next((error for error in found if not np.isnan(error)), 0.0)


def _first_wrong(run: ExaminedRun) -> Iterator[tuple[int, CopyFacts]]:
    """Per sequence the first round that it or a copy got wrong, and the record of the first wrong
    pass: one that started from a wrong state, so that its logits are wrong too."""
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


def _hits(applies: Callable[[CopyFacts], bool], message: str) -> Check:
    def check(run: ExaminedRun) -> Iterator[Finding]:
        for since, note in _first_wrong(run):
            if applies(note):
                policy = run.option("rollback") or "unknown"
                yield Finding(message, f"{_text(note)}; policy {policy}", since, note.seq_id)

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


_fork_wrong = _hits(
    _is_fork, "A copy of the sequence continues from another state than its source."
)
_neighbour_wrong = _hits(_is_neighbour, "Decoding other sequences changed the state of this one.")
_carried_wrong = _hits(
    _is_carried, "A state from before the last batch, carried through it, is wrong."
)


_NAMED = (*NAMES_STATES.values(), _drift, _fork_wrong, _neighbour_wrong, _carried_wrong)
_RESTORES = ("restore", "restore_depth")


@dataclass(frozen=True, slots=True)
class _WrongState:
    """The first wrong states of a sequence, after round `number`. what, where: which state and
    which layers, in words. records: explanations (engine.compare.state_origin), the one that covers
    most first. measured: further evidence. depth, path: of that round's rollback, 0 without one;
    since: the rollbacks so far in words."""

    run: ExaminedRun
    seq: int
    number: int
    what: str
    where: str
    measured: list[str]
    records: list[StateOriginFacts]
    depth: int
    path: str
    since: str

    @property
    def rule(self) -> str:
        """The rule that names it."""
        if not self.records:
            return "state-wrong"
        record = self.records[0]
        kind, holds, pos = record.kind, record.holds, record.pos
        if kind in ("earlier", "rejected", "ahead"):
            if pos in holds:
                if self.run.option("rollback") == "replay":
                    return "wrong-fold"
                return "wrong-snapshot-read" if holds[0] == pos else "wrong-snapshot-index"
            if all(one.is_window for one in self.records):
                return _WINDOW_BY_CONTENT.get(kind, _BY_CONTENT[kind])
            return _BY_CONTENT[kind]
        if kind.startswith("from ") and self._is_prompt:
            return "state-not-cleared"
        if kind == "from sequence":
            return "state-of-another-sequence"
        if kind.startswith("from "):
            restored = self.path in _RESTORES
            return "wrong-checkpoint-restored" if restored else "batch-from-wrong-state"
        if not kind and self.run.option("rollback") == "replay" and any(_known(holds[1:2])):
            return "log-entry-wrong"
        if not kind and record.is_window and _is_mixed(record):
            return "window-rows-wrong"
        return _BY_CONTENT.get(kind, "gates-of-another-token" if kind else "state-wrong")

    def hit(self) -> Finding:
        when = "the prompt" if self._is_prompt else f"round {self.number}"
        if self.depth:
            undone = counted(self.depth, "token")
            when = f"the rollback of {undone} by {self.path} in round {self.number}"
        policy = self.run.option("rollback") or "unknown"
        says = f": {self._explained(self.records[0])}" if self.records else ""
        return Finding(
            f"{self.what} wrong after {when}{says}; {self.where}, policy {policy}.",
            "; ".join([self.since, *map(self._snapshots, self.records[:1]), *self.measured]),
            self.number,
            self.seq,
        )

    @property
    def _is_prompt(self) -> bool:
        return any(record.is_prompt for record in self.records)

    def _explained(self, record: StateOriginFacts) -> str:
        n, pos, rows = record.number, record.pos, record.rows
        tensor = f"the {_NAMES.get(record.name, record.name)}"
        said = {
            "empty": "is zero, as for a sequence without tokens",
            "earlier": f"is that of position {pos - n}, {counted(n, 'token')} too old",
            "rejected": f"contains {n} rejected token{'s' * (n > 1)}",
            "ahead": "contains the token chosen next, which belongs to the next batch",
            "sequence": f"is that of {_sequence(n)}",
            "from sequence": f"was computed from a state of {_sequence(n)}",
            "layer": f"is that of layer {n}",
            "missing": f"does not contain the token at position {pos - n}",
            "twice": f"contains the token at position {pos - n} twice",
            "from nothing": "was computed from zero instead of the state before these tokens",
            "from earlier": f"was computed from a state {counted(n, 'token')} too old",
            "from rejected": f"was computed from a state with {n} rejected tokens",
        }.get(record.kind, "")
        if not said and record.kind:
            which, gate = record.kind.split()
            said = f"was computed {'with' if which == 'first' else 'without'} {gate}"
            said += " of the batch's first token for all of them" if which == "first" else ""
        if not said and rows is not None and _is_mixed(record):
            have = ", ".join("none" if row is None else str(row) for row in rows)
            should = ", ".join(str(pos - len(rows) + 1 + i) for i in range(len(rows)))
            said = f"has the rows of positions {have} instead of {should}"
        return f"{tensor} {said}" if said else "no state of the text explains it"

    def _snapshots(self, record: StateOriginFacts) -> str:
        """Compares storage: tells whether a read, an index or the content is wrong."""
        holds, pos = record.holds, record.pos
        if not holds:
            return "memory has no state of the sequence"
        have = ", ".join("?" if one is None else str(one) for one in holds)
        if holds[0] == pos:
            return f"snapshots hold positions {have}: the first one, which is to be read, is right"
        if pos in holds:
            return f"snapshots hold positions {have}: {pos} is there, but not the first"
        return f"snapshots hold positions {have}: {pos} was not written, or overwritten"


_NAMES = {"ngrams": "window of n-grams", "tokens": "window of tokens"}
_BY_CONTENT = {
    "empty": "state-empty",
    "earlier": "state-too-old",
    "rejected": "rejected-tokens-in-state",
    "ahead": "token-ahead-in-state",
    "sequence": "state-of-another-sequence",
    "layer": "state-of-another-layer",
    "missing": "token-missing-in-state",
    "twice": "token-twice-in-state",
}


_WINDOW_BY_CONTENT = {"earlier": "window-too-old", "rejected": "rejected-tokens-in-window"}


def _wrong_states(run: ExaminedRun, rule: str) -> Iterator[Finding]:
    """The first of each sequence, if this rule explains it and none about indices, cells or
    positions does."""
    errors = LaneErrors.of(run)
    found = _of_audit(run) if errors is None else _of_lane(run, errors)
    named: list[tuple[int | None, int]] | None = None
    for seq, number, what, where, measured in found:
        if named is None:
            named = [(hit.seq_id, hit.round or 0) for check in _NAMED for hit in check(run)]
        if any(whose in (seq, None) and since <= number for whose, since in named):
            continue
        mine = [r for r in run.state_origins if (r.seq_id, r.round) == (seq, number)]
        mine.sort(key=lambda r: (not r.kind and not _is_mixed(r), r.is_window))
        undone = _rollback(run, seq, number)
        one = _WrongState(run, seq, number, what, where, measured, mine, *undone)
        if one.rule == rule:
            yield one.hit()


_Found = tuple[int, int, str, str, list[str]]
"""Sequence and round of its first wrong state, with texts as in _WrongState."""


def _of_lane(run: ExaminedRun, errors: LaneErrors) -> Iterator[_Found]:
    rows = run.divergence
    for seq, chosen in rows.by_sequence(errors.state_is_wrong | errors.conv_is_wrong):
        row, number = chosen[0], int(rows["round"][chosen[0]])
        what, where = _first_layer(errors, seq, number)
        wrong = rows["round"][errors.logits_are_wrong & (rows["seq_id"] == seq)]
        sizes = _errors_text(rows["state_error"][row], rows["conv_error"][row])
        measured = [
            f"{sizes}, noise up to {errors.limit:.1e}",
            rounds_text(rows["round"][chosen]),
            f"logits wrong from round {wrong[0]} on" if wrong.size else "logits right",
        ]
        yield seq, number, what, where, measured


def _of_audit(run: ExaminedRun) -> Iterator[_Found]:
    for one in run.audited:
        state, logits = one.get("state"), one.get("logits")
        if state is not None and state["round"] <= one["round"]:
            what = _STATES.get(state["name"], "The state is")
            measured = [
                f"relative error {state['error']:.1e}",
                f"logits wrong from round {logits['round']} on" if logits else "logits right",
            ]
            where = f"first layer {state['layer']}"
            if "n_layers" in state:
                where += f", {state['n_layers']} of {state['n_recurrent']} recurrent layers"
            yield one["seq_id"], state["round"], what, where, measured


_STATES = {"conv": "The convolution window is", "tokens": "The token window is"}


def _is_mixed(record: StateOriginFacts) -> bool:
    """Whether most rows of a window belong to known tokens."""
    rows = record.rows
    return rows is not None and 2 * len(_known(rows)) > len(rows)


def _known(positions: list[int | None]) -> list[int]:
    return [one for one in positions if one is not None]


def _sequence(n: int) -> str:
    return f"sequence {n}" if n >= 0 else "the previous sequence of the slot"


def _errors_text(state: float, window: float) -> str:
    """Errors of the parts that a model has."""
    named = ("the state", state), ("the window", window)
    return ", ".join(f"error of {name} {x:.1e}" for name, x in named if not np.isnan(x))


def _first_layer(errors: LaneErrors, seq: int, number: int) -> tuple[str, str]:
    """What is wrong after round `number` of a sequence, and the first affected layer."""
    states = errors.run.states
    here = (states["round"] == number) & (states["seq_id"] == seq)
    state, window = (states[name] > errors.limit for name in ("state_error", "conv_error"))
    found = np.flatnonzero(here & (state | window))
    if not found.size:  # a trace without that table
        return "The state is", "layers not recorded"
    first = found[0]
    what = "State and window are" if state[first] and window[first] else "The state is"
    if not state[first]:
        what = "The convolution window is"
    n_layers = f"{found.size} of {int(here.sum())} recurrent layers"
    return what, f"first layer {states['layer'][first]}, {n_layers}"


def _rollback(run: ExaminedRun, seq: int, number: int) -> tuple[int, str, str]:
    """Tokens rolled back in that round and how, and the last two rollbacks so far, in words."""
    rounds = run.rounds
    mine = rounds["seq_id"] == seq
    undone = np.flatnonzero(mine & (rounds["memory_rollback"] > 0) & (rounds["round"] <= number))
    texts = [
        f"{rounds['memory_rollback'][row]} rolled back by {path} in round {rounds['round'][row]}"
        for row, path in zip(undone[-2:], rounds.texts("rollback_path", undone[-2:]), strict=True)
    ]
    is_here = bool(undone.size) and int(rounds["round"][undone[-1]]) == number
    depth = int(rounds["memory_rollback"][undone[-1]]) if is_here else 0
    path = rounds.texts("rollback_path", undone[-1:])[0] if is_here else ""
    if not is_here:
        texts.append("none undone here")
    return depth, path, ", before that ".join(reversed(texts))


CHECKS: dict[str, Check] = {
    "drift-with-rejections": _drift,
    "fork-wrong": _fork_wrong,
    "neighbour-state-wrong": _neighbour_wrong,
    "carried-state-wrong": _carried_wrong,
} | {
    rule: partial(_wrong_states, rule=rule)
    for rule in (
        *_BY_CONTENT.values(),
        *_WINDOW_BY_CONTENT.values(),
        "wrong-snapshot-read",
        "wrong-snapshot-index",
        "wrong-fold",
        "log-entry-wrong",
        "wrong-checkpoint-restored",
        "batch-from-wrong-state",
        "state-not-cleared",
        "gates-of-another-token",
        "window-rows-wrong",
        "state-wrong",
    )
}
