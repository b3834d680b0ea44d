"""Attention memory: key/value cells, in one stream per sequence or in a unified pool.

A cell is (position, owners, rows of every layer): keys, values, and any further rows that a layer
keeps per token. Cells are found by position, never by index: removing the tail frees cells, and
nothing prevents a caller from writing a position twice (the duplicate-cell fault of llama.cpp
#19493, which `duplicates` counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import UBatch, UBatchTensors
from engine.errors import OptionError
from engine.machine.device import Uploads, upload
from engine.machine.graphs import PassInputs
from engine.memory.cells import UNKNOWN, CellTable
from engine.memory.kv_storage import CellIndex, KVStorage, Rotate, RowSize, StridedView, row_size
from engine.model.memory import AttentionMemory, AttentionView
from engine.model.parts import CellKey, CellSize, StateKey
from kernels.rows.cells import CellPlaces, write_cells, write_keys_and_values
from kernels.rows.record import TokenPlace


@dataclass(frozen=True, slots=True)
class AttentionState:
    """A copy of one sequence's cells, in the order of their positions.

    positions: int64 [n_cells] on the host. k: float32 [n_cells, n_heads, k_dim], one per layer or
    further row of it. v: [n_cells, n_heads, v_dim], of those that have values.
    """

    positions: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.positions, *self.k, *self.v))


class AttentionKV(AttentionMemory):
    """Keys and values of all attention layers, for n_seqs sequences of n_ctx cells each.

    layers: what each layer keeps per token, further rows included. unified: one pool of n_seqs *
    n_ctx cells for all sequences; a copied sequence then shares cells. ahead: tokens of one ubatch
    also attend to later ones. in_order: views list a sequence's cells in order of position, which
    costs a copy where they are stored otherwise. rotate: per layer the function that rotates its
    keys by a number of positions, used by `seq_add` only; layers not listed have unrotated keys.
    Raises OptionError above 64 sequences.
    """

    def __init__(
        self,
        layers: Mapping[CellKey, CellSize],
        n_seqs: int,
        n_ctx: int,
        device: torch.device,
        *,
        unified: bool = False,
        in_order: bool = False,
        ahead: bool = False,
        rotate: Mapping[CellKey, Rotate] | None = None,
    ) -> None:
        further: dict[CellKey, CellSize] = {
            StateKey(key, name): CellSize(1, dim, 0)
            for key, size in layers.items()
            if isinstance(key, int)
            for name, dim in size.further
        }
        self.layers = layers = {**layers, **further}
        self.n_seqs, self.n_ctx, self.device = n_seqs, n_ctx, device
        self.unified = unified
        self._in_order, self._ahead = in_order, ahead
        self._gathered: Tensor | None = None
        self._rotate = rotate
        windows = [size.window for size in layers.values()]
        has_blocks = any(size.ratio for size in layers.values())
        self._windows = tuple(dict.fromkeys([*windows, None] if has_blocks else windows))
        self._tells_positions = has_blocks or any(isinstance(key, StateKey) for key in layers)
        self._table = table = CellTable(n_seqs, n_ctx, unified=unified)
        self._storage = KVStorage(layers, table.n_streams, table.n_cells, device)
        self._n_view = 0
        self._rows: slice | Tensor = slice(0, 0)
        # stream of each token of the ubatch
        self._stream_of = np.arange(0)
        # by row size, or one index for all
        self._place: dict[RowSize, StridedView] | tuple[CellIndex, CellIndex] = {}
        self._numbers: tuple[Tensor, Tensor] | None = None
        self._views: dict[RowSize, StridedView] | None = {}
        # by window
        self._masks: dict[int | None, Tensor] = {}
        # of the whole ubatch while `part` restricts it
        self._whole: tuple[tuple[Tensor, Tensor], dict[int | None, Tensor]] | None
        self._whole = None
        self._positions: Tensor | None = None
        self._fixed: PassInputs | None = None
        self._uploads = Uploads()
        self._there: UBatchTensors | None = None
        self._viewed: tuple[object, ...] = ()

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether there are cells for these ubatches, decoded in turn; changes nothing."""
        return self._table.fits((seq, u.n_seq_tokens) for u in ubatches for seq in u.seq_ids)

    def begin(
        self, ubatch: UBatch, *, by_index: bool = False, is_decoded: bool = False
    ) -> UBatchTensors:
        """Find cells for the ubatch and build its mask; returns the ubatch's arrays on the device.
        ContextFullError changes nothing.

        by_index: put cell numbers on the device and attend to all allocated cells, so that the pass
        can be recorded. is_decoded: the previous pass has decoded it already (`token_place`), so
        its cells only have to be taken.
        """
        table, seqs = self._table, ubatch.seq_ids
        positions = ubatch.positions
        cells = table.find(seqs, ubatch.n_seq_tokens)
        n_view = self._take(seqs, cells, positions, ubatch.tokens)
        if is_decoded:
            assert self._there is not None  # from the previous pass
            return self._there
        streams = [table.stream(seq) for seq in seqs]
        storage = self._storage
        if by_index:
            n_view = storage.capacity
            storage.reserve(streams, n_view)
        self._n_view = n_view
        if self._viewed != (viewed := (seqs, cells.shape[1], n_view, storage.capacity)):
            self._stream_of = np.repeat(np.array(streams), cells.shape[1])
            self._rows = slice(0, 1) if table.unified else storage.index(np.array(streams))
            self._views = self._place_of(self._rows, len(seqs), n_view)
            self._viewed = viewed
        looks = self._looks(seqs, cells, positions, n_view)
        self._fixed = self._numbers = None
        if by_index:
            arrays = (*ubatch.arrays, self._stream_of, cells.ravel(), *looks)
            together, views = self._uploads.put(arrays, self.device)
            of_batch = self._there = UBatchTensors(*views[:3])
            stream_of, cell_of, *there = views[3:]
            self._numbers = stream_of, cell_of
            if self._views is not None and self._gathered is None:
                self._fixed = PassInputs(tuple(self._views.values()), (together,))
        else:
            places = {row: storage.cells_at(row, streams, cells) for row in storage.row_sizes}
            strided = {row: place for row, place in places.items() if place is not None}
            whole = len(strided) == len(places)
            self._place = strided if whole else storage.place(streams, cells)
            there, of_batch = [upload(look, self.device) for look in looks], ubatch.on(self.device)
        self._masks = dict(zip(self._windows, there, strict=False))
        self._whole = (self._numbers, self._masks) if self._numbers else None
        self._positions = there[-1] if self._tells_positions else None
        return of_batch

    def part(self, first: int, n: int) -> None:
        """Let `update` take only tokens first .. first + n - 1 of the ubatch, which must be of one
        sequence and use `by_index`."""
        assert self._whole is not None  # by index
        numbers, masks = self._whole
        stream_of, cell_of = (x[first : first + n] for x in numbers)
        self._numbers = stream_of, cell_of
        self._masks = {window: mask[:, first : first + n] for window, mask in masks.items()}

    def token_place(self, n: int) -> TokenPlace | None:
        """Where the current pass finds its only token, if the following n - 1 tokens differ from it
        in that alone; else None."""
        if (
            self._fixed is None
            or self._numbers is None
            or self._there is None
            or self._windows != (None,)
            or self._tells_positions
            or self._ahead
            or len(self._stream_of) != 1
        ):
            return None
        stream, there = int(self._stream_of[0]), self._there
        if not self._table.is_in_order(stream) or self._table.end[stream] + n - 1 > self._n_view:
            return None
        return there.tokens, there.positions, self._numbers[1], self._masks[None]

    def pass_inputs(self) -> PassInputs | None:
        """Key and input tensors of a recording of the pass that has started; None if it cannot be
        recorded."""
        return self._fixed

    def update(self, layer: CellKey, k: Tensor, v: Tensor | None = None) -> AttentionView:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_heads, dim].

        v: None for a layer that keeps nothing but keys.
        """
        storage = self._storage
        keys, values = storage.keys[layer], storage.values.get(layer)
        if values is not None and self._numbers:
            assert v is not None
            write_keys_and_values(keys, values, k, v, *self._numbers)
        else:
            self._write(keys, k)
            if values is not None:
                assert v is not None
                self._write(values, v)
        return self.read(layer)

    def places(self, layer: CellKey) -> CellPlaces | None:
        storage = self._storage
        if self._numbers is None or layer not in storage.values:
            return None
        return storage.keys[layer], storage.values[layer], *self._numbers

    def read(self, layer: CellKey) -> AttentionView:
        """What this ubatch attends to, after its keys and values were written."""
        storage = self._storage
        keys, values = storage.keys[layer], storage.values.get(layer)
        read_k = self._read(keys)
        read_v = read_k if values is None else self._read(values)
        mask = self._masks[self.layers[layer].window]
        return AttentionView(read_k, read_v, mask, self._positions, self._masks.get(None))

    def learn(self, seq: int, p0: int, tokens: Sequence[int]) -> None:
        """Fill in tokens that were decoded as UNKNOWN, from position p0 on."""
        self._table.learn(seq, p0, tokens)

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Free the cells of a sequence with p0 <= pos < p1.

        Negative p0 is 0, negative p1 means no end, sequence -1 is every one. False only for a
        sequence that cannot exist.
        """
        if not -1 <= seq < self.n_seqs:
            return False
        for each in range(self.n_seqs) if seq == -1 else (seq,):
            self._table.release(each, self._table.holding(each, p0, p1))
        return True

    def seq_cp(self, src: int, dst: int) -> None:
        """Make dst a copy of src; in a pool it shares the cells."""
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
        """Remove every other sequence."""
        self._table.keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        """Shift positions p0 <= pos < p1 and rotate their keys; positions below 0 are removed.

        Cells shared with another sequence are copied first. Raises OptionError without `rotate`,
        ContextFullError without cells for the copies; both change nothing.
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
            for layer, rotate in self._rotate.items():
                keys = self._storage.keys[layer]
                keys[place] = rotate(keys[place], shift)

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of a sequence, -1 when it is empty."""
        last = self._table.last_position(seq)
        return int(self._table.positions(seq).max(initial=-1)) if last is None else last

    def positions(self, seq: int) -> np.ndarray:
        """Position of every cell of a sequence, int64, ascending; the same in all layers."""
        return np.sort(self._table.positions(seq))

    def others_than(self, seq: int, tokens: Sequence[int]) -> int:
        """Number of positions from 0 on whose token differs from `tokens`. UNKNOWN tokens match
        any."""
        cells = self._table.holding(seq, 0, len(tokens))
        held = self._table.tokens(seq, cells)
        wanted = np.asarray(tokens)[self._table.positions(seq, cells)]
        right = self._table.positions(seq, cells)[(held == wanted) | (held == UNKNOWN)]
        return len(tokens) - np.unique(right).size

    def used(self, seq: int) -> int:
        """Cells that belong to a sequence, shared ones included."""
        table = self._table
        return table.holding(seq).size if table.unified else table.used[seq]

    def duplicates(self, seq: int) -> int:
        """Cells beyond one per position of a sequence."""
        return self.holding(seq)[1]

    def holding(self, seq: int) -> tuple[int, int, int]:
        """`used`, `duplicates` and `seq_pos_max` in one call."""
        last = self._table.last_position(seq)
        if last is not None:
            return self._table.used[seq], 0, last
        held = self._table.positions(seq)
        if held.size == 0:
            return 0, 0, -1
        if not np.count_nonzero(held[1:] <= held[:-1]):  # the order in which a sequence is written
            return held.size, 0, int(held[-1])
        return held.size, held.size - np.unique(held).size, int(held.max())

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self._storage.n_bytes

    def n_held_bytes(self) -> int:
        """Bytes of storage, including the smaller storage that `renew` returns to."""
        return self._storage.n_held_bytes()

    def renew(self) -> bool:
        """Reset to the initial state in the same storage; False if it has grown too large for
        that."""
        if not self._storage.renew():
            return False
        old = self._table
        self._table = CellTable(self.n_seqs, self.n_ctx, unified=old.unified)
        self._gathered = None
        return True

    def poison(self, value: float) -> None:
        """Fill storage, before anything is decoded, so that reads of uninitialised memory show."""
        self._storage.poison(value)

    def state(self, seq: int, p0: int = 0) -> AttentionState:
        """A copy of a sequence from position p0 on, on the same device."""
        cells = self._table.holding(seq, p0)
        cells = cells[np.argsort(self._table.positions(seq, cells), kind="stable")]
        where = upload(cells, self.device)
        copies = tuple(t[self._table.stream(seq), where] for t in self._storage.by_cell())
        n_layers = len(self._storage.keys)
        positions = torch.from_numpy(self._table.positions(seq, cells))
        return AttentionState(positions, copies[:n_layers], copies[n_layers:])

    def put(self, seq: int, state: AttentionState, p0: int = 0) -> None:
        """Replace a sequence from position p0 on by a copy.

        Raises OptionError for a state of other layers, ContextFullError for one that is too long;
        both change nothing.
        """
        table, n = self._table, len(state.positions)
        copies, layers = (*state.k, *state.v), self._storage.by_cell()
        if [t.shape for t in copies] != [(n, *t.shape[2:]) for t in layers]:
            raise OptionError(
                "The saved sequence belongs to a model with other attention layers.",
                "Load a sequence that was saved with this model.",
            )
        held = table.holding(seq, p0)
        lacking = n - held.size + table.shared(seq, held).size
        table.find([seq], max(lacking, 0))  # refuse before anything changes
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
        """Take found cells; returns the number of readable cells that their streams now need."""
        table = self._table
        table.take(seqs, cells, positions, tokens)
        streams = [0] if table.unified else seqs
        reach = max([table.end[stream] for stream in streams])
        self._storage.reserve(streams, reach)
        return reach

    def _place_of(
        self, rows: slice | Tensor, n_seqs: int, n_view: int
    ) -> dict[RowSize, StridedView] | None:
        """Views of the first n_view cells of streams, by the size of rows; None if uneven."""
        if not isinstance(rows, slice):
            return None
        storage = self._storage
        return {row: storage.view(row, rows, n_seqs, n_view) for row in storage.row_sizes}

    def _looks(
        self, seqs: Sequence[int], cells: np.ndarray, positions: np.ndarray, n_view: int
    ) -> list[np.ndarray]:
        """What the ubatch sees of cells: a mask per window, then positions if requested. cells:
        those of the ubatch."""
        table = self._table
        seen = None if self._ahead else table.seen(seqs, cells, n_view)
        looks = [
            table.visible(seqs, positions, n_view, window, ahead=self._ahead)
            if seen is None or window is not None
            else seen
            for window in self._windows
        ]
        where = table.cell_positions(seqs, n_view) if self._tells_positions else None
        order = self._order(seqs) if self._in_order else None
        if order:
            index, inside = order
            looks = [
                np.take_along_axis(look, index[:, None], 2) & inside[:, None] for look in looks
            ]
            where = where if where is None else np.take_along_axis(where, index, 1)
        return looks if where is None else [*looks, where]

    def _order(self, seqs: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """The cells [n_seqs, n] for `update` to gather where they are not in order, and which of
        them are not filler; None where they are in order."""
        table = self._table
        self._gathered = None
        if all(table.last_position(seq) is not None for seq in seqs):
            return None
        orders = []
        for seq in seqs:
            cells = table.holding(seq)
            orders.append(cells[np.argsort(table.positions(seq, cells), kind="stable")])
        if all(np.array_equal(order, np.arange(order.size)) for order in orders):
            return None
        width = max(order.size for order in orders)
        # shorter rows are padded with one of their own cells, whose second copy is masked
        index = np.stack([np.resize(order, width) for order in orders])
        self._gathered = torch.from_numpy(index).to(self.device)
        return index, np.arange(width) < np.array([[order.size] for order in orders])

    def _write(self, tensor: Tensor, rows: Tensor) -> None:
        """Write rows [n_seqs, n_seq_tokens, n_heads, dim] to this ubatch's cells."""
        if self._numbers:
            write_cells(tensor, rows, *self._numbers)
        elif isinstance(self._place, dict):
            tensor.as_strided(*self._place[row_size(tensor)]).copy_(rows)
        else:
            tensor.transpose(1, 2)[self._place] = rows.flatten(0, 1)

    def _read(self, tensor: Tensor) -> Tensor:
        """The cells that this ubatch looks at, [n_seqs, n_heads, n_cells, dim]."""
        if self._gathered is not None:
            n_seqs = len(self._gathered)
            rows = torch.arange(n_seqs, device=self.device)[:, None] if not self.unified else 0
            return tensor[self._rows].transpose(1, 2)[rows, self._gathered].transpose(1, 2)
        if self._views is not None:
            return tensor.as_strided(*self._views[row_size(tensor)])
        return tensor[self._rows, :, : self._n_view]

    def _copy_cells(self, seq: int, cells: np.ndarray, free: np.ndarray) -> None:
        """Give seq copies in free cells [1, n] in place of cells that others own too."""
        table, stream = self._table, self._table.stream(seq)
        positions = table.positions(seq, cells)
        table.release(seq, cells)
        self._take([seq], free, positions[None], table.tokens(seq, cells)[None])
        source, target = self._storage.index(cells), self._storage.index(free[0])
        for tensor in self._storage.by_cell():
            # cloned, because source and target may overlap
            tensor[stream, target] = tensor[stream, source].clone()
