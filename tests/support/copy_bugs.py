"""Bugs of copies, of sequences that wait, and of carried planes, one patch each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.memory import replay
from engine.memory.cells import UBatchCells
from engine.memory.planes import PlaneMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.ring import RingMemory


def ring_does_not_count_the_copy(patch: pytest.MonkeyPatch) -> None:
    def share(self: RingMemory, src: int, dst: int) -> None:
        self._held[dst] = list(self._held[src])

    patch.setattr(RingMemory, "_share", share)


def ring_writes_at_home(patch: pytest.MonkeyPatch) -> None:
    choose = RingMemory._choose

    def at_home(self: RingMemory, n_refs: np.ndarray, seq: int, n_new: int):
        held, new = choose(self, n_refs, seq, n_new)
        home = [seq * self._n_lanes + slot % self._n_lanes for slot in new]
        return held[: len(held) - n_new] + home, home

    patch.setattr(RingMemory, "_choose", at_home)


def replay_stays_in_a_shared_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "np", SimpleNamespace(**vars(np) | {"count_nonzero": lambda _: 1}))


def a_copy_loses_the_pending_rollback(patch: pytest.MonkeyPatch) -> None:
    seq_cp = SnapshotPolicy.seq_cp

    def forgetful(self: SnapshotPolicy, src: int, dst: int) -> None:
        seq_cp(self, src, dst)
        if src != dst:
            self._pending[dst] = 0

    patch.setattr(SnapshotPolicy, "seq_cp", forgetful)


def idle_states_move_from_plane_0(patch: pytest.MonkeyPatch) -> None:
    moves = PlaneMemory._moves

    def newest(self: PlaneMemory, cells, slot):
        pending, self._pending = self._pending, [0] * self.n_seqs
        try:
            return moves(self, cells, slot)
        finally:
            self._pending = pending

    patch.setattr(PlaneMemory, "_moves", newest)


def idle_states_keep_their_pending_rollback(patch: pytest.MonkeyPatch) -> None:
    commit = PlaneMemory._commit

    def keeping(self: PlaneMemory, ubatch) -> None:
        moved = {seq: (self._pending[seq], self._deepest[seq]) for seq in self._running().moved}
        commit(self, ubatch)
        for seq, (pending, deepest) in moved.items():
            self._pending[seq], self._deepest[seq] = pending, deepest

    patch.setattr(PlaneMemory, "_commit", keeping)


def rows_are_read_by_cell(patch: pytest.MonkeyPatch) -> None:
    rows = PlaneMemory._rows

    def by_cell(self: PlaneMemory, slot: UBatchCells, read):
        here = tuple(range(slot.first, slot.first + len(read)))
        return rows(self, replace(slot, sources=here), read)

    patch.setattr(PlaneMemory, "_rows", by_cell)


def carry_reads_from_plane_0(patch: pytest.MonkeyPatch) -> None:
    carried = PlaneMemory._carried_rows

    def newest(self: PlaneMemory, slot: UBatchCells, read, n_carried, n: int):
        return carried(self, slot, [0] * len(read), n_carried, n)

    patch.setattr(PlaneMemory, "_carried_rows", newest)


def carry_reads_by_cell(patch: pytest.MonkeyPatch) -> None:
    carried = PlaneMemory._carried_rows

    def by_cell(self: PlaneMemory, slot: UBatchCells, read, n_carried, n: int):
        here = tuple(range(slot.first, slot.first + len(read)))
        return carried(self, replace(slot, sources=here), read, n_carried, n)

    patch.setattr(PlaneMemory, "_carried_rows", by_cell)
