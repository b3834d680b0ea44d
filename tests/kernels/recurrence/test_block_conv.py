"""The convolution inside a block: by hand, and the fast forms against the law."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import conv as block_conv
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(block_conv, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, block_conv], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
def test_by_hand(ops):
    x = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]])
    base = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    own = torch.tensor([[[[0.0], [9.0]], [[1.0], [0.0]], [[0.0], [1.0]]]])
    # row 1: (1 + 1) 2 + 0.5 · 1 and (2 + 1) 20; row 2: 3 + 1.5 · 2 and 2 · 30 + 1 · 20
    wanted = torch.tensor([[[1.0, 20.0], [4.5, 60.0], [6.0, 80.0]]])
    torch.testing.assert_close(ops.block_conv(x, base, own), wanted)


@pytest.mark.parametrize("ops", [with_torch, with_llvm], ids=["torch", "llvm"])
@pytest.mark.parametrize(
    ("d", "n_groups", "n_taps", "n_tokens"), [(32, 2, 2, 8), (48, 1, 3, 2), (21, 7, 4, 3)]
)
def test_equals_the_law(ops, d, n_groups, n_taps, n_tokens):
    wide = torch.full((2, n_tokens, d + 3), torch.nan)
    x = wide[..., 2 : 2 + d].normal_()
    base, own = torch.randn(n_taps, d), torch.randn(2, n_tokens, 2, n_taps, n_groups)[:, :, 1]
    law = naive.block_conv(x.double(), base.double(), own.double())
    assert nmse(ops.block_conv(x, base, own), law) < 1e-12
