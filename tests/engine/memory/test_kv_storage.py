"""Storage of cells: views by strides against plain indexing."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.memory import kv_storage
from engine.memory.kv_storage import KVStorage, row_size
from engine.model.parts import CellSize

N_STREAMS, N_CELLS = 6, 40
LAYERS = {0: CellSize(2, 4, 3)}
ROW = (2, 4)


def storage() -> KVStorage:
    made = KVStorage(LAYERS, N_STREAMS, N_CELLS, torch.device("cpu"))
    made.poison(0.0)
    return made


def spaced(n: int, most: int) -> st.SearchStrategy[list[int]]:
    """n different numbers below `most`: neighbours, evenly spaced, or any."""
    even = st.tuples(st.integers(0, most - n), st.integers(1, max(1, most // (2 * n)))).map(
        lambda x: [(x[0] + i * x[1]) % most for i in range(n)]
    )
    return st.one_of(even, st.permutations(range(most)).map(lambda x: x[:n]))


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_cells_are_written_where_an_index_would(data, n_seqs, n, single):
    streams = [2] * n_seqs if single else data.draw(spaced(n_seqs, N_STREAMS))
    if single:
        cells = np.array(data.draw(spaced(n_seqs * n, N_CELLS))).reshape(n_seqs, n)
    else:
        cells = np.array([data.draw(spaced(n, N_CELLS)) for _ in streams])
    by_index, by_stride = storage(), storage()
    for indexed, strided in zip(by_index.tensors(), by_stride.tensors(), strict=True):
        heads, dim = row_size(strided)
        new = torch.arange(1, n_seqs * n * heads * dim + 1).float().view(n_seqs, n, heads, dim)
        indexed.transpose(1, 2)[by_index.place(streams, cells)] = new.flatten(0, 1)
        place = by_stride.cells_at((heads, dim), streams, cells)
        if place is not None:
            strided.as_strided(*place).copy_(new)
            assert torch.equal(strided, indexed)


@pytest.mark.parametrize(
    ("streams", "cells"),
    [([0], [[7]]), ([3], [[2, 3, 4]]), ([1, 2, 3], [[5], [5], [5]]), ([0, 4], [[1, 3], [6, 8]])],
)
def test_what_a_step_writes_needs_no_index(streams, cells):
    assert isinstance(storage().cells_at(ROW, streams, np.array(cells)), tuple)


@pytest.mark.parametrize(
    ("streams", "cells"),
    [([0], [[3, 2]]), ([0], [[1, 2, 4]]), ([2, 1], [[0], [0]]), ([0, 1], [[1, 2], [1, 3]])],
)
def test_uneven_cells_do(streams, cells):
    assert storage().cells_at(ROW, streams, np.array(cells)) is None


@pytest.mark.parametrize(("start", "stop", "step"), [(0, 1, 1), (3, 4, 1), (1, 5, 1), (0, 5, 2)])
def test_views(start, stop, step):
    made, rows = storage(), slice(start, stop, step)
    keys = made.keys[0].copy_(torch.randn(made.keys[0].shape))
    wanted = keys[rows, :, :7]
    assert torch.equal(keys.as_strided(*made.view(ROW, rows, len(wanted), 7)), wanted)
    if len(wanted) == 1:
        shared = keys.as_strided(*made.view(ROW, rows, 3, 7))
        assert torch.equal(shared, wanted.expand(3, -1, -1, -1))


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_growing_takes_one_layer_more_than_is_held_afterwards(monkeypatch, most):
    """A run is refused where a device has no room for its cells; a second copy is not counted."""
    monkeypatch.setattr(kv_storage, "_KEPT_BYTES", most)
    allocate, made, peak = KVStorage._allocate, [], 0

    def counted(storage, row, capacity):
        nonlocal peak
        tensor = allocate(storage, row, capacity)
        made.append(weakref.ref(tensor))
        peak = max(peak, sum(x.nbytes for one in made if (x := one()) is not None))
        return tensor

    monkeypatch.setattr(KVStorage, "_allocate", counted)
    layers = {layer: CellSize(2, 4, 3) for layer in range(8)}
    grown = KVStorage(layers, 1, 1000, torch.device("cpu"))
    grown.reserve([0], 7)
    written = [tensor.normal_()[:, :, :256].clone() for tensor in grown.tensors()]
    grown.reserve([0], 900)
    assert all(map(torch.equal, written, (tensor[:, :, :256] for tensor in grown.tensors())))
    assert not any(tensor[:, :, 256:900].any() for tensor in grown.tensors())
    assert [tensor.shape[2] for tensor in grown.tensors()] == [1000] * 16
    assert grown.n_bytes == 8 * 4 * 2 * 7 * 1000
    assert peak == (grown.n_held_bytes() if most else grown.n_bytes + 4 * 2 * 3 * 256)
    assert grown.renew() is (most > 0)
