"""Rows of strided tensors, and kernels on them: the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels.norm
import kernels.recurrence.conv
import kernels.rope
from kernels.llvm import functions as rows_module
from kernels.llvm.functions import rows
from kernels.pointwise import with_llvm as pointwise
from tests.support.implementations import Implementation

conv = Implementation(kernels.recurrence.conv, "with_llvm")

rope = Implementation(kernels.rope, "with_llvm")

norm = Implementation(kernels.norm, "with_llvm")

Form = Callable[[slice], torch.Tensor]


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    expanded=st.integers(0, 4),
)
def test_every_row_is_found(shape, order, steps, expanded):
    n = len(shape)
    order = [i for i in order if i < n]
    memory = torch.arange(4 * 8**n).float()
    x = memory[: math.prod(2 * s for s in shape)].view([2 * s for s in shape]).permute(order)
    x = x[
        tuple(slice(0, size // 2 * step, step) for size, step in zip(x.shape, steps, strict=False))
    ]
    if expanded < n:
        x = x.unsqueeze(expanded).expand(*x.shape[:expanded], 3, *x.shape[expanded:])
    kept, (address, inner, outer, step) = rows(x)
    strides = (outer // 4, step // 4, 1)
    n_rows = math.prod(x.shape[:-1])
    assert address == kept.data_ptr()
    wanted = x.reshape(n_rows, x.shape[-1])
    for r in range(n_rows):
        at = kept.storage_offset() + r // inner * strides[0] + r % inner * strides[1]
        there = kept.as_strided((x.shape[-1],), (1,), at)
        assert torch.equal(there, wanted[r])


@pytest.mark.parametrize(
    ("shape", "start"), [((2, 3, 40), 8), ((1, 5, 40), 0), ((40,), 3), ((2, 2, 1), 0)]
)
def test_columns_and_their_heads_are_not_copied(shape, start):
    part = torch.randn(*shape)[..., start : start + 30]
    assert rows(part)[0] is part
    if part.shape[-1] == 30:
        heads = part.view(*part.shape[:-1], 5, 6)
        assert rows(heads)[0] is heads


def forms(d: int) -> dict[str, Form]:
    """Kernels on up to 12 rows of width d, views of wider ones."""
    x, gate = torch.randn(2, 12, d + 3)[..., 1 : d + 1].unbind(0)
    weight, history = torch.randn(d), torch.randn(1, 15, d)
    taps, table = torch.randn(d, 4), torch.randn(1, 12, max(1, d // 3))

    def convolve(s: slice) -> torch.Tensor:
        window = history[:, s.start : s.start + 3]
        return conv.causal_conv(history[:, s.start + 3 : s.stop + 3], taps, window)[0][0]

    def rotate(s: slice) -> torch.Tensor:
        return rope.apply_rope(x[None, s].unsqueeze(2), table[:, s], table[:, s])[0]

    return {
        "rms": lambda s: norm.rms_norm(x[s], weight, 1e-6),
        "l2": lambda s: norm.l2_norm(x[s], 1e-6),
        "gated": lambda s: norm.gated_rms_norm(x[s], gate[s], weight, 1e-6),
        "swiglu": lambda s: pointwise.swiglu(gate[s], x[s]),
        "gates": lambda s: torch.stack(pointwise.delta_gates(x[s], weight, weight, gate[s]), 1),
        "conv": convolve,
    } | ({"rope": rotate} if d > 1 else {})


@given(
    d=st.sampled_from([1, 7, 16, 33, 80]),
    start=st.integers(0, 11),
    n=st.integers(1, 12),
    alone=st.sampled_from([1, 1 << 15]),
)
def test_a_row_has_the_same_bits_in_any_company(d, start, n, alone):
    """Whatever rows stand before and after it, and on however many threads."""
    before, threads = rows_module.ALONE, torch.get_num_threads()
    stop = min(12, start + n)
    try:
        for name, form in forms(d).items():
            together = form(slice(0, 12))
            rows_module.ALONE = alone
            torch.set_num_threads(3)
            part = form(slice(start, stop))
            rows_module.ALONE = before
            assert not part.isnan().any()
            assert torch.equal(part, together[start:stop]), name
    finally:
        rows_module.ALONE = before
        torch.set_num_threads(threads)
