"""A ring of states (discussion of llama.cpp #22400): each token writes the next slot.

A sequence refers to the slots of its last R + 1 states, oldest first. Decoding writes new states to
free slots and releases the oldest, a rollback releases the newest, a copied sequence refers to the
same slots: states are never copied.

Slot `column * (R + 1) + lane` of the pool is on lane `lane`. A sequence's states are on consecutive
lanes, one each. With one column per sequence, a lane always has a free slot for a sequence that
needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import upload
from engine.machine.graphs import PassInputs
from engine.memory.recurrent import PoolRows, SnapshotPolicy, SnapshotSlot
from engine.model.recurrence import RecurrenceInputs, StateKey


@dataclass(slots=True)
class _RingPlan:
    """Plan of one ubatch. Per row: slots held afterwards, new ones, and where to read.

    rows: all of these as numbers on the device, if the pass uses them; else index: the new ones as
    a tensor [n_seqs, n_new].
    """

    n_refs: np.ndarray
    held: list[list[int]]
    new: list[list[int]]
    read: Sequence[int | None]
    read_windows: Sequence[int | None]
    rows: PoolRows | None
    index: Tensor


class RingMemory(SnapshotPolicy):
    """Per state a pool of n_seqs * (n_rs_seq + 1) rows with reference counts."""

    accumulates = True

    def _allocate(self) -> None:
        layout, n_seqs = self.layout, self.n_seqs
        self._n_lanes = self.n_rs_seq + 1
        self._pools = {
            key: self._zeros(n_seqs * self._n_lanes, *one.shape)
            for key, one in layout.states.items()
        }
        # every slot as a batch of one, made once: a view costs as much as a small operation
        self._slots = {key: pool.unsqueeze(1).unbind(0) for key, pool in self._pools.items()}
        self._n_refs = np.zeros((n_seqs, self._n_lanes), np.int64)
        self._held: list[list[int]] = [[] for _ in range(n_seqs)]
        self._newest_written = [0] * n_seqs
        self._n_fresh = [0] * n_seqs
        self._n_stale = [0] * n_seqs
        self._plan: _RingPlan  # begin() makes it

    def _begin(self, ubatch: UBatch, by_index: bool) -> None:
        seqs = ubatch.seq_ids
        n_new, n_refs = min(ubatch.n_seq_tokens, self._n_lanes), self._n_refs.copy()
        choices = [self._choose(n_refs, seq, n_new) for seq in seqs]
        read = [self._held[seq][-1] if self._held[seq] else None for seq in seqs]
        windows: Sequence[int | None] = read
        if "no-conv-rollback" in self.faults:
            windows = [self._newest_written[s] if self._held[s] else None for s in seqs]
        held, new = [choice[0] for choice in choices], [choice[1] for choice in choices]
        rows = self._numbers(read, windows, new) if by_index else None
        index = rows.states.in_order if rows else upload(new, self.device)
        self._plan = _RingPlan(n_refs, held, new, read, windows, rows, index)

    def pass_inputs(self) -> PassInputs | None:
        return self._plan.rows.pass_inputs() if self._plan.rows else None

    def _numbers(
        self,
        read: Sequence[int | None],
        windows: Sequence[int | None],
        new: Sequence[Sequence[int]],
    ) -> PoolRows | None:
        """Row numbers of a pass; None where a sequence has no state yet, or writes a slot that
        another one reads: by numbers all run at once, not in the order of the plan."""
        known = [slot for slot in read if slot is not None]
        starts = [slot for slot in windows if slot is not None]
        if len(known) < len(read) or len(starts) < len(windows):
            return None
        for row, slots in enumerate(new):
            if set(slots) & {*known[:row], *known[row + 1 :]}:
                return None
        return self._rows_in_pool(known, starts, [slots[::-1] for slots in new])

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> Tensor:
        recurrence, pool, plan = self.layout.states[key], self._pools[key], self._plan
        if plan.rows:
            return plan.rows.advance(recurrence, pool, inputs)
        return recurrence.in_rows(
            inputs,
            pool,
            self._slots[key],
            self._read(key),
            plan.new,
            plan.index,
            invariant=self.batch_invariant,
        )

    def _commit(self, ubatch: UBatch) -> None:
        plan = self._plan
        self._n_refs = plan.n_refs
        self.traffic.written += plan.index.numel() * self.layout.n_bytes
        for seq, held, new in zip(ubatch.seq_ids, plan.held, plan.new, strict=True):
            self._held[seq] = held
            self._newest_written[seq] = held[-1]
            self._n_fresh[seq] = len(new)
            self._n_stale[seq] = max(0, self._n_stale[seq] - len(new))

    def valid_depth(self, seq: int) -> int:
        return max(0, len(self._held[seq]) - 1)

    def guaranteed_depth(self, seq: int, n_last: int, n_first: int = 0) -> int:
        return min(self.n_rs_seq, len(self._held[seq]) + n_last - 1)

    def _read(self, key: StateKey) -> Sequence[int | None]:
        """The slot of each sequence that this ubatch starts from, None for zeros."""
        return self._plan.read_windows if self.layout.states[key].is_window else self._plan.read

    def _input(self, key: StateKey) -> Tensor | list[Tensor]:
        pool = self._pools[key]
        if rows := self._plan.rows:
            return pool[(rows.windows if self.layout.states[key].is_window else rows.states).read]
        return [torch.zeros_like(pool[0]) if i is None else pool[i] for i in self._read(key)]

    def _put(self, seq: int, states: Mapping[StateKey, Tensor]) -> None:
        [slot], _ = self._choose(self._n_refs, seq, 1)
        for key, pool in self._pools.items():
            pool[slot] = states[key]
        self._held[seq], self._newest_written[seq] = [slot], slot

    def slots(self, seq: int) -> list[SnapshotSlot]:
        """By lane. A slot that was rolled back is stale until a token is written there."""
        found = [SnapshotSlot(lane, "free", None) for lane in range(self._n_lanes)]
        held, pending = self._held[seq], self._pending[seq]
        if not held:
            return found
        newest = held[-1] % self._n_lanes
        for back in range(len(held)):
            name = "fresh" if back < self._n_fresh[seq] else "carried"
            if back == 0:
                name = "pending" if pending else "live"
            lane = (newest - back) % self._n_lanes
            found[lane] = SnapshotSlot(lane, name, pending + back)
        for ahead in range(1, self._n_stale[seq] + 1):
            lane = (newest + ahead) % self._n_lanes
            # those of an earlier rollback belong to a text whose newest state is gone
            age = pending - ahead if ahead <= pending else None
            found[lane] = SnapshotSlot(lane, "stale", age)
        return found

    def kept(self, seq: int, key: StateKey) -> list[Tensor]:
        """For older states the held slots, for newer ones those that a rollback released."""
        held, lanes = self._held[seq], self._n_lanes
        if not held:
            return []
        column, lane = divmod(held[-1], lanes)
        stale = [
            column * lanes + (lane + ahead) % lanes for ahead in range(1, self._n_stale[seq] + 1)
        ]
        return [self._pools[key][slot] for slot in (*held[::-1], *stale)]

    def _choose(self, n_refs: np.ndarray, seq: int, n_new: int) -> tuple[list[int], list[int]]:
        """A sequence's slots after n_new more states, and the new ones; updates the counts."""
        held = self._held[seq]
        n_kept = min(len(held), self._n_lanes - n_new)
        self._count(n_refs, held[: len(held) - n_kept], -1)
        lane = held[-1] % self._n_lanes if held else -1
        new = []
        for _ in range(n_new):
            lane = (lane + 1) % self._n_lanes
            # at home if possible, so that the ring is seen to turn
            column = int(n_refs[:, lane].argmin()) if n_refs[seq, lane] else seq
            new.append(column * self._n_lanes + lane)
        self._count(n_refs, new, 1)
        return held[len(held) - n_kept :] + new, new

    def _count(self, n_refs: np.ndarray, slots: Sequence[int], change: int) -> None:
        for slot in slots:
            n_refs[divmod(slot, self._n_lanes)] += change

    def _move_cursor(self, seq: int, depth: int) -> None:
        super()._move_cursor(seq, depth)
        held = self._held[seq]
        self._count(self._n_refs, held[-depth:], -1)
        del held[-depth:]
        self._n_fresh[seq] = max(0, self._n_fresh[seq] - depth)
        self._n_stale[seq] += depth

    def _forget(self, seq: int) -> None:
        self._count(self._n_refs, self._held[seq], -1)
        self._held[seq] = []
        self._n_fresh[seq] = self._n_stale[seq] = 0

    def _share(self, src: int, dst: int) -> None:
        self._held[dst] = list(self._held[src])
        self._count(self._n_refs, self._held[dst], 1)
        self._newest_written[dst] = self._newest_written[src]
        self._n_fresh[dst] = self._n_fresh[src]
