"""Softmax attention: the law by hand, then both fast forms against it."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.attention import naive, with_torch
from tests.support.closeness import nmse

F32 = 1e-11
# heads, key/value heads, head dim
HEADS = [(1, 1, 8), (4, 4, 16), (4, 2, 16), (6, 1, 32)]


@pytest.fixture(params=["fused", "grouped"])
def fast(request, monkeypatch):
    """The fast version, forced into one of its two forms."""
    threshold = 0 if request.param == "grouped" else math.inf
    monkeypatch.setattr(with_torch, "MANY_VALUES", threshold)
    return with_torch.attend


def make(n_batch, n_tokens, heads, n_cells):
    n_heads, n_kv_heads, head_dim = heads
    mask = torch.rand(n_batch, n_tokens, n_cells) < 0.6
    mask[..., n_cells // 2] = True
    return (
        torch.randn(n_batch, n_tokens, n_heads, head_dim),
        torch.randn(n_batch, n_kv_heads, n_cells, head_dim),
        torch.randn(n_batch, n_kv_heads, n_cells, head_dim),
        mask,
    )


def test_law_by_hand():
    q = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]])
    k = torch.tensor([[[[math.log(3.0), 5.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], [9.0] * 4]]])
    v = torch.tensor([[[[4.0] * 4, [8.0] * 4, [100.0] * 4]]])
    # scores ln 3 and 0 after the division by sqrt(4): weights 3/4 and 1/4
    o = naive.attend(q, k, v, torch.tensor([[[True, True, False]]]))
    torch.testing.assert_close(o, torch.full((1, 1, 1, 4), 5.0))


def test_the_law_reads_visible_cells_only():
    q, k, v, mask = make(2, 3, (4, 2, 16), 9)
    expected = naive.attend(q, k, v, mask)
    mask[:, :, 3] = False
    unseen = naive.attend(q, k, v, mask)
    k[:, :, 3] = v[:, :, 3] = torch.nan
    assert torch.equal(naive.attend(q, k, v, mask), unseen)
    assert not torch.equal(unseen, expected)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("n_tokens", "n_cells"), [(1, 1), (1, 17), (4, 5), (7, 40), (20, 64)])
@pytest.mark.parametrize("n_batch", [1, 3])
def test_equals_the_law(fast, n_batch, n_tokens, n_cells, heads):
    q, k, v, mask = make(n_batch, n_tokens, heads, n_cells)
    truth = naive.attend(q.double(), k.double(), v.double(), mask)
    o = fast(q, k, v, mask)
    assert o.shape == q.shape
    assert nmse(o, truth) < F32


def test_one_visible_cell_gives_its_value_to_the_right_heads(fast):
    q, k, v, mask = make(1, 2, (6, 2, 8), 5)
    mask[:] = False
    mask[0, 0, 4] = mask[0, 1, 2] = True
    o = fast(q, k, v, mask)
    for t, cell in ((0, 4), (1, 2)):
        for h in range(6):
            torch.testing.assert_close(o[0, t, h], v[0, h // 3, cell])


def test_any_strides(fast):
    q, k, v, mask = make(2, 3, (4, 2, 16), 12)
    # a cache of 20 cells of which 12 are used, stored token-major, and a mask shared by the batch
    cache_k, cache_v = (torch.full((2, 20, 2, 16), torch.nan) for _ in range(2))
    cache_k[:, :12], cache_v[:, :12] = k.transpose(1, 2), v.transpose(1, 2)
    shared = mask[:1].expand(2, 3, 12)
    used_k, used_v = (c.transpose(1, 2)[:, :, :12] for c in (cache_k, cache_v))
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    o = fast(strided_q, used_k, used_v, shared)
    assert nmse(o, naive.attend(q.double(), k.double(), v.double(), shared)) < F32


def test_hidden_cells_weigh_nothing_however_large(fast):
    q, k, v, mask = make(1, 4, (4, 2, 16), 10)
    hidden = [0, 3, 9]
    mask[..., hidden] = False
    truth = naive.attend(q.double(), k.double(), v.double(), mask)
    k[:, :, hidden] = v[:, :, hidden] = 1e30
    assert nmse(fast(q, k, v, mask), truth) < F32


def test_large_scores_do_not_overflow(fast):
    q, k, v, mask = make(1, 3, (2, 1, 16), 8)
    truth = naive.attend(q.double() * 300, k.double() * 300, v.double(), mask)
    assert nmse(fast(q * 300, k * 300, v, mask), truth) < 1e-6


def test_both_forms_are_in_use(monkeypatch):
    """One token over a long cache goes the grouped way, over a short one the fused way."""
    calls = []
    monkeypatch.setattr(with_torch, "_grouped", lambda *args: calls.append(args) or args[0])
    for n_cells in (8, with_torch.MANY_VALUES // 16):
        with_torch.attend(*make(1, 1, (2, 1, 16), n_cells))
    assert [args[1].shape[2] for args in calls] == [with_torch.MANY_VALUES // 16]
