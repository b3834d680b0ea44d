"""The tensors behind attention cells: they double as needed, what is read was initialised, and keys
can be rotated to other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.model.rope import RopeConfig
from engine.transfer import upload
from kernels.rope import apply_rope, rope_table

Rotate = Callable[[torch.Tensor, int], torch.Tensor]


def key_rotation(config: RopeConfig) -> Rotate:
    """A function that turns keys [..., head_dim] by a number of positions, which may be negative.

    Rotations add up, so this equals having written the keys at the shifted positions; the
    magnitude that some scalings give to cosines and sines is in the keys already.
    """
    inverse = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)

    def rotate(k: torch.Tensor, shift: int) -> torch.Tensor:
        cos, sin = rope_table(torch.tensor([[shift]]), config.n_rot, inverse)
        heads = k.reshape(1, 1, -1, k.shape[-1])
        return apply_rope(heads, cos.to(k.device), sin.to(k.device)).view(k.shape)

    return rotate


CellIndex = int | slice | torch.Tensor

# cells that are allocated at first, and that are zeroed together later
_BLOCK = 256


class StridedView(NamedTuple):
    """A view of every tensor here, as `torch.Tensor.as_strided` takes it: one call, no copy."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class KVStorage:
    """Keys and values float32 [n_streams, n_head_kv, capacity, head_dim] of every layer.

    Cells are garbage until `reserve` makes them readable; then they stay finite, as attention
    weighs hidden cells with zero but does not skip them. capacity never exceeds n_cells.
    """

    def __init__(
        self,
        layers: Sequence[int],
        n_streams: int,
        n_head_kv: int,
        head_dim: int,
        n_cells: int,
        device: torch.device,
    ) -> None:
        self._shape, self._device = (n_streams, n_head_kv, head_dim), device
        self._n_cells = n_cells
        self._capacity = min(n_cells, _BLOCK)
        # cells of a stream below this were zeroed or written
        self._readable = [0] * n_streams
        self.keys = {layer: self._allocate(self._capacity) for layer in layers}
        self.values = {layer: self._allocate(self._capacity) for layer in layers}

    @property
    def capacity(self) -> int:
        """Cells of a stream that are allocated; the tensors are others when it grows."""
        return self._capacity

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys of all layers, then values of all layers."""
        return (*self.keys.values(), *self.values.values())

    def by_cell(self) -> tuple[torch.Tensor, ...]:
        """The same tensors, seen as [n_streams, capacity, n_head_kv, head_dim]."""
        return tuple(t.transpose(1, 2) for t in self.tensors())

    def n_bytes(self) -> int:
        """Bytes held: all tensors are of one size."""
        n_streams, n_head_kv, head_dim = self._shape
        n_tensors = len(self.keys) + len(self.values)
        return 4 * n_tensors * n_streams * n_head_kv * self._capacity * head_dim

    def reserve(self, streams: Iterable[int], n: int) -> None:
        """Make the first n cells of these streams readable."""
        if n > self._capacity:
            self._grow(n)
        for stream in streams:
            ready = self._readable[stream]
            if ready < n:
                stop = min(self._capacity, max(n, ready + _BLOCK))
                for tensor in self.tensors():
                    tensor[stream, :, ready:stop] = 0
                self._readable[stream] = stop

    def poison(self, value: float) -> None:
        """Fill everything; nothing is readable then."""
        for tensor in self.tensors():
            tensor.fill_(value)
        self._readable = [0] * len(self._readable)

    def index(self, cells: np.ndarray) -> slice | torch.Tensor:
        """Cells or streams as an index: a slice, hence views, where evenly spaced and rising."""
        first, last = int(cells[0]), int(cells[-1])
        step = int(cells[1]) - first if cells.size > 1 else 1
        if step > 0 and np.array_equal(cells, np.arange(first, last + 1, step)):
            return slice(first, last + 1, step)
        return upload(cells, self._device)

    def cells_at(self, streams: Sequence[int], cells: np.ndarray) -> StridedView | None:
        """The cells [len(streams), n] as [len(streams), n, n_head_kv, head_dim].

        None where they do not lie at even distances. It holds until storage grows, as does `view`.
        """
        per_stream, per_head, head_dim = self._strides()
        rows = cells.tolist()
        starts = [
            stream * per_stream + row[0] * head_dim
            for stream, row in zip(streams, rows, strict=True)
        ]
        along, *others = {_step(row) for row in rows}
        down = _step(starts)
        if others or along is None or down is None:
            return None
        stride = (down, along * head_dim, per_head, 1)
        return StridedView((*cells.shape, *self._shape[1:]), stride, starts[0])

    def view(self, rows: slice, n_seqs: int, n: int) -> StridedView:
        """The first n cells of these streams as [n_seqs, n_head_kv, n, head_dim].

        A single stream stands for all n_seqs.
        """
        per_stream, per_head, head_dim = self._strides()
        single = rows.stop == rows.start + 1
        down = 0 if single else per_stream * (rows.step or 1)
        size = (n_seqs, self._shape[1], n, head_dim)
        return StridedView(size, (down, per_head, head_dim, 1), rows.start * per_stream)

    def place(self, streams: Sequence[int], cells: np.ndarray) -> tuple[CellIndex, CellIndex]:
        """Index into `by_cell` tensors (stream, cell) of cells [len(streams), n], flattened."""
        if len(set(streams)) == 1:
            return streams[0], self.index(cells.ravel())
        rows = np.repeat(np.array(streams), cells.shape[1])
        return upload(rows, self._device), upload(cells.ravel(), self._device)

    def _strides(self) -> tuple[int, int, int]:
        """Numbers from one stream, head and cell to the next."""
        _, n_head_kv, head_dim = self._shape
        per_head = self._capacity * head_dim
        return n_head_kv * per_head, per_head, head_dim

    def _grow(self, needed: int) -> None:
        capacity = min(self._n_cells, max(needed, 2 * self._capacity))
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                new = self._allocate(capacity)
                for stream, ready in enumerate(self._readable):
                    new[stream, :, :ready] = old[stream, :, :ready]
                tensors[layer] = new
        self._capacity = capacity

    def _allocate(self, capacity: int) -> torch.Tensor:
        n_streams, n_head_kv, head_dim = self._shape
        # tensors made in inference mode could not be changed outside of it
        with torch.inference_mode(False):
            return torch.empty(n_streams, n_head_kv, capacity, head_dim, device=self._device)


def _step(values: list[int]) -> int | None:
    """The distance of neighbours where it is the same everywhere and rising, 0 for one value."""
    if len(values) == 1:
        return 0
    step = values[1] - values[0]
    even = step > 0 and values == list(range(values[0], values[-1] + 1, step))
    return step if even else None
