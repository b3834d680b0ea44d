"""The largest values of a row: both versions against numpy's sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rows import reductions as op
from kernels.rows.reductions import LONG, STRETCH
from tests.support.implementations import implementations

naive, with_torch = implementations(op, "naive", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "top_k", [naive.top_k, with_torch.top_k, op.top_k], ids=["naive", "torch", "op"]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [1, 7, LONG - 1, LONG, LONG + STRETCH - 1, 50_000])
@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("n_rows", [(), (1,), (2, 3)])
def test_against_a_sort(top_k, n, k, n_rows):
    x, k = torch.randn(*n_rows, n), min(k, n)
    values, ids = top_k(x, k)
    assert ids.dtype == torch.int64
    np.testing.assert_array_equal(values.numpy(), -np.sort(-x.numpy(), axis=-1)[..., :k])
    assert torch.equal(x.gather(-1, ids), values)
    assert all(len(set(row.tolist())) == k for row in ids.reshape(-1, k))


@IMPLEMENTATIONS
def test_the_largest_may_share_a_stretch_or_stand_behind_the_last(top_k):
    x = torch.zeros(LONG + 5)
    x[130:140] = torch.arange(1.0, 11.0)
    x[-1] = 5.5
    values, ids = top_k(x, 10)
    assert ids.tolist() == [139, 138, 137, 136, 135, LONG + 4, 134, 133, 132, 131]
    assert values[5] == 5.5


@IMPLEMENTATIONS
@pytest.mark.parametrize("places", [(3, 4), (5, 900), (127, 128), (200, LONG + 1)])
def test_the_first_of_equal_values_is_the_greedy_choice(top_k, places):
    x = torch.zeros(2, LONG + 9)
    x[:, list(places)] = 1.0
    assert top_k(x, 1)[1].tolist() == [[places[0]]] * 2


@IMPLEMENTATIONS
def test_rows_with_banned_tokens(top_k):
    x = torch.full((1, 2 * LONG), -torch.inf)
    x[0, 77] = -3.0
    values, ids = top_k(x, 4)
    assert (values[0, 0], ids[0, 0]) == (-3.0, 77)
    assert torch.isneginf(values[0, 1:]).all()
    assert len(set(ids[0].tolist())) == 4


def test_of_equal_values_the_lowest_index_comes_first_and_nan_before_all():
    numbers = [1.0, -0.0, 3.0, 0.0, torch.nan, 3.0, torch.inf, -torch.inf, -torch.nan] * 9
    order = [i for i in range(81) if numbers[i] != numbers[i]]
    order += sorted(set(range(81)) - {*order}, key=lambda i: (-numbers[i], i))
    values, ids = op.top_k(torch.tensor(numbers), 60)
    assert ids.tolist() == order[:60]
    assert values[:18].isnan().all() and values[18:27].isposinf().all()


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 7), (127, 5), (128, 128), (129, 129), (4099, 256), (70_001, 40)]
)
def test_the_order_is_that_of_a_stable_sort(n, k):
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    x[1] = x[1].round()  # with equal ones
    x[2] = 2.0  # all equal
    assert torch.equal(op.top_k(x, k)[1], naive.top_k(x, k)[1])


@IMPLEMENTATIONS
def test_strided_rows(top_k):
    x = torch.randn(LONG + 3, 2).t()
    assert torch.equal(top_k(x, 5)[0], naive.top_k(x.contiguous(), 5)[0])
