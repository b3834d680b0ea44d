"""Rules about rollbacks of the recurrent state: which snapshot is read, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.rule import ERROR, MEMORY, WARNING, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, round_keys, rounds_text
from engine.options import MAX_REPLAYS

_MIN_REPLAYS, _MANY_REPLAYS = 3, 0.25


def _partial(run: ExaminedRun) -> np.ndarray:
    """Rows of `rounds` whose rollback moved an index only: bool [n]."""
    return run.rounds.is_text("rollback_path", "seq_rm") & (run.rounds["memory_rollback"] > 0)


def _wrong_index(run: ExaminedRun) -> np.ndarray:
    """Rows after which another index is pending than the tokens undone: bool [n]."""
    rounds = run.rounds
    index, undone = rounds["rs_idx_after"], rounds["memory_rollback"]
    moves_none = rounds.is_text("rollback_path", "none") & (undone == 0)
    return (_partial(run) | moves_none) & observed(index) & (index != undone)


def _not_consumed(run: ExaminedRun) -> np.ndarray:
    """Rows after which the index that was pending before the pass is pending on: bool [n]."""
    before, rounds = run.rounds["rs_idx_before"], run.rounds
    later = rounds["rs_idx_after"] - rounds["memory_rollback"] == before
    return _wrong_index(run) & (before > 0) & later


def _pending_not_consumed(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(_not_consumed(run)):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"The pass read the state of {_tokens(rounds['rs_idx_before'][first])} ago, and that "
            "rollback is still pending after it.",
            f"{rounds_text(rounds['round'][rows])}; {_tokens(rounds['memory_rollback'][first])} "
            f"undone, pending are {rounds['rs_idx_after'][first]}" + _state_error(run, seq, first),
        )


def _plane_off_by_one(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(_wrong_index(run) & ~_not_consumed(run)):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"After a rollback of {_tokens(rounds['memory_rollback'][first])} the next batch "
            f"reads the state of {_tokens(rounds['rs_idx_after'][first])} ago.",
            rounds_text(rounds["round"][rows]) + _state_error(run, seq, first),
        )


def _stale_plane(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds, memory = run.rounds, run.memory
    pending = np.flatnonzero(memory.is_text("state", "pending"))
    if not pending.size:
        return
    keys = round_keys(memory)[pending]
    order = np.argsort(keys, kind="stable")
    keys, ages = keys[order], memory["age"][pending][order]
    wanted = round_keys(rounds)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    age, depth = ages[at], rounds["memory_rollback"]
    stale = _partial(run) & ~_wrong_index(run) & (keys[at] == wanted) & (age != depth)
    for seq, rows in rounds.by_sequence(stale):
        first = rows[0]
        found = "of rejected tokens or another sequence"
        if observed(age[first]):
            found = f"of {_tokens(age[first])} ago"
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"A rollback of {_tokens(depth[first])} was accepted, but its plane holds a state "
            f"{found}.",
            f"{rounds_text(rounds['round'][rows])}; verify width "
            f"{rounds['verify_width'][first]}, n_rs_seq {rounds['n_rs_seq'][first]}"
            + _state_error(run, seq, first),
        )


def _depth_beyond_truth(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    depth, valid = rounds["memory_rollback"], rounds["valid_depth"]
    for seq, rows in rounds.by_sequence(_partial(run) & observed(valid) & (depth > valid)):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"A rollback of {_tokens(depth[first])} was accepted where {valid[first]} is the "
            "truthful depth.",
            rounds_text(rounds["round"][rows]) + _state_error(run, seq, first),
        )


def _conv_not_rolled_back(run: ExaminedRun) -> Iterator[RuleHit]:
    errors = LaneErrors.of(run)
    if errors is None:
        return
    rows = run.divergence
    known = ~np.isnan(rows["conv_error"])
    undone = round_keys(run.rounds)[run.rounds["memory_rollback"] > 0]
    wrong = known & errors.conv_is_wrong & ~errors.state_is_wrong
    wrong &= np.isin(round_keys(rows), undone)
    # in a model whose layers keep windows alone, these are wrong whatever else is
    named = [hit for check in (_plane_off_by_one, _stale_plane) for hit in check(run)]
    for seq, chosen in rows.by_sequence(wrong):
        first = chosen[0]
        number = rows["round"][first]
        before = (rows["seq_id"] == seq) & (rows["round"] <= number)
        if (rows["cells_differ"][before] > 0).any():
            continue
        if any(hit.seq_id == seq and (hit.round or 0) <= number for hit in named):
            continue
        origins = [r for r in run.state_origins if (r.seq_id, r.round) == (seq, number)]
        if origins and all(r.kind != "rejected" for r in origins):
            continue  # it is of other tokens
        has_state = not np.isnan(rows["state_error"][first])
        # later on everything that is computed from a wrong window is wrong as well
        if errors.first_wrong(seq) == first:
            yield RuleHit(
                int(rows["round"][first]),
                seq,
                "The convolution window is wrong after a rollback that left the state right."
                if has_state
                else "The window is wrong after a rollback.",
                f"relative error {rows['conv_error'][first]:.2g} of the window"
                + (f", {rows['state_error'][first]:.2g} of the state; " if has_state else "; ")
                + rounds_text(rows["round"][chosen]),
            )


def _replay_disagrees(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(rounds["replay_index"] > 0):
        twice = rows[rounds["replay_index"][rows] > 1]
        if len(twice) < _MIN_REPLAYS or len(twice) < _MANY_REPLAYS * len(rows):
            continue
        yield RuleHit(
            int(rounds["round"][twice[0]]),
            seq,
            f"{len(twice)} of {len(rows)} replays did not choose the accepted tokens again.",
            f"{rounds_text(rounds['round'][twice])}; up to "
            f"{rounds['replay_index'][twice].max()} restores in a round",
        )


def _replay_livelock(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    for seq, rows in rounds.by_sequence(rounds["replay_index"] > MAX_REPLAYS):
        first = rows[0]
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"Replaying the accepted tokens disagreed with itself {MAX_REPLAYS} times.",
            f"{rounds_text(rounds['round'][rows])}; position {rounds['pos0'][first]}, "
            f"{rounds['replay_index'][first]} restores",
        )


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _state_error(run: ExaminedRun, seq: int, row: int) -> str:
    """Words on the state's error after a row of rounds; empty where no lane measured it."""
    rows = run.divergence
    here = (rows["round"] == run.rounds["round"][row]) & (rows["seq_id"] == seq)
    errors = rows["state_error"][here & ~np.isnan(rows["state_error"])]
    return f"; relative error of the state {errors[-1]:.2g}" if errors.size else ""


RULES = (
    Rule(
        "stale-plane",
        ERROR,
        "Stale snapshot plane used",
        "A batch writes only as many planes as it has tokens, and deeper ones keep what they "
        "held. A bound of n_rs_seq alone accepts rollbacks to them.",
        "Bound rollbacks by min(tokens of the last ubatch, n_rs_seq + 1) - 1, or carry older "
        "planes along (--rollback carry).",
        _stale_plane,
        MEMORY,
    ),
    Rule(
        "depth-beyond-truth",
        ERROR,
        "Rollback deeper than the snapshots reach",
        "The memory knew its truthful depth, and a deeper partial removal was accepted.",
        "Refuse it and restore a checkpoint, or raise --n-rs-seq.",
        _depth_beyond_truth,
        MEMORY,
    ),
    Rule(
        "pending-not-consumed",
        ERROR,
        "Rollback not consumed",
        "A pass starts from the plane that a rollback chose, and what it writes is plane 0 again. "
        "If the index stays, the next pass or rollback counts those tokens once more.",
        "Set the pending index to 0 when a pass is committed, and when a sequence ends.",
        _pending_not_consumed,
        MEMORY,
    ),
    Rule(
        "plane-off-by-one",
        ERROR,
        "Wrong snapshot plane",
        "Plane r holds the state r tokens ago, so undoing r tokens has to read plane r.",
        "Set the pending index to pos - (p0 - 1), counted from the last decoded token.",
        _plane_off_by_one,
        MEMORY,
    ),
    Rule(
        "conv-not-rolled-back",
        ERROR,
        "Convolution window not rolled back",
        "The recurrent layers keep two tensors. The delta-net state was taken from the right "
        "snapshot and the convolution window from the newest one.",
        "Read both tensors by the same snapshot index.",
        _conv_not_rolled_back,
        MEMORY,
    ),
    Rule(
        "replay-livelock",
        ERROR,
        "Replay disagrees with itself",
        "Where logits depend on the width of the batch, a replayed list that is sampled again "
        "can be rejected again and again (llama.cpp #28061).",
        "Use --replay trust, which decodes accepted tokens without sampling them again.",
        _replay_livelock,
        MEMORY,
    ),
    Rule(
        "replay-disagrees",
        WARNING,
        "Replays choose other tokens",
        "A replay samples the accepted tokens again with the sampler as it was before them. Where "
        "it often chooses others, the sampler's random numbers or penalties were not restored, or "
        "logits depend on the width of the batch.",
        "Restore the sampler together with the checkpoint; --replay trust does not sample again.",
        _replay_disagrees,
        MEMORY,
    ),
)
