"""What the policies share whose rollback only moves a cursor: positions and sequence operations.

A rollback makes tokens pending without touching storage, and the next ubatch starts behind them.
Rollbacks accumulate: a second one before that goes further back, as long as depth is left.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

import numpy as np
import torch

from engine.batch import UBatch
from engine.memory.recurrent import RecurrentMemory, RecurrentShape


class CursorMemory(RecurrentMemory):
    """Positions and pending tokens of every sequence; storage is the subclass's."""

    def __init__(
        self,
        shape: RecurrentShape,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        super().__init__(shape, n_seqs, n_rs_seq, device, faults)
        self._pos = np.full(n_seqs, -1, np.int64)
        self._pending = np.zeros(n_seqs, np.int64)
        self._seqs: tuple[int, ...] = ()
        self._n_new = 0

    @abstractmethod
    def _forget(self, seq: int) -> None:
        """Give up what storage holds of a sequence."""

    @abstractmethod
    def _share(self, src: int, dst: int) -> None:
        """dst, which holds nothing, refers to what src holds."""

    def _move_cursor(self, seq: int, depth: int) -> None:
        """Take `depth` more tokens as rolled back."""
        self._pending[seq] += depth

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        return all(self._can_decode(ubatch) for ubatch in ubatches)

    def begin(self, ubatch: UBatch, *, by_index: bool = False) -> None:
        """Raises ValueError, and changes nothing, if a sequence is unknown or listed twice."""
        if not self._can_decode(ubatch):
            seqs = ubatch.seq_ids
            raise ValueError(f"sequences {seqs} are not distinct numbers below {self.n_seqs}")
        self._seqs, self._n_new = ubatch.seq_ids, ubatch.n_seq_tokens

    def commit(self) -> None:
        for seq in self._seqs:
            self._pos[seq] += self._n_new
            self._pending[seq] = 0

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        if not 0 <= seq < self.n_seqs:
            return False
        pos = int(self._pos[seq])
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
        if src == dst:
            return
        self._clear(dst)
        if self._pos[src] >= 0:
            self._share(src, dst)
            self._pos[dst], self._pending[dst] = self._pos[src], self._pending[src]

    def seq_keep(self, seq: int) -> None:
        for other in range(self.n_seqs):
            if other != seq:
                self._clear(other)

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        if max(p0, 0) <= self._pos[seq] and (p1 < 0 or self._pos[seq] < p1):
            self._pos[seq] += shift

    def seq_pos_max(self, seq: int) -> int:
        return int(self._pos[seq])

    def pending(self, seq: int) -> int:
        return int(self._pending[seq])

    def _clear(self, seq: int) -> None:
        self._forget(seq)
        self._pos[seq], self._pending[seq] = -1, 0

    def _can_decode(self, ubatch: UBatch) -> bool:
        """One known sequence for each row: coupled ones, with a row in common, are refused."""
        seqs = ubatch.seq_ids
        known = all(0 <= seq < self.n_seqs for seq in seqs)
        return known and len(set(seqs)) == len(seqs) == ubatch.n_seqs
