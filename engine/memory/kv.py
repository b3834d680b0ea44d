"""Attention memory: one stream of key/value cells per sequence.

A cell is (position, key, value). Cells are found by position, never by index: removing the tail
frees cells, and nothing stops a caller from writing a position twice (that is the duplicate-cell
fault of llama.cpp #19493, which `duplicates` counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import ContextFullError
from engine.memory.batch import UBatch

_FIRST_CAPACITY = 256
_EMPTY = -1


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What one ubatch attends to in one layer.

    k, v: float32 [n_seqs, n_head_kv, n_cells, head_dim]. mask: bool [n_seqs, n_seq_tokens,
    n_cells], True where the query may look.
    """

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor


class AttentionKV:
    """Keys and values of all attention layers, for n_seqs sequences of at most n_ctx cells.

    Storage doubles as sequences grow; cells that may be read are always initialised.
    """

    def __init__(
        self,
        layers: Sequence[int],
        n_seqs: int,
        n_head_kv: int,
        head_dim: int,
        n_ctx: int,
        device: torch.device,
    ) -> None:
        self.n_seqs, self.n_ctx, self.device = n_seqs, n_ctx, device
        self._shape = (n_head_kv, head_dim)
        self._pos = np.full((n_seqs, n_ctx), _EMPTY, np.int64)
        self._capacity = min(n_ctx, _FIRST_CAPACITY)
        self._k = {layer: self._zeros(self._capacity) for layer in layers}
        self._v = {layer: self._zeros(self._capacity) for layer in layers}
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._cells: list[slice | torch.Tensor] = []
        self._n_view = 0
        self._mask = torch.empty(0)
        self._seqs: tuple[int, ...] = ()

    def begin(self, ubatch: UBatch) -> None:
        """Find cells for the ubatch and build its mask. ContextFullError changes nothing."""
        positions = ubatch.positions.cpu().numpy()
        found = [self._find(seq, ubatch.n_seq_tokens) for seq in ubatch.seq_ids]
        for seq, cells, pos in zip(ubatch.seq_ids, found, positions, strict=True):
            self._pos[seq, cells] = pos
        self._seqs = ubatch.seq_ids
        self._n_view = 1 + max(self._last_used(seq) for seq in ubatch.seq_ids)
        if self._n_view > self._capacity:
            self._grow(self._n_view)
        self._cells = [_as_slice(cells, self.device) for cells in found]
        self._rows = _as_slice(np.asarray(ubatch.seq_ids), self.device)
        held = self._pos[list(ubatch.seq_ids), : self._n_view][:, None, :]
        visible = (held != _EMPTY) & (held <= positions[:, :, None])
        self._mask = torch.from_numpy(visible).to(self.device)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> AttentionView:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_head_kv, head_dim]."""
        keys, values = self._k[layer], self._v[layer]
        for row, (seq, cells) in enumerate(zip(self._seqs, self._cells, strict=True)):
            keys[seq, :, cells] = k[row].transpose(0, 1)
            values[seq, :, cells] = v[row].transpose(0, 1)
        n = self._n_view
        return AttentionView(keys[self._rows, :, :n], values[self._rows, :, :n], self._mask)

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Free the cells of a sequence with p0 <= pos < p1 (negative p1: no end). Always True."""
        pos = self._pos[seq]
        pos[(pos >= p0) & (pos != _EMPTY) & ((p1 < 0) | (pos < p1))] = _EMPTY
        return True

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of a sequence, -1 when it is empty."""
        return int(self._pos[seq].max())

    def used(self, seq: int) -> int:
        """Cells in use by a sequence."""
        return int((self._pos[seq] != _EMPTY).sum())

    def duplicates(self, seq: int) -> int:
        """Cells beyond one per position of a sequence."""
        held = self._pos[seq][self._pos[seq] != _EMPTY]
        return int(held.size - np.unique(held).size)

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return sum(t.numel() * t.element_size() for t in (*self._k.values(), *self._v.values()))

    def _find(self, seq: int, n: int) -> np.ndarray:
        pos = self._pos[seq]
        last = self._last_used(seq)
        if last + n < self.n_ctx and last + 1 == np.count_nonzero(pos != _EMPTY):
            return np.arange(last + 1, last + 1 + n)
        free = np.flatnonzero(pos == _EMPTY)[:n]
        if free.size < n:
            raise ContextFullError(
                f"Sequence {seq} needs {n} more cells, but its context of {self.n_ctx} is full.",
                "Raise -c, shorten the prompt or emit fewer tokens.",
            )
        return free

    def _last_used(self, seq: int) -> int:
        held = np.flatnonzero(self._pos[seq] != _EMPTY)
        return int(held[-1]) if held.size else -1

    def _zeros(self, capacity: int) -> torch.Tensor:
        n_head_kv, head_dim = self._shape
        return torch.zeros(self.n_seqs, n_head_kv, capacity, head_dim, device=self.device)

    def _grow(self, needed: int) -> None:
        capacity = min(self.n_ctx, max(needed, 2 * self._capacity))
        for tensors in (self._k, self._v):
            for layer, old in tensors.items():
                new = self._zeros(capacity)
                new[:, :, : self._capacity] = old
                tensors[layer] = new
        self._capacity = capacity


def _as_slice(indices: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """A slice where the indices are consecutive: views instead of copies."""
    first = int(indices[0])
    if np.array_equal(indices, np.arange(first, first + len(indices))):
        return slice(first, first + len(indices))
    return torch.from_numpy(indices).to(device)
