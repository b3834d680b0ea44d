"""Tensors of attention cells: sizes per layer, growth by doubling, initialisation before reads, and
rotation of keys to other positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.machine.device import upload
from engine.model.parts import CellKey, CellSize
from engine.model.rope import RopeConfig
from kernels.rope import apply_rope, rope_table

Rotate = Callable[[Tensor, int], Tensor]


def key_rotation(config: RopeConfig, first: int = 0) -> Rotate:
    """A function that rotates keys [..., k_dim] by a number of positions, which may be negative.

    first: first rotated column (latent keys have others before it). Rotations add up, so this
    equals writing the keys at the shifted positions; the magnitude that some scalings apply to
    cosines and sines is already in the keys.
    """
    inverse = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)

    def rotate(k: Tensor, shift: int) -> Tensor:
        cos, sin = rope_table(torch.tensor([[shift]]), config.n_rot, inverse)
        heads = k[..., first:].reshape(1, 1, -1, k.shape[-1] - first)
        turned = apply_rope(heads, cos.to(k.device), sin.to(k.device))
        return torch.cat((k[..., :first], turned.view(k[..., first:].shape)), -1)

    return rotate


CellIndex = int | slice | Tensor

# cells allocated at first, and zeroed together later
_BLOCK = 256

_KEPT_BYTES = 64 << 20
"""Tensors of smaller capacities are kept up to this size, those in use included."""

LayerTensors = dict[CellKey, Tensor]

RowSize = tuple[int, int]
"""Heads and columns of one tensor's rows in a cell."""


StridedView = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of every tensor with rows of one size: size, strides and offset for `Tensor.as_strided`;
one call, no copy."""


class KVStorage:
    """Keys and values float32 [n_streams, n_heads, capacity, dim] of every layer; no values where a
    layer's v_dim is 0.

    Cells are uninitialised until `reserve` makes them readable; from then on they are finite,
    because attention multiplies masked cells by zero instead of skipping them. capacity never
    exceeds n_cells.
    """

    def __init__(
        self, layers: Mapping[CellKey, CellSize], n_streams: int, n_cells: int, device: torch.device
    ) -> None:
        self._n_streams, self._n_cells, self._device = n_streams, n_cells, device
        self.capacity = self._least = min(n_cells, _BLOCK)
        """Allocated cells per stream; growing replaces the tensors."""
        # per stream: cells below this were zeroed or written
        self._readable = [0] * n_streams
        self.keys = {
            key: self._allocate((size.n_heads, size.k_dim), self.capacity)
            for key, size in layers.items()
        }
        self.values = {
            key: self._allocate((size.n_heads, size.v_dim), self.capacity)
            for key, size in layers.items()
            if size.v_dim
        }
        # by capacity, all so far
        self._sizes = {self.capacity: (self.keys, self.values)}
        self.n_bytes = _n_bytes(self.keys, self.values)
        """Bytes held."""
        self.row_sizes: tuple[RowSize, ...] = tuple(dict.fromkeys(map(row_size, self.tensors())))

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys of all layers, then values of those that have them."""
        return (*self.keys.values(), *self.values.values())

    def by_cell(self) -> tuple[Tensor, ...]:
        """The same tensors as views [n_streams, capacity, n_heads, dim]."""
        return tuple(t.transpose(1, 2) for t in self.tensors())

    def n_held_bytes(self) -> int:
        """Bytes, including tensors of smaller capacities kept for `renew`."""
        return sum(_n_bytes(*tensors) for tensors in self._sizes.values())

    def renew(self) -> bool:
        """Return to the smallest capacity, and grow through the same tensors again.

        Nothing is readable afterwards. Returns False and changes nothing if they were dropped.
        """
        if self._least not in self._sizes:
            return False
        self._use(self._least)
        self._readable = [0] * self._n_streams
        return True

    def reserve(self, streams: Iterable[int], n: int) -> None:
        """Make the first n cells of these streams readable."""
        if n > self.capacity:
            self._grow(n)
        for stream in streams:
            ready = self._readable[stream]
            if ready < n:
                stop = min(self.capacity, max(n, ready + _BLOCK))
                for tensor in self.tensors():
                    tensor[stream, :, ready:stop] = 0
                self._readable[stream] = stop

    def poison(self, value: float) -> None:
        """Fill everything; nothing is readable then."""
        for tensor in self.tensors():
            tensor.fill_(value)
        self._readable = [0] * len(self._readable)

    def index(self, cells: np.ndarray) -> slice | Tensor:
        """Cells or streams as an index: a slice, hence a view, if evenly spaced and rising."""
        first, last = int(cells[0]), int(cells[-1])
        if cells.size == 1:
            return slice(first, first + 1, 1)
        step = int(cells[1]) - first
        if step > 0 and np.array_equal(cells, np.arange(first, last + 1, step)):
            return slice(first, last + 1, step)
        return upload(cells, self._device)

    def cells_at(
        self, row: RowSize, streams: Sequence[int], cells: np.ndarray
    ) -> StridedView | None:
        """The cells [len(streams), n] as [len(streams), n, n_heads, dim], in tensors of this row
        size.

        None if they are not evenly spaced. Valid until storage grows, like `view`.
        """
        per_stream, per_head, dim = self._strides(row)
        places = cells.tolist()
        starts = [
            stream * per_stream + place[0] * dim
            for stream, place in zip(streams, places, strict=True)
        ]
        along, *others = {_step(place) for place in places}
        down = _step(starts)
        if others or along is None or down is None:
            return None
        return (*cells.shape, *row), (down, along * dim, per_head, 1), starts[0]

    def view(self, row: RowSize, streams: slice, n_seqs: int, n: int) -> StridedView:
        """The first n cells of these streams as [n_seqs, n_heads, n, dim], in tensors of this row
        size.

        A single stream serves all n_seqs.
        """
        per_stream, per_head, dim = self._strides(row)
        single = streams.stop == streams.start + 1
        down = 0 if single else per_stream * (streams.step or 1)
        size = (n_seqs, row[0], n, dim)
        return size, (down, per_head, dim, 1), streams.start * per_stream

    def place(self, streams: Sequence[int], cells: np.ndarray) -> tuple[CellIndex, CellIndex]:
        """Index into `by_cell` tensors (stream, cell) of cells [len(streams), n], flattened."""
        if len(set(streams)) == 1:
            return streams[0], self.index(cells.ravel())
        rows = np.repeat(np.array(streams), cells.shape[1])
        return upload(rows, self._device), upload(cells.ravel(), self._device)

    def _strides(self, row: RowSize) -> tuple[int, int, int]:
        """Elements from one stream, head and cell to the next."""
        n_heads, dim = row
        per_head = self.capacity * dim
        return n_heads * per_head, per_head, dim

    def _grow(self, needed: int) -> None:
        # whole blocks, so that there are few capacities
        blocks = -(-max(needed, 2 * self.capacity) // _BLOCK)
        capacity = min(self._n_cells, blocks * _BLOCK)
        new: tuple[LayerTensors, LayerTensors] = self._sizes.get(capacity, ({}, {}))
        of_new = 0 if new[0] else self.n_bytes // self.capacity * capacity
        stays = self.n_held_bytes() + of_new <= _KEPT_BYTES
        for tensors, grown in zip((self.keys, self.values), new, strict=True):
            for key, old in tensors.items():
                to = grown[key] if key in grown else self._allocate(row_size(old), capacity)
                for stream, ready in enumerate(self._readable):
                    to[stream, :, :ready] = old[stream, :, :ready]
                grown[key] = to
                if not stays:  # one layer at a time: a device has room for all only once
                    tensors[key] = old.new_empty(0)
                    del old
        self._sizes = {**(self._sizes if stays else {}), capacity: new}
        self._use(capacity)

    def _use(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys, self.values = self._sizes[capacity]
        self.n_bytes = _n_bytes(self.keys, self.values)

    def _allocate(self, row: RowSize, capacity: int) -> Tensor:
        n_heads, dim = row
        # tensors made in inference mode could not be changed outside of it
        with torch.inference_mode(False):
            return torch.empty(self._n_streams, n_heads, capacity, dim, device=self._device)


def _n_bytes(*groups: LayerTensors) -> int:
    return sum(t.numel() * t.element_size() for tensors in groups for t in tensors.values())


def row_size(tensor: Tensor) -> RowSize:
    """Row size of a storage tensor [n_streams, n_heads, capacity, dim]."""
    return tensor.shape[1], tensor.shape[3]


def _step(values: list[int]) -> int | None:
    """The step of an evenly rising list, 0 for a single value; else None."""
    if len(values) == 1:
        return 0
    step = values[1] - values[0]
    even = step > 0 and values == list(range(values[0], values[-1] + 1, step))
    return step if even else None
