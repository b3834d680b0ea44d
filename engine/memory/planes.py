"""Snapshot planes, for the policies `planes`, `carry` and `checkpoint`.

Every recurrent layer has K = R + 1 planes of n_cells rows; row plane * n_cells + cell is a state,
and plane r of a cell holds its sequence's state r tokens before the newest. A forward pass of n
tokens writes planes 0 .. min(n, K) - 1, then the older states that the policy carries over. A
rollback only records the plane that the next pass reads.

Plain planes (llama.cpp #22400): after a ubatch of n tokens planes 0 .. min(n, K) - 1 are fresh and
deeper ones are stale. Upstream accepts any rollback up to R; here only fresh planes count, so a
stale plane is never read, and a second rollback before the next ubatch is refused (single use).

Planes with a rolling carry (llama.cpp #25004): a ubatch of n < K tokens leaves K - n planes without
new states. They receive the newest states from before it, so history survives ubatches of any
length. Rollbacks accumulate until the next ubatch. The price is a copy of every carried state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import upload
from engine.machine.graphs import PassInputs
from engine.memory.cells import NONE, RecurrentCells, UBatchCells
from engine.memory.recurrent import PoolRows, SnapshotPolicy, SnapshotSlot
from engine.model.recurrence import RecurrenceInputs, StateKey
from engine.model.recurrent_states import stored_as

# (planes, cells) if the rows are neighbours: a view; else int64 row numbers: a copy
PlaneRows = tuple[int | slice, slice] | Tensor

_FREE: tuple[str, int | None] = ("free", None)
_NEWEST: tuple[str, int | None] = ("fresh", 0)
_FOREIGN: tuple[str, int | None] = ("stale", None)


@dataclass(slots=True)
class _Step:
    """One forward pass between `begin` and `commit`.

    cells: the bookkeeping after it, or the current one if sequences stay in place. here: cells
    written. n_fresh: planes written with new states. depths, n_carried: by row, the depth after the
    pass and how many older states are carried over. states, windows: input rows, of windows and of
    other states. carried: rows carried over, None if there are none. moves: rows from and to which
    the states of idle cells move; moved: their sequences. numbers: replaces these rows if the pass
    takes row numbers from the device.
    """

    cells: RecurrentCells
    seqs: tuple[int, ...]
    n_tokens: int
    n_fresh: int
    depths: list[int]
    n_carried: list[int]
    here: slice
    zero: int
    states: PlaneRows | None
    windows: PlaneRows | None
    carried: PlaneRows | None
    moves: tuple[Tensor, Tensor] | None
    moved: list[int]
    numbers: PoolRows | None


class PlaneMemory(SnapshotPolicy):
    """A policy defines how deep a rollback may be now (valid_depth) and after a pass
    (guaranteed_depth); older states up to that depth are carried over.

    While sequences share a cell (seq_cp), partial rollbacks of any of them are refused, because the
    owners of one row would need different plane indices. Full removal is possible. The first owner
    to decode takes a cell of its own, without a copy of the state.
    """

    def _allocate(self) -> None:
        if "bf16-snapshots" in self.faults:
            self.layout = stored_as(self.layout, older="bf16")
        layout, n_seqs = self.layout, self.n_seqs
        self.cells = RecurrentCells(n_seqs)
        self._n_planes = self.n_rs_seq + 1
        self._states = {
            key: self._zeros(self._n_planes, n_seqs, *one.shape)
            for key, one in layout.states.items()
        }
        # by sequence: deepest valid rollback, and the deepest plane that one reads
        self._depth = [0] * n_seqs
        self._deepest = [0] * n_seqs
        self._planes = [[_FREE] * self._n_planes for _ in range(n_seqs)]
        self._step: _Step | None = None
        self._numbered: tuple[tuple[int, ...], PoolRows | None] = (), None

    def _begin(self, ubatch: UBatch, by_index: bool) -> None:
        cells, seqs = self.cells, ubatch.seq_ids
        slot = cells.settled(seqs)
        if slot is None:
            cells = cells.copy()
            slot = cells.find_slot(seqs)
        n = ubatch.n_seq_tokens
        depths = [self.guaranteed_depth(seq, n) for seq in seqs]
        n_carried = [self._n_carried(depth, n) for depth in depths]
        read = [self._plane(seq) for seq in seqs]
        newest = [0] * len(seqs) if "no-conv-rollback" in self.faults else read
        moves, moved = self._moves(cells, slot)
        at_home = slot.sources == tuple(range(slot.first, slot.first + len(seqs)))
        numbers = states = windows = carried = None
        if by_index and at_home and slot.zero == NONE and not moves:
            numbers = self._numbers(slot.sources, read, newest, n, n_carried)
        else:
            states = self._rows(slot, read)
            windows = states if newest is read else self._rows(slot, newest)
            carried = self._carried_rows(slot, read, n_carried, n)
        self._step = _Step(
            cells,
            seqs,
            n,
            min(n, self._n_planes),
            depths,
            n_carried,
            slice(slot.first, slot.first + len(seqs)),
            slot.zero,
            states,
            windows,
            carried,
            moves,
            moved,
            numbers,
        )

    def pass_inputs(self) -> PassInputs | None:
        numbers = self._running().numbers
        return numbers.pass_inputs() if numbers else None

    def repeats(self) -> bool:
        return self._n_planes == 1 and not self.faults and self._running().numbers is not None

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> Tensor:
        step, planes, recurrence = self._running(), self._states[key], self.layout.states[key]
        if step.numbers:
            return step.numbers.advance(recurrence, planes.flatten(0, 1), inputs)
        start, carried = self._collect(step, planes, recurrence.is_window)
        slots = planes[: step.n_fresh, step.here].unbind(0)
        o = recurrence.into(inputs, start, slots, invariant=self.batch_invariant)
        if carried is not None:
            planes[step.n_tokens : step.n_tokens + len(carried), step.here] = carried
        return o

    def _commit(self, ubatch: UBatch) -> None:
        step = self._running()
        own = [self.cells.tail[seq] == step.cells.tail[seq] for seq in step.seqs]
        if step.cells is self.cells:
            self.cells.settle(step.here)
        self.cells = step.cells
        for seq in step.moved:
            self._pending[seq] = self._depth[seq] = self._deepest[seq] = 0
            self._planes[seq] = [_NEWEST] + [_FOREIGN] * self.n_rs_seq
        for row, seq in enumerate(step.seqs):
            self._planes[seq] = self._written(seq, step, step.n_carried[row], own[row])
            self._depth[seq] = step.depths[row]
            self._deepest[seq] = step.n_fresh + step.n_carried[row] - 1
        n_moved = step.moves[0].numel() if step.moves else 0
        self.traffic.written += step.n_fresh * len(step.seqs) * self.layout.n_bytes
        self.traffic.copied += (sum(step.n_carried) + n_moved) * self.layout.n_bytes

    def _move_cursor(self, seq: int, depth: int) -> None:
        super()._move_cursor(seq, depth - ("plane-off-by-one" in self.faults))

    def _n_carried(self, depth: int, n_tokens: int) -> int:
        """Older states carried over in a pass of n_tokens, for this depth afterwards."""
        return max(0, depth - n_tokens + 1)

    def _plane(self, seq: int) -> int:
        """The plane that the next pass reads."""
        pending = self._pending[seq]
        return pending if "stale-plane" in self.faults else min(pending, self._deepest[seq])

    def _share(self, src: int, dst: int) -> None:
        self.cells.seq_cp(src, dst)
        self._depth[dst], self._planes[dst] = self._depth[src], self._planes[src][:]
        self._deepest[dst] = self._deepest[src]

    def _input(self, key: StateKey) -> Tensor:
        step, planes = self._running(), self._states[key]
        is_window = self.layout.states[key].is_window
        if step.numbers:
            rows = step.numbers.windows if is_window else step.numbers.states
            return _pick(planes, rows.read)
        return _pick(planes, step.windows if is_window else step.states)

    def _put(self, seq: int, states: Mapping[StateKey, Tensor]) -> None:
        cell = self.cells.claim(seq)
        self._planes[seq][0] = _NEWEST
        for key, planes in self._states.items():
            planes[0, cell] = states[key]

    def slots(self, seq: int) -> Sequence[SnapshotSlot]:
        is_held = self.cells.tail[seq] != NONE
        return _slots(tuple(self._planes[seq]), self._plane(seq), self._pending[seq], is_held)

    def kept(self, seq: int, key: StateKey) -> list[Tensor]:
        tail, first = self.cells.tail[seq], self._plane(seq)
        if tail == NONE:
            return []
        planes = self._states[key][:, self.cells.src[tail]]
        return [planes[first], *planes[:first], *planes[first + 1 :]]

    def _forget(self, seq: int) -> None:
        self.cells.release(seq)
        self._depth[seq] = self._deepest[seq] = 0
        self._planes[seq] = [_FREE] * self._n_planes

    def _running(self) -> _Step:
        assert self._step is not None  # begin comes first
        return self._step

    def _rows(self, slot: UBatchCells, read: Sequence[int]) -> PlaneRows:
        """The rows of the ubatch's input, one per sequence, in these planes."""
        here = range(slot.first, slot.first + len(read))
        if slot.sources == tuple(here) and len(set(read)) == 1:
            return read[0], slice(here.start, here.stop)
        rows = [p * self.n_seqs + c for p, c in zip(read, slot.sources, strict=True)]
        return self._row_numbers(rows)

    def _carried_rows(
        self, slot: UBatchCells, read: Sequence[int], n_carried: Sequence[int], n: int
    ) -> PlaneRows | None:
        """The rows that become planes n, n + 1, … of the cells written: [n_planes, n_seqs]."""
        n_planes = max(n_carried)
        if n_planes == 0:
            return None
        here = range(slot.first, slot.first + len(read))
        if slot.sources == tuple(here) and len(set(read)) == len(set(n_carried)) == 1:
            return slice(read[0], read[0] + n_planes), slice(here.start, here.stop)
        rows = [
            (p + i) * self.n_seqs + source if i < count else (n + i) * self.n_seqs + cell
            for i in range(n_planes)
            for p, source, cell, count in zip(read, slot.sources, here, n_carried, strict=True)
        ]  # a sequence with less to carry keeps the contents of its deeper planes
        return self._row_numbers(rows).view(n_planes, len(read))

    def _numbers(
        self,
        cells: Sequence[int],
        states: Sequence[int],
        windows: Sequence[int],
        n: int,
        n_carried: Sequence[int],
    ) -> PoolRows:
        """Row numbers of a pass whose sequences stay in these cells and read these planes."""
        # every token of plain decoding uses the same ones
        key = (*cells, *states, *windows, n, *n_carried)
        if self._numbered[0] == key and self._numbered[1] is not None:
            return self._numbered[1]

        def rows(planes: Iterable[int], cells: Iterable[int]) -> list[int]:
            return [plane * self.n_seqs + cell for plane, cell in zip(planes, cells, strict=True)]

        fresh = range(min(n, self._n_planes))
        carried = [
            (plane + i, n + i, cell)
            for plane, cell, count in zip(states, cells, n_carried, strict=True)
            for i in range(count)
        ]
        start, to, where = zip(*carried, strict=True) if carried else ((), (), ())
        found = self._rows_in_pool(
            rows(states, cells),
            rows(windows, cells),
            [rows(fresh, [cell] * len(fresh)) for cell in cells],
            rows(start, where),
            rows(to, where),
        )
        self._numbered = key, found
        return found

    def _moves(
        self, cells: RecurrentCells, slot: UBatchCells
    ) -> tuple[tuple[Tensor, Tensor] | None, list[int]]:
        """Rows to copy (from, to) so that the states of idle cells lie in plane 0, and the
        sequences that own them."""
        start: list[int] = []
        to: list[int] = []
        moved: list[int] = []
        for cell in slot.idle:
            owners, source = cells.owners[cell], cells.src0[cell]
            if not owners:
                continue
            idx = self._plane(min(owners))
            if source != cell or idx:
                start.append(idx * self.n_seqs + source)
                to.append(cell)
                moved.extend(owners)
        return (self._row_numbers(start), self._row_numbers(to)) if to else None, moved

    def _row_numbers(self, rows: list[int]) -> Tensor:
        return upload(rows, self.device)

    def _collect(
        self, step: _Step, planes: Tensor, is_window: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gather everything that is read before anything is written, then move the idle states.

        The input may be a view: idle states do not move into the ubatch's own cells.
        """
        if step.zero != NONE:
            planes[0, step.zero] = 0.0
        taken = _pick(planes, step.windows if is_window else step.states)
        carried = None
        if step.carried is not None:
            carried = _pick(planes, step.carried)
            if not isinstance(step.carried, Tensor):
                carried = carried.clone()
        if step.moves:
            flat, (start, to) = planes.flatten(0, 1), step.moves
            flat[to] = flat[start]
        return taken, carried

    def _written(
        self, seq: int, step: _Step, n_carried: int, own: bool
    ) -> list[tuple[str, int | None]]:
        """The planes of a sequence after a pass; `own`: it stayed in its cell."""
        n, fresh = step.n_tokens, step.n_fresh
        kept = fresh + n_carried
        planes: list[tuple[str, int | None]] = [("fresh", r) for r in range(fresh)]
        planes += [("carried", r) for r in range(fresh, kept)]
        for name, age in self._planes[seq][kept:]:
            if name == "free":
                planes.append(_FREE)
            elif own and age is not None and age >= self._pending[seq]:
                planes.append(("stale", age + n - self._pending[seq]))
            else:
                planes.append(_FOREIGN)  # of rejected tokens, or of another sequence
        return planes


@functools.lru_cache(256)
def _slots(
    planes: tuple[tuple[str, int | None], ...], read: int, pending: int, is_held: bool
) -> tuple[SnapshotSlot, ...]:
    """Slots of a sequence whose next pass reads the plane `read`; few combinations occur."""
    found = [SnapshotSlot(r, name, age) for r, (name, age) in enumerate(planes)]
    if is_held:
        # a plane that also serves a shorter text is as good as that text's own
        age = found[read].age if read == pending else pending
        found[read] = SnapshotSlot(read, "pending" if pending else "live", age)
    return tuple(found)


class PlanesMemory(PlaneMemory):
    """K = n_rs_seq + 1 planes, of which one ubatch's own states are worth reading."""

    def valid_depth(self, seq: int) -> int:
        if self._pending[seq] or self.cells.shared(seq):
            return 0
        return self.n_rs_seq if "stale-plane" in self.faults else self._depth[seq]

    def guaranteed_depth(self, seq: int, n_last: int, n_first: int = 0) -> int:
        n_before = self.seq_pos_max(seq) + 1 + n_first
        if n_last > self.n_rs_seq or not n_before or not self.layout.by_position:
            return min(n_last, self._n_planes) - 1
        return n_last + self._spare(seq, n_before, n_last)

    def _n_carried(self, depth: int, n_tokens: int) -> int:
        # at most the state before the pass, which serves everything deeper
        return int(depth >= n_tokens)


class CarryMemory(PlaneMemory):
    """K = n_rs_seq + 1 planes; per sequence idx <= D <= R, D the deepest truthful plane."""

    accumulates = True

    def valid_depth(self, seq: int) -> int:
        return 0 if self.cells.shared(seq) else self._depth[seq] - self._pending[seq]

    def guaranteed_depth(self, seq: int, n_last: int, n_first: int = 0) -> int:
        return min(self.n_rs_seq, max(0, self._depth[seq] - self._pending[seq]) + n_last)


def _pick(planes: Tensor, rows: PlaneRows | None) -> Tensor:
    assert rows is not None  # None in a pass by row numbers
    return planes.flatten(0, 1)[rows] if isinstance(rows, Tensor) else planes[rows]
