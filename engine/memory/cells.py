"""Cell bookkeeping: which storage row belongs to which sequences. No tensors.

Placement follows llama.cpp's recurrent memory: the sequences of a ubatch are moved to adjacent
cells by swapping table entries, not storage rows. Until the ubatch has run, the state of such a
cell is in another row (`src`); running it moves the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ContextFullError, OptionError

NONE = -1


@dataclass(frozen=True, slots=True)
class UBatchCells:
    """Placement of one ubatch: row i writes cell first + i and reads cell sources[i].

    idle: further cells in the gather range, of sequences that are not in the ubatch. zero: the cell
    that new sequences read, to be filled with zeros first; NONE if there are none.
    """

    first: int
    sources: tuple[int, ...]
    idle: range
    zero: int


class RecurrentCells:
    """At most one cell per sequence; sequences that are copies of each other share one.

    tail[seq]: the cell of a sequence, NONE when it is empty. owners[cell]: its sequences.
    src[cell]: the row that holds its state, NONE for a new one; src0: src as of the last find_slot,
    for the forward pass. llama.cpp also keeps positions per cell; here the policy keeps them per
    sequence, so that a shift of one owner does not affect the others.
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
        """Place the sequences of a ubatch in adjacent cells.

        They are distinct and known. Every row of a ubatch is one sequence, so coupled sequences
        (one token in several) do not occur.
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
        """The result of `find_slot` if these sequences already are in adjacent cells of their own
        with their states, so that nothing but `settle` would change; else None."""
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
        """Note that the sequences in these cells have decoded in place."""
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
        """Give a sequence without a cell one of its own, with its state in the same row."""
        self._move_out(seq)
        cell = self.tail[seq]
        self.src[cell] = cell
        return cell

    def release(self, seq: int) -> None:
        """Remove a sequence from its cell; the sequence is empty afterwards."""
        tail = self.tail[seq]
        if tail != NONE:
            self.owners[tail].discard(seq)
            if not self.owners[tail]:
                self.src[tail] = NONE
        self.tail[seq] = NONE

    def seq_cp(self, src: int, dst: int) -> None:
        """Let dst share the cell of src."""
        if src == dst:
            return
        self.release(dst)
        tail = self.tail[src]
        if tail != NONE:
            self.owners[tail].add(dst)
            self.tail[dst] = tail

    def _move_out(self, seq: int) -> None:
        """Give a new sequence, or one that shares its cell, the next empty cell from head on.

        There always is one: there are as many cells as sequences, and this one has none to itself.
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


MAX_SEQS = 64
UNKNOWN = -1
"""Token id of cells whose contents were copied in without their tokens."""
_NOBODY = np.uint64(0)
_BITS = np.uint64(1) << np.arange(MAX_SEQS, dtype=np.uint64)


class CellTable:
    """Cells of all streams, each with a position and its owners, one bit per sequence.

    end[stream]: one above the last cell in use. used[stream]: cells in use. is_rising[stream]:
    whether it is known to be one sequence's with positions rising from cell to cell, so that no
    search is needed. In ranges of positions, negative p0 means 0 and negative p1 no end.
    """

    def __init__(self, n_seqs: int, n_ctx: int, *, unified: bool) -> None:
        if n_seqs > MAX_SEQS:
            raise OptionError(
                f"{n_seqs} sequences are more than the {MAX_SEQS} that can share a cell.",
                f"Use --parallel {MAX_SEQS} or less.",
            )
        self.n_seqs, self.unified = n_seqs, unified
        self.n_streams = 1 if unified else n_seqs
        self.n_cells = n_ctx * n_seqs if unified else n_ctx
        self._cell_numbers = np.arange(self.n_cells)
        # meaningless in cells without owners
        self._pos = np.zeros((self.n_streams, self.n_cells), np.int64)
        self._owners = np.zeros((self.n_streams, self.n_cells), np.uint64)
        self._tokens = np.full((self.n_streams, self.n_cells), UNKNOWN, np.int64)
        self.end = [0] * self.n_streams
        self.used = [0] * self.n_streams
        self.is_rising = [not unified] * self.n_streams

    def stream(self, seq: int) -> int:
        """The stream that holds a sequence."""
        return 0 if self.unified else seq

    def find(self, seqs: Sequence[int], n: int) -> np.ndarray:
        """n free cells for each sequence, int64 [len(seqs), n]; they are not taken yet.

        Raises ContextFullError.
        """
        if self.unified:
            return self._find(0, n * len(seqs)).reshape(len(seqs), n)
        if len(seqs) == 1:
            return self._find(seqs[0], n)[None]
        return np.stack([self._find(seq, n) for seq in seqs])

    def fits(self, demand: Iterable[tuple[int, int]]) -> bool:
        """Whether these sequences could get this many new cells, one after the other."""
        left = [self.n_cells - used for used in self.used]
        for seq, n in demand:
            if not 0 <= seq < self.n_seqs:
                return False
            left[self.stream(seq)] -= n
        return min(left) >= 0

    def take(
        self, seqs: Sequence[int], cells: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Give found cells to the sequences. cells, positions, tokens: int64 [len(seqs), n],
        n >= 1; tokens may be UNKNOWN."""
        for seq, row, pos, ids in zip(seqs, cells, positions, tokens, strict=True):
            stream = self.stream(seq)
            first, stop = int(row[0]), int(row[-1]) + 1
            # a slice for neighbours takes a third of the time
            where = slice(first, stop) if stop - first == row.size else row
            if self.is_rising[stream]:
                self.is_rising[stream] = self._continues(stream, first, stop, pos)
            self._pos[stream, where] = pos
            self._tokens[stream, where] = ids
            self._owners[stream, where] = _BITS[seq]
            self.used[stream] += row.size
            self.end[stream] = max(self.end[stream], stop)

    def is_in_order(self, stream: int) -> bool:
        """Whether a stream is known to rise without gaps; False proves nothing."""
        return self.is_rising[stream] and self.used[stream] == self.end[stream]

    def _continues(self, stream: int, first: int, stop: int, positions: np.ndarray) -> bool:
        """Whether cells first .. stop - 1 with these positions extend a stream in order."""
        n, end = positions.size, self.end[stream]
        if first != end or stop - first != n or self.used[stream] != end:
            return False
        if end and positions[0] <= self._pos[stream, end - 1]:
            return False
        return n == 1 or bool((positions[1:] > positions[:-1]).all())

    def last_position(self, seq: int) -> int | None:
        """Highest position of a sequence that rises without gaps, -1 when it is empty; None where a
        search is needed."""
        stream = 0 if self.unified else seq
        end = self.end[stream]
        if not self.is_rising[stream] or self.used[stream] != end:
            return None
        return int(self._pos[stream, end - 1]) if end else -1

    def seen(self, seqs: Sequence[int], cells: np.ndarray, n: int) -> np.ndarray | None:
        """`visible` without a window for the newest tokens, which have these cells [len(seqs), T];
        None where a search is needed."""
        for seq in seqs:
            if not self.is_in_order(self.stream(seq)):
                return None
        found: np.ndarray = self._cell_numbers[:n] <= cells[:, :, None]
        return found

    def visible(
        self,
        seqs: Sequence[int],
        positions: np.ndarray,
        n: int,
        window: int | None = None,
        *,
        ahead: bool = False,
    ) -> np.ndarray:
        """Mask of the first n cells that each token attends to: those of its sequence up to its
        position, and with a window fewer than that many positions back.

        positions: int64 [len(seqs), T]. ahead: later positions too. Returns bool [len(seqs), T, n].
        """
        rows = self._rows(seqs)
        own = ((self._owners[rows, :n] & _BITS[list(seqs), None]) != _NOBODY)[:, None]
        held, seen_from = self._pos[rows, None, :n], positions[:, :, None]
        seen = own | np.zeros_like(seen_from, bool) if ahead else own & (held <= seen_from)
        return seen if window is None else seen & (held > seen_from - window)

    def cell_positions(self, seqs: Sequence[int], n: int) -> np.ndarray:
        """Positions in the first n cells of every sequence's stream, int64 [len(seqs), n]; any
        number in cells that are not its own."""
        return np.array(np.broadcast_to(self._pos[self._rows(seqs), :n], (len(seqs), n)))

    def holding(self, seq: int, p0: int = 0, p1: int = -1) -> np.ndarray:
        """Cells of a sequence with p0 <= position < p1, ascending."""
        stream = self.stream(seq)
        end = self.end[stream]
        if self.is_in_order(stream):
            held = self._pos[stream, :end]
            first = int(held.searchsorted(p0)) if p0 > 0 else 0
            return self._cell_numbers[first : int(held.searchsorted(p1)) if p1 >= 0 else end]
        wanted = (self._owners[stream, :end] & _BITS[seq]) != _NOBODY
        if p0 > 0:
            wanted &= self._pos[stream, :end] >= p0
        if p1 >= 0:
            wanted &= self._pos[stream, :end] < p1
        return np.flatnonzero(wanted)

    def positions(self, seq: int, cells: np.ndarray | None = None) -> np.ndarray:
        """Positions in these cells of a sequence's stream (None: in all that it holds).

        May be a view, valid until the next change.
        """
        stream = self.stream(seq)
        if cells is not None:
            return self._pos[stream, cells]
        if not self.unified and self.used[stream] == self.end[stream]:  # no gaps, no others
            return self._pos[stream, : self.end[stream]]
        return self._pos[stream, self.holding(seq)]

    def tokens(self, seq: int, cells: np.ndarray) -> np.ndarray:
        """Tokens in these cells of a sequence's stream."""
        return self._tokens[self.stream(seq), cells]

    def learn(self, seq: int, p0: int, tokens: Sequence[int]) -> None:
        """Put tokens into the cells of a sequence from position p0 on."""
        stream, cells = self.stream(seq), self.holding(seq, p0, p0 + len(tokens))
        self._tokens[stream, cells] = np.array(tokens)[self._pos[stream, cells] - p0]

    def shared(self, seq: int, cells: np.ndarray) -> np.ndarray:
        """Which of these cells of a sequence belong to another sequence too, [n]."""
        return cells[self._owners[self.stream(seq), cells] != _BITS[seq]]

    def release(self, seq: int, cells: np.ndarray) -> None:
        """Remove a sequence from these cells; cells without owners are free."""
        if cells.size:
            stream = self.stream(seq)
            first, end = int(cells[0]), self.end[stream]
            least = int(np.minimum.reduce(cells))
            if self.is_in_order(stream) and end - first == cells.size == end - least:
                self._owners[stream, first:end] = _NOBODY
                self.used[stream] = self.end[stream] = first
                return
            self._owners[stream, cells] &= ~_BITS[seq]
            self._recount(stream)

    def keep(self, seq: int) -> None:
        """Remove every other sequence from all cells."""
        self._owners &= _BITS[seq]
        for stream in range(self.n_streams):
            self._recount(stream)

    def copy(self, src: int, dst: int) -> None:
        """Make dst an owner of all cells of src; in another stream, dst gets copies of them.

        dst must be empty.
        """
        cells, source, stream = self.holding(src), self.stream(src), self.stream(dst)
        self._pos[stream, cells] = self._pos[source, cells]
        self._tokens[stream, cells] = self._tokens[source, cells]
        self._owners[stream, cells] |= _BITS[dst]
        self.is_rising[stream] &= self.is_rising[source] and not self.used[stream]
        self._recount(stream, self.end[source])

    def shift(self, seq: int, cells: np.ndarray, shift: int) -> None:
        """Move the positions in these cells of a sequence's stream."""
        self._pos[self.stream(seq), cells] += shift
        self.is_rising[self.stream(seq)] = False

    def _rows(self, seqs: Sequence[int]) -> slice | np.ndarray:
        """Index of the sequences' streams; a unified pool has one."""
        first = self.stream(seqs[0])
        alone = self.unified or len(seqs) == 1
        return slice(first, first + 1) if alone else np.asarray(seqs)

    def _find(self, stream: int, n: int) -> np.ndarray:
        end, used = self.end[stream], self.used[stream]
        if used + n > self.n_cells:
            whose = "The pool of all sequences" if self.unified else f"Sequence {stream}"
            raise ContextFullError(
                f"{whose} has {used} used and {self.n_cells - used} free cells in a context of"
                f" {self.n_cells}, but needs {n} more.",
                "Raise -c, shorten the prompt or emit fewer tokens.",
            )
        if used == end:
            return self._cell_numbers[end : end + n]
        holes = np.flatnonzero(self._owners[stream, :end] == _NOBODY)[:n]
        return np.concatenate((holes, np.arange(end, end + n - holes.size)))

    def _recount(self, stream: int, end: int | None = None) -> None:
        end = self.end[stream] if end is None else max(end, self.end[stream])
        held = np.flatnonzero(self._owners[stream, :end] != _NOBODY)
        self.used[stream] = held.size
        self.end[stream] = int(held[-1]) + 1 if held.size else 0
        self.is_rising[stream] |= not held.size and not self.unified
