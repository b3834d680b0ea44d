"""The short convolution from and to rows of a pool, and windows folded forward."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import conv
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(conv, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, conv], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("over", [False, True], ids=["apart", "over"])
@pytest.mark.parametrize(("n_tokens", "n"), [(1, 1), (2, 2), (5, 3)])
@pytest.mark.parametrize("n_channels", [6, 16, 53])
def test_windows_come_from_rows_and_go_to_rows(ops, n_channels, n_tokens, n, over):
    pool, weight = torch.randn(9, 3, n_channels), torch.randn(n_channels, 4)
    x = torch.randn(2, n_tokens, n_channels + 2)[..., 1:-1]
    read = torch.tensor([7, 2])
    write = torch.tensor([[7 if over else 0, 1, 3], [8, 2 if over else 4, 5]])[:, :n]
    law, history = naive.causal_conv(x.double(), weight.double(), pool[read].double())
    expected = pool.clone()
    for i in range(n):
        end = n_tokens - (n - 1 - i) + 3
        expected[write[:, i]] = history[:, end - 3 : end].float()
    y = ops.causal_conv_slots(x, weight, pool, read, write, None)
    assert nmse(y, law) < 1e-12
    assert torch.equal(pool, expected)


def test_llvm_has_the_bits_of_windows_chosen_by_the_host():
    pool, weight, x = torch.randn(4, 3, 40), torch.randn(40, 4), torch.randn(2, 5, 40)
    read = torch.tensor([3, 1])
    expected, _ = with_llvm.causal_conv(x, weight, pool[read])
    write = torch.tensor([[0], [2]])
    assert torch.equal(with_llvm.causal_conv_slots(x, weight, pool, read, write, None), expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("in_place", [False, True])
def test_windows_move_on_by_counts_in_memory(ops, in_place):
    window, columns = torch.randn(5, 3, 20), torch.randn(5, 6, 30)[..., 5:25]
    counts = torch.tensor([0, 1, 3, 4, 6])
    history = torch.cat((window, columns), 1)
    expected = torch.stack([history[b, n : n + 3] for b, n in enumerate(counts.tolist())])
    out = window if in_place else torch.empty(5, 3, 20)
    assert ops.fold_window(window, columns, counts, out) is out
    assert torch.equal(out, expected)
