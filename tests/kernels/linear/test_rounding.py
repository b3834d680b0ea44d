"""Rounding to bf16 and f16 against NumPy: its half floats, and powers of two in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.linear import rounding
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(rounding, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, rounding], ids=["naive", "torch", "llvm", "op"]
)
TYPES = pytest.mark.parametrize("type", ["bf16", "f16"])


def expected(x: torch.Tensor, type: str) -> np.ndarray:
    """In float64: the nearest multiple of a power of two, which `rint` finds with ties to even."""
    numbers = x.numpy()
    if type == "f16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    wide = numbers.astype(np.float64)
    _, exponent = np.frexp(wide)
    unit = np.exp2(np.maximum(exponent - 8, -133).astype(np.float64))
    return (np.rint(wide / unit) * unit).astype(np.float32)


def numbers(*shape: int) -> torch.Tensor:
    """Of all sizes, with ties, zeros of both signs, subnormal numbers and infinity."""
    x = torch.randn(*shape) * torch.logspace(-9, 4, shape[-1])
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, 65520.0, -0.0, 1e-40])
    flat = x.flatten()
    n = min(len(special), len(flat))
    flat[:n] = special[:n]
    flat[-1] = torch.inf
    return flat.view(shape)


@IMPLEMENTATIONS
@TYPES
@pytest.mark.parametrize("width", [1, 16, 53])
def test_the_nearest_number(ops, type, width):
    x = numbers(7, width)
    found = ops.rounded(x, type)
    np.testing.assert_array_equal(found.numpy(), expected(x, type))
    assert torch.equal(ops.rounded(found, type), found), "twice is once"
    assert torch.equal(torch.signbit(found), torch.signbit(x))


@IMPLEMENTATIONS
@TYPES
def test_in_place_of_a_view(ops, type):
    wide = numbers(3, 4, 40)
    before, view = wide.clone(), wide[:, 1:3, 5:30]
    ops.round_in_place(view, type)
    np.testing.assert_array_equal(view.numpy(), expected(before[:, 1:3, 5:30], type))
    view.copy_(before[:, 1:3, 5:30])
    assert torch.equal(wide, before), "what lies around it keeps its bits"
    transposed = numbers(3, 4, 5, 6).permute(2, 0, 1, 3)
    wanted = expected(transposed, type)
    ops.round_in_place(transposed, type)
    np.testing.assert_array_equal(transposed.numpy(), wanted)


@IMPLEMENTATIONS
@TYPES
def test_rows_by_number(ops, type):
    wide = numbers(9, 2, 3, 21)
    before, rows = wide.clone(), torch.tensor([[4, 0], [8, 5]])
    ops.round_rows(wide[:, 1], rows, type)
    before[rows.flatten(), 1] = torch.from_numpy(expected(before[rows.flatten(), 1], type))
    assert torch.equal(wide, before)


@IMPLEMENTATIONS
def test_nan_stays(ops):
    for type in ("bf16", "f16"):
        assert ops.rounded(torch.tensor([torch.nan, 1.0]), type).isnan().tolist() == [True, False]
