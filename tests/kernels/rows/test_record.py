"""The record of rows against numpy, and what it is on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.dispatch import torch_version
from kernels.rows.record import _record, on_host, row_record, tokens_after, weights


def assert_of_numpy(n_vocab, record=row_record, device="cpu", k=4):
    logits = torch.randn(3, n_vocab, generator=torch.Generator().manual_seed(n_vocab)) * 3
    logits[1, 7] = logits[1, 30] = 20  # of equal ones the first is the best
    asked = torch.tensor([5, 30, 39])
    made = record(logits.to(device), k, asked.to(device)).cpu()
    found, x = on_host(made.numpy()), logits.numpy().astype(np.float64)
    largest = x.max(1, keepdims=True)
    order = np.argsort(-x, 1, kind="stable")
    np.testing.assert_array_equal(np.sort(found.ids, 1), np.sort(order[:, :k], 1))
    np.testing.assert_allclose(found.values, np.take_along_axis(x, order[:, :k], 1))
    of_top = weights(found.values, found.values[:, :1])
    np.testing.assert_allclose(of_top, np.exp(found.values - largest), rtol=1e-5)
    s = x - largest
    sums = np.stack((np.exp(s).sum(1), (s * np.exp(s)).sum(1)), 1)
    np.testing.assert_allclose(found.sums, sums, rtol=1e-4)
    assert found.best.tolist() == order[:, 0].tolist()
    assert found.asked.tolist() == asked.tolist()
    own = np.take_along_axis(x, asked.numpy()[:, None], 1)
    assert found.n_larger.tolist() == (x > own).sum(1).tolist()
    np.testing.assert_array_equal(found.own, own[:, 0])


@pytest.mark.parametrize("record", [row_record, torch_version(_record)], ids=["op", "torch"])
@pytest.mark.parametrize("k", [1, 4, 17, 40])
@pytest.mark.parametrize("n_vocab", [40, 4096, 5000])
def test_against_numpy(n_vocab, k, record):
    assert_of_numpy(n_vocab, record, k=k)


def test_both_versions_have_the_same_bits():
    x = torch.randn(5, 4099, generator=torch.Generator().manual_seed(1)) * 3
    asked = torch.tensor([0, 4098, 17, 5, 5])
    assert torch.equal(row_record(x, 10, asked), torch_version(_record)(x, 10, asked))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_impossible_tokens_stay_finite(k):
    x = torch.tensor([[1.0, 3.0, 2.0, 0.0, -torch.inf]] * 2)
    found = on_host(row_record(x, k, torch.tensor([4, 0])).numpy()[1:])
    assert found.ids.tolist() == [[1, 2, 0, 3, 4][:k]]
    assert found.asked.tolist() == [0]
    assert np.isfinite(weights(found.values, found.values[:, :1])).all()


@pytest.mark.parametrize("after", [tokens_after, torch_version(tokens_after)])
def test_the_token_after_each_row_and_after_the_last_the_first(after):
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    assert after(tokens, torch.tensor([0, 2, 3, 5])).tolist() == [6, 8, 9, 5]
