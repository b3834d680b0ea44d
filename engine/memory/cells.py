"""Bookkeeping of recurrent cells: which row of storage belongs to which sequences. No tensors.

The placement is that of llama.cpp's recurrent memory: the sequences of a ubatch are brought into
neighbouring cells by exchanging entries of the table, not rows of storage. Until the ubatch has
run, such a cell's state lies in another row (`src`); running it moves the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = -1


@dataclass(frozen=True, slots=True)
class UBatchCells:
    """Where one ubatch runs: row i of it writes cell first + i and reads cell sources[i].

    idle: the cells after theirs in the gather range; cells of sequences that only lie in between.
    zero: the cell that new sequences read, to be filled with zeros first; NONE if there are none.
    """

    first: int
    sources: tuple[int, ...]
    idle: range
    zero: int


class RecurrentCells:
    """One cell per sequence at most, shared by sequences that are copies of one another.

    tail[seq]: the cell of a sequence, NONE when it is empty. owners[cell]: its sequences.
    src[cell]: the row its state lies in, NONE for a new one; src0: the same as the last slot found
    it, for the forward pass. llama.cpp keeps positions here too, by cell; the policy keeps them by
    sequence, so that a shift of one owner leaves the others alone.
    """

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.head = 0
        self.tail = [NONE] * n_cells
        self.src = [NONE] * n_cells
        self.src0 = [NONE] * n_cells
        self.owners: list[set[int]] = [set() for _ in range(n_cells)]

    def copy(self) -> RecurrentCells:
        """An independent copy: for a dry run, and for a forward pass that may fail."""
        other = RecurrentCells(0)
        other.n_cells, other.head = self.n_cells, self.head
        other.tail = self.tail[:]
        other.src, other.src0 = self.src[:], self.src0[:]
        other.owners = [set(owners) for owners in self.owners]
        return other

    def find_slot(self, seqs: Sequence[int]) -> UBatchCells:
        """Place the sequences of a ubatch side by side.

        They are distinct and known. Every row of a ubatch is one sequence, so coupled sequences
        (one token in several) cannot be asked for.
        """
        if self.head > self.used() + 2 * len(seqs):
            self.head = 0
        for seq in seqs:
            if self.tail[seq] == NONE or self.shared(seq):
                self._move_out(seq)
        tails = [self.tail[seq] for seq in seqs]
        first, last = min(tails), max(tails)
        for cell, seq in enumerate(seqs, first):
            self._exchange(self.tail[seq], cell)
        zero = self._unreferenced(first, last)
        for cell in range(first, last + 1):
            if self.owners[cell]:
                self.src0[cell] = zero if self.src[cell] == NONE else self.src[cell]
                self.src[cell] = cell
        self.head = first
        active = range(first, first + len(seqs))
        return UBatchCells(
            first, tuple(self.src0[cell] for cell in active), range(active.stop, last + 1), zero
        )

    def settled(self, seqs: Sequence[int]) -> UBatchCells | None:
        """What `find_slot` would return where these sequences lie side by side in cells of their
        own with their states, so that it would change nothing but what `settle` does; else None."""
        first = self.tail[seqs[0]]
        stop = first + len(seqs)
        here = range(first, stop)
        tails = [self.tail[seq] for seq in seqs]
        if first == NONE or tails != [*here] or self.src[first:stop] != tails:
            return None
        if any(len(self.owners[cell]) > 1 for cell in here):
            return None
        return UBatchCells(first, tuple(tails), range(stop, stop), NONE)

    def settle(self, here: slice) -> None:
        """The sequences in these cells have decoded there."""
        self.head = here.start
        self.src0[here] = self.src[here]

    def shared(self, seq: int) -> bool:
        """Whether other sequences use the same cell."""
        tail = self.tail[seq]
        return tail != NONE and len(self.owners[tail]) > 1

    def used(self) -> int:
        """Cells that belong to a sequence."""
        return sum(map(bool, self.owners))

    def claim(self, seq: int) -> int:
        """A cell of its own for a sequence that has none, its state in that very row."""
        self._move_out(seq)
        cell = self.tail[seq]
        self.src[cell] = cell
        return cell

    def release(self, seq: int) -> None:
        """Take a sequence out of its cell; it is empty then."""
        tail = self.tail[seq]
        if tail != NONE:
            self.owners[tail].discard(seq)
            if not self.owners[tail]:
                self.src[tail] = NONE
        self.tail[seq] = NONE

    def seq_cp(self, src: int, dst: int) -> None:
        """dst shares the cell of src from now on."""
        if src == dst:
            return
        self.release(dst)
        tail = self.tail[src]
        if tail != NONE:
            self.owners[tail].add(dst)
            self.tail[dst] = tail

    def _move_out(self, seq: int) -> None:
        """Give a new sequence, or one that shares its cell, the next empty cell from head on.

        There is one: as many cells as sequences, and this sequence has none to itself.
        """
        cell = next(
            cell
            for cell in ((self.head + i) % self.n_cells for i in range(self.n_cells))
            if not self.owners[cell]
        )
        old = self.tail[seq]
        self.src[cell] = NONE if old == NONE else self.src[old]
        if old != NONE:
            self.owners[old].discard(seq)
        self.owners[cell].add(seq)
        self.tail[seq] = cell

    def _exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        self.src[a], self.src[b] = self.src[b], self.src[a]
        self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
        for cell in (a, b):
            for seq in self.owners[cell]:
                self.tail[seq] = cell

    def _unreferenced(self, first: int, last: int) -> int:
        """The first cell of a range whose row holds no state, if a new sequence needs one."""
        if all(self.src[c] != NONE for c in range(first, last + 1) if self.owners[c]):
            return NONE
        referenced = set(self.src)
        return next(cell for cell in range(first, last + 1) if cell not in referenced)
