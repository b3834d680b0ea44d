"""The place of the largest value."""

from __future__ import annotations

import pytest
import torch

from kernels.rows import reductions as argmax
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(argmax, "naive", "with_llvm", "with_torch")


@pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, argmax], ids=["naive", "torch", "llvm", "op"]
)
@pytest.mark.parametrize("d", [1, 16, 21, 100])
def test_first_of_the_largest(ops, d):
    wide = torch.full((3, 2, d + 4), torch.inf)
    x = wide[..., 2 : 2 + d].normal_()
    x[0, 0, d // 2 :] = 5.0
    x[0, 1] = -torch.inf
    x[1, 0, d - 1] = 7.0
    found = ops.argmax(x)
    assert found.dtype == torch.int64 and found.shape == (3, 2)
    assert found.tolist()[0] == [d // 2, 0] and found[1, 0] == d - 1
    assert torch.equal(x.gather(-1, found[..., None])[..., 0], x.amax(-1))
