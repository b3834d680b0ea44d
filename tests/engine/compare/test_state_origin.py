"""A wrong state is explained by the tokens that it was made from, and by what snapshots hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.memory.planes import PlaneMemory
from engine.memory.recurrent import RecurrentCheckpoint, SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.memory.ring import RingMemory
from engine.model.recurrence import StateKey
from engine.options import Prompt
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import options_of, prompt_of, session
from tests.support.host_chosen import host_chosen  # noqa: F401

pytestmark = pytest.mark.usefixtures("host_chosen")

MTP = "qwen35-c-v2x-mtp-f32"
Patch = pytest.MonkeyPatch


def compared(lane: str, n_seqs: int = 1) -> tuple[list[dict[str, Any]], set[str]]:
    """What explains the wrong states of a lane, and the findings about it above info."""
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(n_seqs)]
    options = options_of(10, n_max=4, parallel=n_seqs, ignore_eos=True)
    comparison = Comparison(session(MTP), prompts, options, specs(lane), draft_accept=[1, 0, 3, 2])
    run_id = verdicts(finish(comparison))[lane].run_id
    found = [f for f in recorded(comparison.trace) if f.run_id == run_id]
    rules = {f.rule for f in found if f.severity != "info"}
    return comparison.trace.runs[run_id].get("state_origins", []), rules


def a_plane_too_old(patch: Patch) -> None:
    rows = PlaneMemory._rows
    older = lambda self, slot, read: rows(self, slot, [min(r + 1, self.n_rs_seq) for r in read])  # noqa: E731
    patch.setattr(PlaneMemory, "_rows", older)


def windows_folded_less(patch: Patch) -> None:
    to_fold = ReplayMemory._to_fold

    def fewer(self: ReplayMemory, key: StateKey) -> Any:
        fold = to_fold(self, key)
        is_window = self.layout.states[key].is_window
        return (max(fold[0] - 1, 0), fold[1]) if is_window else fold

    patch.setattr(ReplayMemory, "_to_fold", fewer)


def no_window_restored(patch: Patch) -> None:
    restore = SnapshotPolicy.restore

    def without(self: SnapshotPolicy, seq: int, one: RecurrentCheckpoint) -> None:
        states = {k: x * (not self.layout.states[k].is_window) for k, x in one.states.items()}
        restore(self, seq, RecurrentCheckpoint(one.pos, states))

    patch.setattr(SnapshotPolicy, "restore", without)


def rows_exchanged(patch: Patch) -> None:
    read = RingMemory._read
    patch.setattr(RingMemory, "_read", lambda self, key: list(read(self, key))[::-1])


def the_cursor_short(patch: Patch) -> None:
    move = RingMemory._move_cursor

    def less(self: RingMemory, seq: int, depth: int) -> None:
        move(self, seq, depth)
        if depth > 1:
            newest = self._held[seq][-1]
            column, lane = divmod(newest, self._n_lanes)
            self._held[seq].append(column * self._n_lanes + (lane + 1) % self._n_lanes)

    patch.setattr(RingMemory, "_move_cursor", less)


BUGS: dict[str, tuple[Callable[[Patch], None], str, int, tuple[str, int], str]] = {
    "read": (a_plane_too_old, "planes", 1, ("earlier", 1), "wrong-snapshot-read"),
    "fold": (windows_folded_less, "replay", 1, ("earlier", 1), "wrong-fold"),
    "restore": (
        no_window_restored,
        "checkpoint",
        1,
        ("from nothing", 0),
        "wrong-checkpoint-restored",
    ),
    "rows": (rows_exchanged, "ring", 2, ("sequence", 1), "state-of-another-sequence"),
    "cursor": (the_cursor_short, "ring", 1, ("rejected", 1), "wrong-snapshot-index"),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.thinned(4)
def test_a_wrong_state_is_explained(monkeypatch: Patch, bug: str) -> None:
    switch_on, lane, n_seqs, expected, rule = BUGS[bug]
    switch_on(monkeypatch)
    records, rules = compared(lane, n_seqs)
    assert expected in {(one["kind"], one["number"]) for one in records if one["seq_id"] == 0}
    assert rules == {rule}


def test_snapshots_say_where_the_right_state_is(monkeypatch: Patch) -> None:
    the_cursor_short(monkeypatch)
    records, _ = compared("ring")
    first = records[0]
    assert first["holds"][0] == first["pos"] + 1  # the first is the one that is read
    assert first["pos"] in first["holds"]
    window = next(one for one in records if one["is_window"])
    n = len(window["rows"])
    assert window["rows"] == list(range(window["pos"] - n + 2, window["pos"] + 2))


@pytest.mark.parametrize("lane", ["planes", "carry", "ring", "replay", "checkpoint"])
def test_right_states_are_not_looked_into(lane: str) -> None:
    records, rules = compared(lane)
    assert (records, rules) == ([], set())
