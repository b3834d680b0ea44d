"""The rule for states that every rollback rounds: small at first, and more with each one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings import cells, positions, snapshots
from engine.analysis.findings.rule import ERROR, MEMORY, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, round_keys

NAMED = tuple(
    rule for rule in (*cells.RULES, *positions.RULES, *snapshots.RULES) if rule.severity == ERROR
)
"""Rules that say what made a state wrong."""
_ROUNDING = 1e-2
"""Relative error of a state that rounding may come to at once; other content is off by more."""
_SIZES = (("bf16", 4e-4, 3e-3), ("f16", 5e-5, 4e-4))
"""What rounding all numbers of a state to a type costs it, with the decay of some tokens."""


def _drift(run: ExaminedRun) -> Iterator[RuleHit]:
    errors = LaneErrors.of(run)
    if errors is None:
        return
    wrong = errors.state_is_wrong | errors.conv_is_wrong
    if not wrong.any():
        return
    named = {hit.seq_id for rule in NAMED for hit in rule.check(run)}
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
        layer = _first_layer(run, seq, number)
        type = next((t for t, low, high in _SIZES if low <= layer <= high), "")
        if not type:
            continue  # other content, however alike
        last = float(error[measured][-1])
        yield RuleHit(
            number,
            seq,
            f"Rollbacks round the state: it is off by {first:.1e} after that of round {number} "
            f"and by {last:.1e} at the end.",
            f"the error grew by {with_rollback:.1e} in {int(behind.sum())} rounds with a rollback "
            f"and by {without:.1e} in {int((~behind).sum())} without; noise up to "
            f"{errors.limit:.1e}; {layer:.1e} in the first layer, as rounding to {type} costs",
        )


def _first_layer(run: ExaminedRun, seq: int, number: int) -> float:
    """The error of the first recurrent layer after a round, whose inputs are the reference's; 0
    where none was recorded."""
    states = run.states
    here = np.flatnonzero((states["round"] == number) & (states["seq_id"] == seq))
    found = [float(states[name][here[0]]) for name in ("state_error", "conv_error") if here.size]
    return next((error for error in found if not np.isnan(error)), 0.0)


RULES = (
    Rule(
        "drift-with-rejections",
        ERROR,
        "Drift with every rejection",
        "The state is right until the first rollback, is off by little more than rounding after "
        "it, and by more with each further one; rounds that undo nothing add nothing. So what a "
        "rollback reads is less precise than what goes on: snapshots, checkpoints or the inputs of "
        "a replay in a shorter type than the state, a verification that computes gates in "
        "another type than decoding does (SGLang #35150), or a trace of the rejected state.",
        "Keep snapshots and checkpoints in the state's own type, and compute gates alike in both; "
        "measure what a type costs without drafts by --lane reference,cache_type_s=bf16.",
        _drift,
        MEMORY,
    ),
)
