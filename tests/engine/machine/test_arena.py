"""Memory of recordings: tensors that are in use lie apart, what is given up is used again."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.graphs import Arena

_STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 3 << 20)), min_size=1, max_size=40
)


@given(_STEPS)
def test_tensors_in_use_never_overlap(steps):
    regions, held = Arena().regions(), []
    for takes, which, n_bytes in steps:
        if takes or not held:
            held.append(regions.empty_like(torch.empty(n_bytes, dtype=torch.uint8)))
        else:
            held.pop(which % len(held))
        places = sorted((x.data_ptr(), x.data_ptr() + x.numel()) for x in held)
        assert all(a[1] <= b[0] for a, b in pairwise(places))
        assert all(start % 64 == 0 for start, _ in places)


def test_a_view_keeps_its_memory():
    regions = Arena().regions()
    x = regions.empty_like(torch.empty(4, 6))
    place, view = x.data_ptr(), x[1:, ::2]
    del x
    other = regions.empty_like(torch.empty(4, 6))
    assert other.data_ptr() != place
    del view
    assert regions.empty_like(torch.empty(2, 2)).data_ptr() == place


def test_sizes_strides_and_dtypes():
    regions = Arena().regions()
    for like in (
        torch.empty(3, 5).t(),
        torch.empty(0, 4),
        torch.empty((), dtype=torch.int64),
        torch.empty(7, dtype=torch.bfloat16),
    ):
        made = regions.empty_like(like)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)


def test_recordings_share_the_memory():
    arena = Arena()
    first = arena.regions()
    outputs = [first.empty_like(torch.empty(1 << 20)) for _ in range(3)]
    n_bytes = arena.n_bytes
    second = arena.regions()
    again = [second.empty_like(torch.empty(1 << 20)) for _ in range(3)]
    assert arena.n_bytes == n_bytes >= 3 << 22
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in outputs]
    # what the first recording gives up is not the second one's to give away
    outputs.clear()
    assert second.empty_like(torch.empty(9)).data_ptr() not in [x.data_ptr() for x in again]
