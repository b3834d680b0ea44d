"""A base state plus a log of the last tokens, folded into the base once they are final (ReplaySSM;
WY form of the delta rule).

Of the last ubatch's tokens, at most L = R + 1, memory keeps what their layer's recurrence logs: (k,
u, g) and the convolution row. A rollback moves a cursor in that log. The next ubatch folds the
tokens before the cursor into the base, in one product, and starts a new log: the deferred commit. A
draft token needs d_k + d_v + 1 numbers per head, where a snapshot needs d_k * d_v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import upload
from engine.machine.graphs import PassInputs
from engine.memory.recurrent import SnapshotPolicy, SnapshotSlot
from engine.model.recurrence import RecurrenceInputs, StateKey
from kernels.rows import copy_rows

StateRows = slice | Tensor
"""Storage rows as a slice (a view) or as an index."""


_Fold = tuple[int | Tensor, int]
"""Logged tokens to fold into the base (one number if equal for all sequences), and how many log
entries to read for that."""


@dataclass(slots=True)
class _ReplayPlan:
    """Plan of one ubatch.

    row_of: every sequence's row afterwards. src, dst: rows to read and to write. moved: per
    sequence, whether these differ. new: rows that start from zeros. cursors: per sequence, logged
    tokens committed now. states, windows: folds for windows and for other states. n_early: tokens
    too old for the log; n_kept: tokens that are logged. fixed: whether counts are on the device and
    everything else is constant for passes of these rows.
    """

    row_of: np.ndarray
    src: StateRows
    dst: StateRows
    moved: list[bool]
    new: StateRows | None
    cursors: list[int]
    states: _Fold
    windows: _Fold
    n_early: int
    n_kept: int
    fixed: bool


class ReplayMemory(SnapshotPolicy):
    """Per state n_seqs rows, each a base and a log of L tokens.

    Sequences may share a row and then differ in their cursors only; one that decodes moves out
    first. n_rs_seq = 0 means a single state and one logged token.
    """

    def _allocate(self) -> None:
        layout, n_seqs = self.layout, self.n_seqs
        self._n_log = self.n_rs_seq + 1
        states = layout.states.items()
        self._bases = {key: self._zeros(n_seqs, *one.shape) for key, one in states}
        self._logs = {
            key: tuple(self._zeros(n_seqs, self._n_log, *size) for size in one.entry)
            for key, one in states
        }
        self._row = np.full(n_seqs, -1, np.int64)
        self._n_logged = [0] * n_seqs
        self._plan: _ReplayPlan  # _begin() makes it

    def _begin(self, ubatch: UBatch, by_index: bool) -> None:
        row_of, src, dst, new = self._row.copy(), [], [], []
        for seq in ubatch.seq_ids:
            row = int(row_of[seq])
            if row < 0 or np.count_nonzero(row_of == row) > 1:
                row_of[seq] = self._free_row(row_of, seq)
            dst.append(int(row_of[seq]))
            # a new sequence reads its own row, which is cleared first
            src.append(dst[-1] if row < 0 else row)
            if row < 0:
                new.append(dst[-1])
        side_by_side = src == dst == list(range(src[0], src[0] + len(src)))
        as_views = side_by_side or len(src) == 1
        n_kept = min(ubatch.n_seq_tokens, self._n_log)
        n_early = ubatch.n_seq_tokens - n_kept
        # moved rows, new rows and early tokens need further steps
        fixed = by_index and src == dst and as_views and not new and not n_early
        cursors = [self._cursor(seq) for seq in ubatch.seq_ids]
        states = windows = self._fold_of(cursors, fixed)
        if "no-conv-rollback" in self.faults:
            windows = self._fold_of([self._n_logged[seq] for seq in ubatch.seq_ids], fixed)
        self._plan = _ReplayPlan(
            row_of,
            self._rows(src, as_views),
            self._rows(dst, as_views),
            [a != b for a, b in zip(src, dst, strict=True)],
            self._rows(new, False) if new else None,
            cursors,
            states,
            windows,
            n_early,
            n_kept,
            fixed,
        )

    def pass_inputs(self) -> PassInputs | None:
        plan = self._plan
        if not plan.fixed:
            return None
        counts = (plan.states[0], plan.windows[0])[: 1 + (plan.windows is not plan.states)]
        first = plan.dst.start if isinstance(plan.dst, slice) else None
        return PassInputs((first, plan.n_kept), tuple(x for x in counts if isinstance(x, Tensor)))

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> Tensor:
        recurrence, plan, invariant = self.layout.states[key], self._plan, self.batch_invariant
        bases, log = self._bases[key], self._logs[key]
        if plan.new is not None:
            bases[plan.new] = 0.0
        state = self._committed(key)
        outputs = []
        if plan.n_early:
            # early tokens are decoded into the base
            base = bases[plan.dst] if isinstance(plan.dst, slice) else state
            early = inputs.part(slice(None), slice(plan.n_early))
            outputs.append(recurrence.into(early, state, [base], invariant=invariant))
            inputs = inputs.part(slice(None), slice(plan.n_early, None))
            state = base
        o, new = recurrence.log(inputs, state, invariant=invariant)
        if not isinstance(plan.dst, slice):
            bases[plan.dst] = state
        for stored, rows in zip(log, new, strict=True):
            if isinstance(plan.dst, slice):
                copy_rows(stored[plan.dst, : plan.n_kept], rows)
            else:
                stored[plan.dst, : plan.n_kept] = rows
        return torch.cat((*outputs, o), 1) if outputs else o

    def _committed(self, key: StateKey) -> Tensor:
        """The input states of this ubatch: in storage if rows are views, else gathered.

        Storage that early tokens will overwrite is not written now.
        """
        bases, plan = self._bases[key], self._plan
        in_storage, temporary = isinstance(plan.dst, slice), plan.n_early > 0
        state = bases[plan.src]
        target = bases[plan.dst] if in_storage else state
        if self._to_fold(key)[1] == 0:
            return target.copy_(state) if any(plan.moved) and not temporary else state
        return self._folded(key, state, None if temporary and in_storage else target)

    def _to_fold(self, key: StateKey) -> _Fold:
        return self._plan.windows if self.layout.states[key].is_window else self._plan.states

    def _folded(self, key: StateKey, state: Tensor, out: Tensor | None = None) -> Tensor:
        """The bases of this ubatch's rows with the tokens before the cursors folded in."""
        counts, n_read = self._to_fold(key)
        read = [rows[self._plan.src, :n_read] for rows in self._logs[key]]
        recurrence = self.layout.states[key]
        return recurrence.fold(state, read, counts, out=out, invariant=self.batch_invariant)

    def _commit(self, ubatch: UBatch) -> None:
        plan, layout = self._plan, self.layout
        for moved, n_commit in zip(plan.moved, plan.cursors, strict=True):
            if n_commit or plan.n_early:
                self.traffic.written += layout.n_bytes
            elif moved:
                self.traffic.copied += layout.n_bytes
            self.traffic.written += layout.entry_bytes * plan.n_kept
        self._row = plan.row_of
        for seq in ubatch.seq_ids:
            self._n_logged[seq] = plan.n_kept

    def valid_depth(self, seq: int) -> int:
        logged, pending = self._n_logged[seq], self._pending[seq]
        if logged >= self.n_rs_seq:
            return self.n_rs_seq - pending
        n_base = self.seq_pos_max(seq) + 1 + pending - logged
        return logged + self._spare(seq, n_base, logged) - pending

    def guaranteed_depth(self, seq: int, n_last: int, n_first: int = 0) -> int:
        if n_last >= self.n_rs_seq:
            return self.n_rs_seq
        return n_last + self._spare(seq, self.seq_pos_max(seq) + 1 + n_first, n_last)

    def _input(self, key: StateKey) -> Tensor:
        state = self._bases[key][self._plan.src]
        return self._folded(key, state) if self._to_fold(key)[1] else state

    def _put(self, seq: int, states: Mapping[StateKey, Tensor]) -> None:
        row = self._free_row(self._row, seq)
        for key, bases in self._bases.items():
            bases[row] = states[key]
        self._row[seq] = row

    def slots(self, seq: int) -> list[SnapshotSlot]:
        """Slot 0 is the base, slot i the state after i logged tokens."""
        found = []
        logged, at, empty = self._n_logged[seq], self._cursor(seq), self._row[seq] < 0
        for slot in range(self._n_log + 1):
            if empty or slot > logged:
                found.append(SnapshotSlot(slot, "free", None))
                continue
            name = "stale" if slot > at else "fresh" if slot else "carried"
            if slot == at:
                name = "pending" if self._pending[seq] else "live"
            age = max(logged - slot, self._pending[seq]) if slot == at else logged - slot
            found.append(SnapshotSlot(slot, name, age))
        return found

    def kept(self, seq: int, key: StateKey) -> list[Tensor]:
        """The base with the log folded in up to the cursor, then with less or more."""
        row, at = int(self._row[seq]), self._cursor(seq)
        if row < 0:
            return []
        base, log = self._bases[key][row : row + 1], [x[row : row + 1] for x in self._logs[key]]
        fold = self.layout.states[key].fold
        others = (n for n in range(self._n_logged[seq] + 1) if n != at)
        return [fold(base, log, n)[0] if n else base[0] for n in (at, *others)]

    def _cursor(self, seq: int) -> int:
        # beyond the log the base serves, where state rows go by position
        return max(0, self._n_logged[seq] - self._pending[seq])

    def _rows(self, rows: list[int], as_views: bool) -> StateRows:
        if as_views:
            return slice(rows[0], rows[0] + len(rows))
        return upload(rows, self.device)

    def _fold_of(self, counts: list[int], on_device: bool) -> _Fold:
        if on_device:
            return upload(counts, self.device), self._n_log
        if min(counts) == max(counts):  # a single number needs no mask
            return counts[0], counts[0]
        return upload(counts, self.device), max(counts)

    @staticmethod
    def _free_row(rows: np.ndarray, seq: int) -> int:
        """A row without a sequence, preferably the sequence's own number."""
        if seq not in rows:
            return seq
        return next(row for row in range(len(rows)) if row not in rows)

    def _forget(self, seq: int) -> None:
        self._row[seq], self._n_logged[seq] = -1, 0

    def _share(self, src: int, dst: int) -> None:
        self._row[dst], self._n_logged[dst] = self._row[src], self._n_logged[src]
