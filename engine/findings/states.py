"""The rule for wrong states that no other rule explains."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.findings import drift, forks
from engine.findings.rule import ERROR, LaneErrors, Rule, RuleHit
from engine.findings.run_rows import ExaminedRun, rounds_text

_NAMED = (*drift.NAMED, *drift.RULES, *forks.RULES)


def _state_wrong(run: ExaminedRun) -> Iterator[RuleHit]:
    errors = LaneErrors.of(run)
    if errors is None:
        return
    wrong = errors.state_is_wrong | errors.conv_is_wrong
    if not wrong.any():
        return
    named = [(hit.seq_id, hit.round or 0) for rule in _NAMED for hit in rule.check(run)]
    rows = run.divergence
    for seq, chosen in rows.by_sequence(wrong):
        row = chosen[0]
        number = int(rows["round"][row])
        if any(whose in (seq, None) and since <= number for whose, since in named):
            continue
        what, where = _first_layer(errors, seq, number)
        depth, behind = _rollback(run, seq, number)
        policy = run.option("rollback") or "unknown"
        logits = rows["round"][errors.logits_are_wrong & (rows["seq_id"] == seq)]
        yield RuleHit(
            number,
            seq,
            f"{what} wrong behind the {'rollback' if depth else 'batch'} of round {number}: "
            f"{where}, policy {policy}.",
            f"{behind}; {_errors_text(rows['state_error'][row], rows['conv_error'][row])}, "
            f"noise up to {errors.limit:.1e}; "
            f"{rounds_text(rows['round'][chosen])}; logits "
            + (f"wrong from round {logits[0]} on" if logits.size else "right"),
        )


def _errors_text(state: float, window: float) -> str:
    """Those of the two that a model has."""
    named = ("the state", state), ("the window", window)
    return ", ".join(f"error of {name} {x:.1e}" for name, x in named if not np.isnan(x))


def _first_layer(errors: LaneErrors, seq: int, number: int) -> tuple[str, str]:
    """What is wrong behind round `number` of a sequence, and the first layer that it is in."""
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


def _rollback(run: ExaminedRun, seq: int, number: int) -> tuple[int, str]:
    """Tokens undone in that round, and how, and the rollback before it."""
    rounds = run.rounds
    mine = rounds["seq_id"] == seq
    undone = np.flatnonzero(mine & (rounds["memory_rollback"] > 0) & (rounds["round"] <= number))
    texts = [
        f"{rounds['memory_rollback'][row]} undone by {path} in round {rounds['round'][row]}"
        for row, path in zip(undone[-2:], rounds.texts("rollback_path", undone[-2:]), strict=True)
    ]
    is_here = bool(undone.size) and int(rounds["round"][undone[-1]]) == number
    depth = int(rounds["memory_rollback"][undone[-1]]) if is_here else 0
    if not is_here:
        texts.append("none undone here")
    return depth, ", before that ".join(reversed(texts))


RULES = (
    Rule(
        "state-wrong",
        ERROR,
        "State wrong behind a rollback",
        "From this round on the next pass starts from another recurrent state than the reference "
        "does. Cells, positions, snapshot index and depth look right, so it is the content: what "
        "was written, kept, copied or read.",
        "Look at this policy's write and read of that layer at that depth; compare with "
        "--rollback checkpoint, which copies and restores.",
        _state_wrong,
    ),
)
