"""Attention memory: key/value cells, in one stream per sequence or in one pool for all.

A cell is (position, owners, key, value). Cells are found by position, never by index: removing
the tail frees cells, and nothing stops a caller from writing a position twice (that is the
duplicate-cell fault of llama.cpp #19493, which `duplicates` counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import UBatch
from engine.errors import OptionError
from engine.graphs import PassInputs
from engine.memory.kv_cells import UNKNOWN, CellTable
from engine.memory.kv_storage import CellIndex, KVStorage, Rotate, StridedView
from engine.transfer import upload, upload_together
from kernels.cells import write_cells


@dataclass(frozen=True, slots=True)
class GatheredCells:
    """What one ubatch attends to in one layer.

    k, v: float32 [n_seqs, n_head_kv, n_cells, head_dim]. mask: bool [n_seqs, n_seq_tokens,
    n_cells], True where the query may look; what is hidden is finite.
    """

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionState:
    """A copy of one sequence's cells, in the order of their positions.

    positions: int64 [n_cells] on the host. k, v: float32 [n_cells, n_head_kv, head_dim], one of
    each per attention layer.
    """

    positions: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.positions, *self.k, *self.v))


class CellUse(NamedTuple):
    """Cells of a sequence, those of them beyond one per position, and its highest position."""

    used: int
    duplicates: int
    pos_max: int


class AttentionKV:
    """Keys and values of all attention layers, for n_seqs sequences of n_ctx cells each.

    unified: one pool of n_seqs * n_ctx cells that all sequences use; a copied sequence then
    shares cells. in_order: views have a sequence's cells in the order of its positions, which
    costs a copy wherever they are stored otherwise. rotate: turns keys by a number of positions,
    which only `seq_add` needs.
    Raises OptionError above 64 sequences.
    """

    def __init__(
        self,
        layers: Sequence[int],
        n_seqs: int,
        n_head_kv: int,
        head_dim: int,
        n_ctx: int,
        device: torch.device,
        *,
        unified: bool = False,
        in_order: bool = False,
        rotate: Rotate | None = None,
    ) -> None:
        self.n_seqs, self.n_ctx, self.device = n_seqs, n_ctx, device
        self.unified = unified
        self._in_order = in_order
        self._gathered: torch.Tensor | None = None
        self._shape = (n_head_kv, head_dim)
        self._rotate = rotate
        self._table = table = CellTable(n_seqs, n_ctx, unified=unified)
        self._storage = KVStorage(
            layers, table.n_streams, n_head_kv, head_dim, table.n_cells, device
        )
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._place: StridedView | tuple[CellIndex, CellIndex] = (0, slice(0, 0))
        self._numbers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._view: StridedView | None = None
        self._mask = torch.empty(0)
        self._fixed: PassInputs | None = None

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether there are cells for these ubatches, decoded in turn; changes nothing."""
        return self._table.fits((seq, u.n_seq_tokens) for u in ubatches for seq in u.seq_ids)

    def begin(self, ubatch: UBatch, *, by_index: bool = False) -> None:
        """Find cells for the ubatch and build its mask. ContextFullError changes nothing.

        by_index: name cells by numbers on the device, and look at all that storage has, so that
        the pass can be recorded.
        """
        table, seqs = self._table, ubatch.seq_ids
        positions = ubatch.positions
        cells = table.find(seqs, ubatch.n_seq_tokens)
        n_view = self._take(seqs, cells, positions, ubatch.tokens)
        streams = [table.stream(seq) for seq in seqs]
        storage = self._storage
        if by_index:
            n_view = storage.capacity
            storage.reserve(streams, n_view)
        self._rows = rows = slice(0, 1) if table.unified else storage.index(np.array(streams))
        self._view = storage.view(rows, len(seqs), n_view) if isinstance(rows, slice) else None
        visible = table.visible(seqs, positions, n_view)
        if self._in_order:
            visible = self._order(seqs, visible, n_view)
        self._fixed = self._numbers = None
        if by_index:
            where = np.repeat(np.array(streams), cells.shape[1]), cells.ravel(), visible
            together, (stream_of, cell_of, self._mask) = upload_together(where, self.device)
            self._numbers = stream_of, cell_of
            if self._view and self._gathered is None:
                self._fixed = PassInputs(self._view, (together,))
        else:
            self._place = storage.cells_at(streams, cells) or storage.place(streams, cells)
            self._mask = upload(visible, self.device)

    def pass_inputs(self) -> PassInputs | None:
        """Key and input tensors of a recording of the pass that has begun; None if it cannot be
        recorded."""
        return self._fixed

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> GatheredCells:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_head_kv, head_dim]."""
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        place, view = self._place, self._view
        if self._numbers:
            write_cells(keys, values, k, v, *self._numbers)
        elif isinstance(place, StridedView):
            keys.as_strided(*place).copy_(k)
            values.as_strided(*place).copy_(v)
        else:
            keys.transpose(1, 2)[place] = k.flatten(0, 1)
            values.transpose(1, 2)[place] = v.flatten(0, 1)
        if self._gathered is not None:
            n_seqs = len(self._mask)
            rows = torch.arange(n_seqs, device=self.device)[:, None] if not self.unified else 0
            k, v = (t[self._rows].transpose(1, 2)[rows, self._gathered] for t in (keys, values))
            return GatheredCells(k.transpose(1, 2), v.transpose(1, 2), self._mask)
        if view:
            return GatheredCells(keys.as_strided(*view), values.as_strided(*view), self._mask)
        n_view = self._mask.shape[2]
        k, v = (t[self._rows, :, :n_view] for t in (keys, values))
        return GatheredCells(k, v, self._mask)

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Free the cells of a sequence with p0 <= pos < p1.

        Negative p0 is 0, negative p1 is no end, sequence -1 is every one. False only for a
        sequence that cannot exist.
        """
        if not -1 <= seq < self.n_seqs:
            return False
        for each in range(self.n_seqs) if seq == -1 else (seq,):
            self._table.release(each, self._table.holding(each, p0, p1))
        return True

    def seq_cp(self, src: int, dst: int) -> None:
        """dst becomes a copy of src; in a pool it shares the cells."""
        if src == dst:
            return
        table = self._table
        table.release(dst, table.holding(dst))
        table.copy(src, dst)
        if not table.unified:
            end = table.end[dst]
            self._storage.reserve([dst], end)
            for tensor in self._storage.tensors():
                tensor[dst, :, :end] = tensor[src, :, :end]

    def seq_keep(self, seq: int) -> None:
        """Forget every other sequence."""
        self._table.keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        """Shift positions p0 <= pos < p1 and turn their keys; what falls below 0 is removed.

        A cell shared with another sequence is copied first, so that the other keeps it. Raises
        OptionError without `rotate`, ContextFullError without cells for the copies; both change
        nothing.
        """
        table, stream = self._table, self._table.stream(seq)
        cells = table.holding(seq, p0, p1)
        if shift == 0 or cells.size == 0:
            return
        if self._rotate is None:
            raise OptionError(
                f"Positions of sequence {seq} cannot be shifted: its keys cannot be rotated.",
                "Remove these positions and decode their tokens again.",
            )
        below = table.positions(seq, cells) + shift < 0
        gone, cells = cells[below], cells[~below]
        shared = table.shared(seq, cells)
        own = table.find([seq], shared.size)
        table.release(seq, gone)
        if shared.size:
            self._copy_cells(seq, shared, own)
            cells = np.concatenate((np.setdiff1d(cells, shared), own[0]))
        if cells.size:
            table.shift(seq, cells, shift)
            place = (stream, slice(None), self._storage.index(cells))
            for keys in self._storage.keys.values():
                keys[place] = self._rotate(keys[place], shift)

    def seq_pos_min(self, seq: int) -> int:
        """Lowest position of a sequence, -1 when it is empty."""
        held = self._table.positions(seq)
        return int(held.min()) if held.size else -1

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of a sequence, -1 when it is empty."""
        return int(self._table.positions(seq).max(initial=-1))

    def positions(self, seq: int) -> np.ndarray:
        """Position of every cell of a sequence, int64, ascending; the same in all layers."""
        return np.sort(self._table.positions(seq))

    def others_than(self, seq: int, tokens: Sequence[int]) -> int:
        """How many positions from 0 on lack the token that stands there in `tokens`. Cells whose
        token is unknown may hold any."""
        cells = self._table.holding(seq, 0, len(tokens))
        held = self._table.tokens(seq, cells)
        wanted = np.asarray(tokens)[self._table.positions(seq, cells)]
        right = self._table.positions(seq, cells)[(held == wanted) | (held == UNKNOWN)]
        return len(tokens) - np.unique(right).size

    def used(self, seq: int) -> int:
        """Cells that belong to a sequence, shared ones included."""
        return self._table.holding(seq).size

    def duplicates(self, seq: int) -> int:
        """Cells beyond one per position of a sequence."""
        return self.holding(seq).duplicates

    def holding(self, seq: int) -> CellUse:
        """`used`, `duplicates` and `seq_pos_max` in one look."""
        held = self._table.positions(seq)
        if held.size == 0:
            return CellUse(0, 0, -1)
        if not np.count_nonzero(held[1:] <= held[:-1]):  # as a sequence is written
            return CellUse(held.size, 0, int(held[-1]))
        return CellUse(held.size, held.size - np.unique(held).size, int(held.max()))

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self._storage.n_bytes()

    def poison(self, value: float) -> None:
        """Fill storage, before anything is decoded: a read of unwritten memory then shows."""
        self._storage.poison(value)

    def state(self, seq: int, p0: int = 0) -> AttentionState:
        """A copy of what a sequence holds from position p0 on, keys and values where they are."""
        cells = self._table.holding(seq, p0)
        cells = cells[np.argsort(self._table.positions(seq, cells), kind="stable")]
        where = upload(cells, self.device)
        copies = tuple(t[self._table.stream(seq), where] for t in self._storage.by_cell())
        n_layers = len(self._storage.keys)
        positions = torch.from_numpy(self._table.positions(seq, cells))
        return AttentionState(positions, copies[:n_layers], copies[n_layers:])

    def put(self, seq: int, state: AttentionState, p0: int = 0) -> None:
        """Replace a sequence, whatever it held from position p0 on, by a copy.

        Raises OptionError for a state of other layers, ContextFullError for one that is too long;
        both change nothing.
        """
        table, n = self._table, len(state.positions)
        copies, layers = (*state.k, *state.v), self._storage.by_cell()
        if len(copies) != len(layers) or any(t.shape != (n, *self._shape) for t in copies):
            raise OptionError(
                "The saved sequence belongs to a model with other attention layers.",
                "Load a sequence that was saved with this model.",
            )
        held = table.holding(seq, p0)
        lacking = n - held.size + table.shared(seq, held).size
        table.find([seq], max(lacking, 0))  # refuses while nothing is changed
        table.release(seq, held)
        if n:
            cells = table.find([seq], n)
            self._take([seq], cells, state.positions.numpy()[None], np.full((1, n), UNKNOWN))
            place = self._storage.place([table.stream(seq)], cells)
            for tensor, copy in zip(self._storage.by_cell(), copies, strict=True):
                tensor[place] = copy.to(self.device)

    def _take(
        self, seqs: Sequence[int], cells: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> int:
        """Take found cells; returns how many cells their streams reach to, now readable."""
        table = self._table
        table.take(seqs, cells, positions, tokens)
        streams = {table.stream(seq) for seq in seqs}
        reach = max(table.end[stream] for stream in streams)
        self._storage.reserve(streams, reach)
        return reach

    def _order(self, seqs: Sequence[int], visible: np.ndarray, n_view: int) -> np.ndarray:
        """Have `update` gather cells where they do not lie in order; the mask for what it returns.

        visible: bool [n_seqs, T, n_view], of the cells as they lie.
        """
        table = self._table
        orders = []
        for seq in seqs:
            cells = table.holding(seq)
            orders.append(cells[np.argsort(table.positions(seq, cells), kind="stable")])
        self._gathered = None
        if all(np.array_equal(order, np.arange(order.size)) for order in orders):
            return visible
        width = max(order.size for order in orders)
        # shorter rows are filled up with a cell of their own, which nobody sees twice
        index = np.stack([np.resize(order, width) for order in orders])
        inside = np.arange(width) < np.array([[order.size] for order in orders])
        self._gathered = torch.from_numpy(index).to(self.device)
        return np.take_along_axis(visible, index[:, None], 2) & inside[:, None]

    def _copy_cells(self, seq: int, cells: np.ndarray, free: np.ndarray) -> None:
        """Give seq copies in free cells [1, n] instead of these, which others own too."""
        table, stream = self._table, self._table.stream(seq)
        positions = table.positions(seq, cells)
        table.release(seq, cells)
        self._take([seq], free, positions[None], table.tokens(seq, cells)[None])
        source, target = self._storage.index(cells), self._storage.index(free[0])
        for tensor in self._storage.by_cell():
            tensor[stream, target] = tensor[stream, source]
