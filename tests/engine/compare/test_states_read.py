"""States are compared as the next pass reads them: a read of the wrong row shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.memory.planes import PlaneMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.memory.ring import RingMemory
from engine.model.recurrence import StateKey
from engine.options import Prompt
from tests.support.comparisons import differences_of, finish, specs
from tests.support.golden_runs import options_of, prompt_of, session
from tests.support.host_chosen import host_chosen  # noqa: F401

pytestmark = pytest.mark.usefixtures("host_chosen")

MTP = "qwen35-c-v2x-mtp-f32"


def compared(lane: str, n_seqs: int = 1) -> dict[str, np.ndarray]:
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[: 16 - 3 * i]) for i in range(n_seqs)]
    options = options_of(14, n_max=4, parallel=n_seqs, ignore_eos=True)
    comparison = Comparison(
        session(MTP), prompts, options, specs(lane), draft_accept=[1, 3, 4, 0, 2]
    )
    return differences_of(finish(comparison), lane)


def worst(rows: dict[str, np.ndarray]) -> tuple[float, float]:
    return (float(np.nanmax(rows["state_error"])), float(np.nanmax(rows["conv_error"])))


def a_plane_too_old(patch: pytest.MonkeyPatch) -> None:
    rows = PlaneMemory._rows
    patch.setattr(
        PlaneMemory,
        "_rows",
        lambda self, slot, read: rows(self, slot, [min(r + 1, self.n_rs_seq) for r in read]),
    )


def a_window_too_early(patch: pytest.MonkeyPatch) -> None:
    to_fold = ReplayMemory._to_fold

    def shifted(self: Any, key: StateKey) -> Any:
        n, n_read = to_fold(self, key)
        if not self.layout.states[key].is_window:
            return n, n_read
        return max(n - 1, 0) if isinstance(n, int) else (n - 1).clamp_min(0), n_read

    patch.setattr(ReplayMemory, "_to_fold", shifted)


def the_slot_before(patch: pytest.MonkeyPatch) -> None:
    read = RingMemory._read

    def shifted(self: Any, key: StateKey) -> Any:
        return [slot and (slot - 1) % self._n_lanes for slot in read(self, key)]

    patch.setattr(RingMemory, "_read", shifted)


MISREADS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "planes": a_plane_too_old,
    "carry": a_plane_too_old,
    "replay": a_window_too_early,
    "ring": the_slot_before,
}


@pytest.mark.parametrize("policy", MISREADS)
@pytest.mark.thinned(4)
def test_a_wrong_read_is_seen_before_it_acts(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    assert max(worst(compared(policy))) < 1e-4
    MISREADS[policy](monkeypatch)
    rows = compared(policy)
    error = np.fmax(rows["state_error"], rows["conv_error"])
    seen, acted = (int(rows["round"][wrong].min()) for wrong in (error > 1e-2, rows["nmse"] > 1e-6))
    assert seen == acted - 1


def test_the_rows_are_those_of_the_joint_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows exchanged between the sequences of a pass: each of them alone is read right."""
    lane = "planes,n_rs_seq=6"
    rows = PlaneMemory._rows

    def exchanged(self: Any, slot: Any, read: list[int]) -> Any:
        if len(read) == 1:
            return rows(self, slot, read)
        pairs = zip(read[::-1], slot.sources[::-1], strict=True)
        return self._row_numbers([plane * self.n_seqs + cell for plane, cell in pairs])

    assert max(worst(compared(lane, 3))) < 1e-4
    monkeypatch.setattr(PlaneMemory, "_rows", exchanged)
    assert worst(compared(lane, 3))[0] > 1e-2
    assert max(worst(compared(lane, 1))) < 1e-4


@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay", "checkpoint"])
def test_looking_changes_nothing(policy: str) -> None:
    options = options_of(8, rollback=policy, parallel=3, n_rs_seq=3)
    memory = session(MTP).make_memory(options, 3, 64, options.snapshots_for(3))
    recurrent = memory.recurrent
    assert isinstance(recurrent, SnapshotPolicy)
    assert all(not t.any() for states in recurrent.inputs([2, 0]) for t in states.values())
    assert [recurrent.seq_pos_max(seq) for seq in range(3)] == [-1] * 3
    assert all(not t.any() for t in recurrent._storage)
