"""Rules for wrong states by what explains them, and for those that nothing explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.analysis.findings import drift, forks
from engine.analysis.findings.rule import ERROR, MEMORY, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, rounds_text
from engine.trace.facts import StateOriginFacts

_NAMED = (*drift.NAMED, *drift.RULES, *forks.RULES)
_RESTORES = ("restore", "restore_depth")


@dataclass(frozen=True, slots=True)
class _WrongState:
    """The first wrong states of a sequence, after round `number`. what, where: in words, which
    state and which layers. records: what explains them (engine.compare.state_origin), the one that
    explains most first. measured: further evidence. depth, path: of the rollback of that round, 0
    without one; since: the rollbacks up to there in words."""

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
            if record.is_window and len(self.records) == 1:
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

    def hit(self) -> RuleHit:
        when = "the prompt" if self._is_prompt else f"round {self.number}"
        if self.depth:
            when = f"the rollback of {_tokens(self.depth)} by {self.path} in round {self.number}"
        policy = self.run.option("rollback") or "unknown"
        says = f": {self._explained(self.records[0])}" if self.records else ""
        return RuleHit(
            self.number,
            self.seq,
            f"{self.what} wrong after {when}{says}; {self.where}, policy {policy}.",
            "; ".join([self.since, *map(self._snapshots, self.records[:1]), *self.measured]),
        )

    @property
    def _is_prompt(self) -> bool:
        return any(record.is_prompt for record in self.records)

    def _explained(self, record: StateOriginFacts) -> str:
        n, pos, rows = record.number, record.pos, record.rows
        tensor = f"the {_NAMES.get(record.name, record.name)}"
        said = {
            "empty": "is zero, as of a sequence without tokens",
            "earlier": f"is that of position {pos - n}, {_tokens(n)} too old",
            "rejected": f"contains {n} rejected token{'s' * (n > 1)}",
            "ahead": "contains the token chosen next, which comes with the next batch",
            "sequence": f"is that of {_sequence(n)}",
            "from sequence": f"was computed from a state of {_sequence(n)}",
            "layer": f"is that of layer {n}",
            "missing": f"lacks the token at position {pos - n}",
            "twice": f"contains the token at position {pos - n} twice",
            "from nothing": "was computed from zero instead of the state before these tokens",
            "from earlier": f"was computed from a state {_tokens(n)} too old",
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
        """What storage holds: says whether a read, an index or the content is wrong."""
        holds, pos = record.holds, record.pos
        if not holds:
            return "storage holds nothing of the sequence"
        have = ", ".join("?" if one is None else str(one) for one in holds)
        if holds[0] == pos:
            return f"snapshots hold positions {have}: the first, to be read, is right"
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


def _wrong_states(run: ExaminedRun) -> Iterator[_WrongState]:
    """The first of each sequence, unless a rule about indices, cells or positions names it."""
    errors = LaneErrors.of(run)
    found = _of_audit(run) if errors is None else _of_lane(run, errors)
    named: list[tuple[int | None, int]] | None = None
    for seq, number, what, where, measured in found:
        if named is None:
            named = [(hit.seq_id, hit.round or 0) for rule in _NAMED for hit in rule.check(run)]
        if any(whose in (seq, None) and since <= number for whose, since in named):
            continue
        mine = [r for r in run.state_origins if (r.seq_id, r.round) == (seq, number)]
        mine.sort(key=lambda r: (not r.kind and not _is_mixed(r), r.is_window))
        yield _WrongState(
            run, seq, number, what, where, measured, mine, *_rollback(run, seq, number)
        )


_Found = tuple[int, int, str, str, list[str]]
"""Sequence and round of its first wrong state, and the words for it, as _WrongState has them."""


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


def _named(rule: str) -> Callable[[ExaminedRun], Iterator[RuleHit]]:
    """The check of a rule: the wrong states that it names."""

    def check(run: ExaminedRun) -> Iterator[RuleHit]:
        return (one.hit() for one in _wrong_states(run) if one.rule == rule)

    return check


def _is_mixed(record: StateOriginFacts) -> bool:
    """Whether most rows of a window are those of known tokens."""
    rows = record.rows
    return rows is not None and 2 * len(_known(rows)) > len(rows)


def _known(positions: list[int | None]) -> list[int]:
    return [one for one in positions if one is not None]


def _sequence(n: int) -> str:
    return f"sequence {n}" if n >= 0 else "the sequence that had the slot before"


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _errors_text(state: float, window: float) -> str:
    """Those of the two that a model has."""
    named = ("the state", state), ("the window", window)
    return ", ".join(f"error of {name} {x:.1e}" for name, x in named if not np.isnan(x))


def _first_layer(errors: LaneErrors, seq: int, number: int) -> tuple[str, str]:
    """What is wrong after round `number` of a sequence, and the first layer that it is in."""
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
    """Tokens undone in that round and how, and the last two rollbacks up to it in words."""
    rounds = run.rounds
    mine = rounds["seq_id"] == seq
    undone = np.flatnonzero(mine & (rounds["memory_rollback"] > 0) & (rounds["round"] <= number))
    texts = [
        f"{rounds['memory_rollback'][row]} undone by {path} in round {rounds['round'][row]}"
        for row, path in zip(undone[-2:], rounds.texts("rollback_path", undone[-2:]), strict=True)
    ]
    is_here = bool(undone.size) and int(rounds["round"][undone[-1]]) == number
    depth = int(rounds["memory_rollback"][undone[-1]]) if is_here else 0
    path = rounds.texts("rollback_path", undone[-1:])[0] if is_here else ""
    if not is_here:
        texts.append("none undone here")
    return depth, path, ", before that ".join(reversed(texts))


def _rule(id: str, title: str, means: str, suggestion: str) -> Rule:
    return Rule(id, ERROR, title, means, suggestion, _named(id), MEMORY)


RULES = (
    _rule(
        "wrong-snapshot-read",
        "Another snapshot is read",
        "Storage holds the right state where the policy expects it, but the next pass starts from "
        "another: the state of other tokens, though index, cells and positions look right.",
        "Look at how this policy turns the pending index into the row that a pass reads, in the "
        "layer and tensor named.",
    ),
    _rule(
        "wrong-snapshot-index",
        "Right state in another snapshot",
        "The state that the next pass needs is in storage, but under another index than the one "
        "that the rollback chose: the index moved too far or too little, or the pass wrote its "
        "states in another order.",
        "Compare the order in which a pass writes its states with the index that a rollback of "
        "that depth sets: index r has to hold the state r tokens ago.",
    ),
    _rule(
        "wrong-fold",
        "Log folded up to another token",
        "Base and log are right, but the next pass folds fewer or more logged tokens into the base "
        "than are accepted, for the tensor named.",
        "Fold as many tokens as are in front of the cursor, the same number for states and "
        "windows.",
    ),
    _rule(
        "log-entry-wrong",
        "Wrong entry in the log",
        "The base is right, but folding the log gives a state that no tokens of the text give: an "
        "entry was not written, or is an older token's.",
        "Write every token's entry in its place, and start the log again at each batch.",
    ),
    _rule(
        "state-too-old",
        "State of earlier tokens",
        "The next pass starts from the state of an earlier position, and no snapshot holds the "
        "right one: the last tokens were not decoded, not kept, or their state was overwritten.",
        "Look at what this policy writes for the last tokens of a batch, and at what it copies on.",
    ),
    _rule(
        "rejected-tokens-in-state",
        "Rejected tokens in the state",
        "The next pass starts from a state that contains rejected tokens, and no snapshot holds "
        "the right one: it was overwritten, or never written.",
        "Look at which states of a verify batch this policy keeps, and whether a later write takes "
        "their place.",
    ),
    _rule(
        "token-ahead-in-state",
        "Next token already in the state",
        "The token that the target chose last is in the state before the batch that decodes it.",
        "Decode only accepted tokens again after a restore: the list without its last token.",
    ),
    _rule(
        "token-missing-in-state",
        "Token missing in the state",
        "The state is right but for one token that it lacks.",
        "Look for a batch, a fold or a log entry that leaves out one token.",
    ),
    _rule(
        "token-twice-in-state",
        "Token twice in the state",
        "The state is right but for one token that advanced it twice.",
        "Look for a batch that begins one token too early, or a fold that is repeated.",
    ),
    _rule(
        "wrong-checkpoint-restored",
        "Wrong checkpoint restored",
        "After the restore the accepted tokens were decoded again, but not from the state before "
        "the batch: the checkpoint was taken at another place, changed after it was taken, or not "
        "put back in full.",
        "Save before the batch, copy instead of referring to storage, and put back every state "
        "and window.",
    ),
    _rule(
        "batch-from-wrong-state",
        "Batch from a wrong start",
        "The tokens of the round are right, but the pass that decoded them started from another "
        "state than the one that they follow.",
        "Look at what the pass reads as its start: the row, its clearing for a new sequence, and "
        "the rollback pending there.",
    ),
    _rule(
        "state-not-cleared",
        "Slot not cleared",
        "A prompt did not start from zero, but from what its slot or another one held.",
        "Zero the rows that a new sequence reads, and forget what the one before had: position, "
        "pending rollback and log.",
    ),
    _rule(
        "window-too-old",
        "Window of earlier tokens",
        "The next pass starts from the window of an earlier position, while the other state of "
        "the layer is right, and no snapshot holds the right one: windows are written, copied or "
        "folded otherwise than states.",
        "Look at which rows of input a window keeps for each snapshot: the last ones up to its "
        "token.",
    ),
    _rule(
        "rejected-tokens-in-window",
        "Rejected tokens in the window",
        "The next pass starts from a window with rows of rejected tokens, while the other state "
        "of the layer is right, and no snapshot holds the right one.",
        "Write a window for every snapshot, not only the newest.",
    ),
    _rule(
        "gates-of-another-token",
        "Gates of another token",
        "The state is what the batch gives with the gates of another token, or without them.",
        "Give the recurrence the gates of each token, also in batches of several.",
    ),
    _rule(
        "window-rows-wrong",
        "Window of other rows",
        "The window has rows of the text, but not the last ones in order.",
        "Keep the last rows of input, oldest first, as they were before and with the batch's own.",
    ),
    _rule(
        "state-empty",
        "State of no tokens",
        "The next pass starts from zero, though the sequence has tokens: its state was never "
        "written there, or let go.",
        "Look for a snapshot that is read beyond those that were written.",
    ),
    _rule(
        "state-of-another-sequence",
        "State of another sequence",
        "The next pass starts from the state of another sequence: rows were read or written by "
        "another's number.",
        "Look at how sequences are mapped to rows when they share a pass, move or are copied.",
    ),
    _rule(
        "state-of-another-layer",
        "State of another layer",
        "The next pass starts from the state of another layer.",
        "Look at how layers are mapped to storage.",
    ),
    _rule(
        "state-wrong",
        "State wrong after a rollback",
        "From this round on the next pass starts from another recurrent state than the reference "
        "does. Cells, positions, snapshot index and depth look right, and no state of the text, "
        "of rejected tokens or of another sequence explains it: its content was computed, stored "
        "or copied wrong.",
        "Look at this policy's write and read of that layer at that depth; compare with "
        "--rollback checkpoint, which copies and restores.",
    ),
)
