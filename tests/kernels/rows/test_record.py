"""The record of rows against numpy, and what it is on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rows.record import on_host, row_record


def assert_of_numpy(n_vocab, record=row_record, device="cpu"):
    logits = torch.randn(3, n_vocab, generator=torch.Generator().manual_seed(n_vocab)) * 3
    logits[1, 7] = logits[1, 30] = 20  # of equal ones the first is the best
    asked = torch.tensor([5, 30, 39])
    made = record(logits.to(device), 4, asked.to(device)).cpu()
    found, x = on_host(made.numpy()), logits.numpy().astype(np.float64)
    largest = x.max(1, keepdims=True)
    order = np.argsort(-x, 1, kind="stable")
    np.testing.assert_array_equal(np.sort(found.ids, 1), np.sort(order[:, :4], 1))
    np.testing.assert_allclose(found.values, np.take_along_axis(x, order[:, :4], 1))
    np.testing.assert_allclose(found.weights, np.exp(found.values - largest), rtol=1e-5)
    s = x - largest
    sums = np.stack((np.exp(s).sum(1), (s * np.exp(s)).sum(1)), 1)
    np.testing.assert_allclose(found.sums, sums, rtol=1e-4)
    np.testing.assert_allclose(found.log, np.log(sums[:, 0]), rtol=1e-4)
    assert found.best.tolist() == order[:, 0].tolist()
    assert found.asked.tolist() == asked.tolist()
    own = np.take_along_axis(x, asked.numpy()[:, None], 1)
    assert found.n_larger.tolist() == (x > own).sum(1).tolist()
    np.testing.assert_allclose(found.weight, np.exp(own - largest)[:, 0], rtol=1e-5)


@pytest.mark.parametrize("n_vocab", [40, 5000])
def test_against_numpy(n_vocab):
    assert_of_numpy(n_vocab)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_some_rows_with_nothing_asked(k):
    record = row_record(torch.tensor([[1.0, 3.0, 2.0, 0.0, -torch.inf]] * 2), k).numpy()
    found = on_host(record[1:])
    assert found.ids.tolist() == [[1, 2, 0, 3, 4][:k]]
    assert found.best.size == found.asked.size == found.n_larger.size == found.weight.size == 0
    assert np.isfinite(found.weights).all()
