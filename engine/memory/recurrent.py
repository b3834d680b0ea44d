"""Recurrent memory: the states of every recurrent layer and sequence, and how far back they go.

A snapshot policy decides how many past states are kept and what a rollback costs. The model calls
`advance` and never sees where states are stored; the policy never sees what they mean, only the
tensors that a layer's recurrence (engine.model.recurrence) advances from rows into rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import upload
from engine.machine.graphs import PassInputs
from engine.model.memory import RecurrentMemory
from engine.model.recurrence import (
    Recurrence,
    RecurrenceInputs,
    RecurrentLayout,
    RowNumbers,
    StateKey,
)
from engine.model.recurrent_states import stored_as
from kernels.rows import put_rows, take_rows

_LINE = 16  # numbers per cache line, torch's alignment


class SnapshotSlot(NamedTuple):
    """One snapshot slot as the trace shows it. age: tokens after the newest state written."""

    slot: int
    state: str
    age: int | None


@dataclass(frozen=True, slots=True)
class RecurrentCheckpoint:
    """A copy of one sequence's live states. pos: its last position."""

    pos: int
    states: Mapping[StateKey, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.states.values())


@dataclass(slots=True)
class RecurrentTraffic:
    """Bytes of recurrent memory moved since the start.

    written: new states or log entries that forward passes put into storage.
    copied: stored bytes copied to another place unchanged (carry, relocation, copy-on-write).
    saved, restored: checkpoints, counted by the memory that makes them.
    """

    written: int = 0
    copied: int = 0
    saved: int = 0
    restored: int = 0


class SnapshotPolicy(RecurrentMemory, ABC):
    """The interface of all policies; positions count tokens, -1 is empty.

    n_rs_seq (R) bounds every rollback; the valid depth may be less. A rollback marks tokens as
    pending without touching storage; the next ubatch starts after the tokens that are left. A
    sequence without tokens has zero states, whatever its storage holds. `faults` are enabled on
    purpose, to show their effects (engine.options.FAULTS).
    """

    batch_invariant: bool = False
    """Whether kernels run in the variants whose bits do not depend on the shape of a batch."""

    accumulates: ClassVar[bool] = False
    """Whether a rollback may span several ubatches; else only the last one, so that all tokens that
    may be undone have to share it (keep-tail)."""

    def __init__(
        self,
        layout: RecurrentLayout,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        self.layout, self.n_seqs, self.n_rs_seq, self.device = layout, n_seqs, n_rs_seq, device
        self.faults = frozenset(faults)
        self.traffic = RecurrentTraffic()
        self._pos = [-1] * n_seqs
        self._pending = [0] * n_seqs
        # per sequence: tokens that the oldest snapshot has seen; more than its length where it was
        # read for a shorter text
        self._n_seen = [0] * n_seqs
        self._storage: list[Tensor] = []
        self._again: list[Tensor] = []
        self._ubatch: UBatch | None = None
        self._pool_rows: dict[tuple[int, int, int], PoolRows] = {}
        self._allocate()

    # what a policy defines

    @abstractmethod
    def _allocate(self) -> None:
        """Allocate storage with `_zeros`, and the bookkeeping; called once, at the end of the
        constructor."""

    @abstractmethod
    def _begin(self, ubatch: UBatch, by_index: bool) -> None:
        """Choose the rows to read and to write; they take effect in `_commit`."""

    @abstractmethod
    def pass_inputs(self) -> PassInputs | None:
        """Key and input tensors for recording the current pass; None if it cannot be recorded."""

    def repeats(self) -> bool:
        """Whether further passes of one token would read and write the same rows as the current
        one."""
        return False

    @abstractmethod
    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> Tensor:
        """The layer's output for this ubatch, its state updated."""

    @abstractmethod
    def _commit(self, ubatch: UBatch) -> None:
        """Update the bookkeeping after the pass. Positions and pending rollbacks are still the old
        ones."""

    @abstractmethod
    def valid_depth(self, seq: int) -> int:
        """Deepest rollback that `seq_rm` would accept now."""

    @abstractmethod
    def guaranteed_depth(self, seq: int, n_last: int, n_first: int = 0) -> int:
        """Depth that will be truthful after decoding n_last tokens in one ubatch, now or after
        n_first others in earlier ones."""

    @abstractmethod
    def _forget(self, seq: int) -> None:
        """Free the storage of a sequence."""

    @abstractmethod
    def _share(self, src: int, dst: int) -> None:
        """Let dst, which is empty, refer to the storage of src."""

    @abstractmethod
    def _input(self, key: StateKey) -> Tensor | list[Tensor]:
        """Input states of the current pass, as `advance` reads them, one per sequence of the
        ubatch. Those of sequences without tokens are ignored."""

    @abstractmethod
    def _put(self, seq: int, states: Mapping[StateKey, Tensor]) -> None:
        """Store the states of an empty sequence."""

    @abstractmethod
    def slots(self, seq: int) -> Sequence[SnapshotSlot]:
        """Every snapshot slot of a sequence."""

    @abstractmethod
    def kept(self, seq: int, key: StateKey) -> list[Tensor]:
        """One state in every snapshot stored for a sequence: first the one that the next pass must
        start from, then others. [] for a sequence without tokens."""

    def _spare(self, seq: int, n_tokens: int, depth: int) -> int:
        """How many tokens further back the snapshot taken `depth` tokens ago also serves, for a
        text of n_tokens, within n_rs_seq; only where state rows go by position."""
        n_seen = max(n_tokens, self._n_seen[seq])
        return self.layout.n_spare(n_tokens, n_seen, self.n_rs_seq - depth)

    def _move_cursor(self, seq: int, depth: int) -> None:
        """Roll back `depth` more tokens."""
        self._pending[seq] += depth

    # what all policies share

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether these ubatches could be decoded in turn; changes nothing."""
        return all(self._can_decode(ubatch) for ubatch in ubatches)

    def begin(self, ubatch: UBatch, *, by_index: bool = False, is_decoded: bool = False) -> None:
        """Choose the rows to read; a pending rollback is consumed in `commit`.

        by_index: use row numbers on the device where possible, so that the pass can be recorded.
        is_decoded: it used the rows of the previous pass (`repeats`). Raises ValueError and changes
        nothing if a sequence is unknown or listed twice.
        """
        if not self._can_decode(ubatch):
            seqs = ubatch.seq_ids
            raise ValueError(f"sequences {seqs} are not distinct numbers below {self.n_seqs}")
        if not is_decoded:
            self._begin(ubatch, by_index)
        self._ubatch = ubatch

    def commit(self) -> None:
        """Advance the positions after the forward pass that `begin` prepared."""
        ubatch = self._ubatch
        assert ubatch is not None  # begin comes first
        self._commit(ubatch)
        self._ubatch = None
        for seq, last in zip(ubatch.seq_ids, ubatch.positions[:, -1].tolist(), strict=True):
            self._n_seen[seq] = max(self._n_seen[seq], self._pos[seq] + 1)
            self._pos[seq], self._pending[seq] = last, 0

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Undo the tokens from p0 on. False changes nothing: the caller needs a checkpoint.

        Negative p0 is 0, negative p1 means no end. p0 = 0 without end, or an end above the last
        position, clears the sequence. A range that does not reach the last position returns True
        and changes nothing.
        """
        if not 0 <= seq < self.n_seqs:
            return False
        pos = self._pos[seq]
        if p0 > pos or 0 <= p1 <= pos:
            return True
        if p0 <= 0:
            self._clear(seq)
            return True
        depth = pos - (p0 - 1)
        if depth > self.valid_depth(seq):
            return False
        self._move_cursor(seq, depth)
        self._pos[seq] = p0 - 1
        return True

    def seq_cp(self, src: int, dst: int) -> None:
        """Make dst a copy of src, sharing storage until one of them decodes."""
        if src == dst:
            return
        self._clear(dst)
        if self._pos[src] >= 0:
            self._share(src, dst)
            self._pos[dst], self._pending[dst] = self._pos[src], self._pending[src]
            self._n_seen[dst] = self._n_seen[src]

    def fork(self, src: int, dst: int) -> None:
        """Make dst a copy of the logical states of src, without shared storage."""
        self.put(dst, self._pos[src], self.live(src))
        self.traffic.copied += self.layout.n_bytes

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        for other in range(self.n_seqs):
            if other != seq:
                self._clear(other)

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        """Shift the position by `shift` if it lies in p0 <= pos < p1; states do not change."""
        if max(p0, 0) <= self._pos[seq] and (p1 < 0 or self._pos[seq] < p1):
            self._pos[seq] += shift

    def seq_pos_max(self, seq: int) -> int:
        """Last position of the logical state, -1 when empty."""
        return self._pos[seq]

    def pending(self, seq: int) -> int:
        """Tokens pending as rolled back for the next ubatch (`rs_idx`), 0 = none."""
        return self._pending[seq]

    def inputs(
        self, seqs: Sequence[int], *, by_index: bool = False, whole: bool = False
    ) -> list[dict[StateKey, Tensor]]:
        """The input states of a next pass with one token of each of these sequences.

        Goes through `begin` and reads the rows it chose, so a wrong row or plane shows here as in a
        real pass. Per sequence its states, possibly views, as far as needed (Recurrence.needed), or
        whole. by_index: as in `begin`.
        """
        positions = np.array([[self._pos[seq] + 1] for seq in seqs])
        self.begin(
            UBatch(np.zeros_like(positions), positions, tuple(seqs), np.arange(0)),
            by_index=by_index,
        )
        read = {key: self._input(key) for key in self.layout.states}
        self._ubatch = None
        found = []
        for i, (n_tokens,) in enumerate(positions.tolist()):
            states = {key: rows[i] for key, rows in read.items()}
            for key, state in states.items():
                if not n_tokens:
                    states[key] = torch.zeros_like(state)
                elif not whole:
                    states[key] = self.layout.states[key].needed(state, n_tokens)
            found.append(states)
        return found

    def live(self, seq: int) -> dict[StateKey, Tensor]:
        """The logical states, in their recurrence's shapes, also while a rollback is pending."""
        return self.inputs((seq,))[0]

    def put(self, seq: int, pos: int, states: Mapping[StateKey, Tensor]) -> None:
        """Replace a sequence by these states with last position pos, without snapshots."""
        self._clear(seq)
        if pos >= 0:
            of = self.layout.states
            self._put(seq, {key: of[key].stored(state) for key, state in states.items()})
            self._pos[seq] = pos
            # what else these states have seen is unknown
            self._n_seen[seq] = pos + 1 + max(one.shape[0] for one in of.values())

    def save(self, seq: int, device: torch.device | None = None) -> RecurrentCheckpoint:
        """Copy the logical states to `device` (None: where they are)."""
        to = self.device if device is None else device
        states = {key: state.to(to, copy=True) for key, state in self.live(seq).items()}
        if "bf16-snapshots" in self.faults:
            kept = stored_as(self.layout, "bf16", "bf16").states
            states = {key: kept[key].stored(state) for key, state in states.items()}
        checkpoint = RecurrentCheckpoint(self.seq_pos_max(seq), states)
        self.traffic.saved += checkpoint.n_bytes
        return checkpoint

    def restore(self, seq: int, checkpoint: RecurrentCheckpoint) -> None:
        """Restore a checkpoint; pending rollbacks and snapshots are dropped."""
        self.put(seq, checkpoint.pos, checkpoint.states)
        self.traffic.restored += checkpoint.n_bytes

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self._n_bytes

    @cached_property
    def _n_bytes(self) -> int:
        # policies allocate in `_allocate` only
        return sum(t.nbytes for t in self._storage)

    def renew(self) -> None:
        """Reset to the initial state in the same storage."""
        self.traffic = RecurrentTraffic()
        self._pos = [-1] * self.n_seqs
        self._pending = [0] * self.n_seqs
        self._n_seen = [0] * self.n_seqs
        self._ubatch = None
        self._again, self._storage = self._storage[::-1], []
        self._allocate()

    def poison(self, value: float) -> None:
        """Fill storage, before anything is decoded, so that reads of uninitialised memory show."""
        for tensor in self._storage:
            tensor.fill_(value)

    def _zeros(self, *size: int) -> Tensor:
        """New float32 storage of zeros; after `renew`, the tensors of the first time in the same
        order."""
        zeros = self._again.pop().zero_() if self._again else _new_zeros(size, self.device)
        self._storage.append(zeros)
        return zeros

    def _rows_in_pool(
        self,
        states: Sequence[int],
        windows: Sequence[int],
        write: Sequence[Sequence[int]],
        carried: Sequence[int] = (),
        carried_to: Sequence[int] = (),
    ) -> PoolRows:
        """Row numbers on the device, in one upload. states, windows: [n_seqs], rows to start from.
        write: [n_seqs, n_new], newest first."""
        n, n_new = len(write), len(write[0])
        newest_first = [row for rows in write for row in rows]
        oldest_first = [row for rows in write for row in reversed(rows)]
        parts = states, windows, newest_first, oldest_first, carried, carried_to
        numbers = [row for part in parts for row in part]
        is_shared, sizes = self.device.type == "cpu", (n, n_new, len(carried))
        if is_shared and (known := self._pool_rows.get(sizes)):
            known.table.numpy()[:] = numbers
            return known
        table = upload(numbers, self.device)
        read, also, new, in_order, moving, to = table.split_with_sizes([len(x) for x in parts])
        written = new.view(n, n_new), in_order.view(n, n_new)
        rows = PoolRows(table, RowNumbers(read, *written), RowNumbers(also, *written), moving, to)
        if is_shared:
            self._pool_rows[sizes] = rows
        return rows

    def _clear(self, seq: int) -> None:
        self._forget(seq)
        self._pos[seq], self._pending[seq], self._n_seen[seq] = -1, 0, 0

    def _can_decode(self, ubatch: UBatch) -> bool:
        """Whether each row is a known sequence of its own; duplicates are refused."""
        seqs = ubatch.seq_ids
        known = all(0 <= seq < self.n_seqs for seq in seqs)
        return known and len(set(seqs)) == len(seqs) == ubatch.n_seqs


def _new_zeros(size: Sequence[int], device: torch.device) -> Tensor:
    """Zeros, float32. On the CPU, pages that are never written take no memory, so they are mapped
    lazily; torch would touch them at once."""
    if device.type != "cpu":
        return torch.zeros(size, device=device)
    n = math.prod(size)
    held = np.zeros(n + _LINE, np.float32)
    start = -(held.ctypes.data // held.itemsize) % _LINE
    return torch.from_numpy(held[start : start + n]).view(size)


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Rows of one pass in a pool, one tensor of states; int64, all views of `table`, which on the
    CPU is overwritten by the next pass of the same size.

    With views of storage the host chooses the rows, and a recording would repeat that choice. With
    row numbers on the device, two passes of the same shape differ in values only.

    windows: input rows of window states; states: of the others. carried, carried_to: [n], rows
    copied unchanged.
    """

    table: Tensor
    states: RowNumbers
    windows: RowNumbers
    carried: Tensor
    carried_to: Tensor

    def pass_inputs(self) -> PassInputs:
        """The shapes that a recording is bound to, and the table of rows it reads."""
        return PassInputs((self.states.write.shape, self.carried.shape), (self.table,))

    def advance(self, recurrence: Recurrence, pool: Tensor, inputs: RecurrenceInputs) -> Tensor:
        """Advance a recurrence from rows into rows of a pool [n_rows, *shape], copying carried
        ones."""
        carried = take_rows(pool, self.carried) if self.carried.numel() else None
        rows = self.windows if recurrence.is_window else self.states
        o = recurrence.by_index(inputs, pool, rows)
        if carried is not None:
            put_rows(pool, self.carried_to, carried)
        return o
