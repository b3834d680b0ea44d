"""Softmax attention: the law by hand, then the fast forms against it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention
from kernels.attention import steps_with_llvm, with_llvm
from tests.support.attention import WithDefaults
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_torch = map(WithDefaults, implementations(attention, "naive", "with_torch"))
llvm = WithDefaults(with_llvm)

F32 = 1e-11
# heads, key/value heads, head dim
HEADS = [(1, 1, 8), (4, 4, 16), (4, 2, 16), (6, 1, 32), (3, 1, 20), (10, 2, 7)]


@pytest.fixture(params=["fused", "grouped", "llvm", "narrow llvm"])
def fast(request):
    """The fast versions, forced into one of their two forms."""
    with pytest.MonkeyPatch.context() as patch:
        if "llvm" not in request.param:
            threshold = 0 if request.param == "grouped" else math.inf
            patch.setattr(attention, "MANY_VALUES", threshold)
            yield with_torch.attend
        elif request.param == "llvm":
            yield llvm.attend
        else:
            for name, value in (("LANES", 8), ("CELLS", 2), ("COLUMNS", 2)):
                patch.setattr(steps_with_llvm, name, value)
            for name in ("_chunks", "_total"):
                patch.setattr(
                    with_llvm, name, functools.cache(getattr(with_llvm, name).__wrapped__)
                )
            yield llvm.attend


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
    monkeypatch.setattr(attention, "attend_grouped", lambda *args: calls.append(args) or args[0])
    for n_cells in (8, attention.MANY_VALUES // 16):
        with_torch.attend(*make(1, 1, (2, 1, 16), n_cells))
    assert [args[1].shape[2] for args in calls] == [attention.MANY_VALUES // 16]


@pytest.mark.parametrize("heads", [(8, 2, 256), (3, 1, 24), (70, 1, 8)], ids=str)
@pytest.mark.parametrize(
    ("n_tokens", "n_cells"), [(1, 512), (2, 513), (1, 1500), (17, 1100), (70, 600)]
)
@pytest.mark.thinned(8)
def test_chunks_of_cells_and_tokens(n_tokens, n_cells, heads):
    q, k, v, mask = make(2, n_tokens, heads, n_cells)
    mask[1, :, 20:] = False  # chunks that no one sees
    mask[1, 0, 0] = mask[1, 1:, 5] = True
    o = llvm.attend(q, k, v, mask)
    assert nmse(o, naive.attend(q.double(), k.double(), v.double(), mask)) < F32


def test_more_heads_than_a_stack_has_room_for():
    q, k, v, mask = make(1, 2, (5000, 1, 4), 30)
    exact = naive.attend(q.double(), k.double(), v.double(), mask)
    for attend in (llvm.attend, llvm.attend_invariant):
        assert nmse(attend(q, k, v, mask), exact) < F32


@pytest.mark.parametrize("n_cells", [9, 1300])
def test_a_query_that_sees_nothing_gives_zeros(n_cells):
    q, k, v, mask = make(1, 3, (4, 2, 16), n_cells)
    mask[0, 1] = False
    o = llvm.attend(q, k, v, mask)
    assert torch.equal(o[0, 1], torch.zeros(4, 16))
    for t in (0, 2):
        law = naive.attend(q[:, t : t + 1], k, v, mask[:, t : t + 1])
        torch.testing.assert_close(o[:, t : t + 1], law)


def test_neighbours_in_memory_may_lie_apart():
    x = make(1, 2, (4, 2, 12), 33)
    apart = [torch.stack((t, t), -1).flatten(-2)[..., ::2] for t in x]
    assert all(t.stride(-1) == 2 for t in apart)
    assert torch.equal(llvm.attend(*apart), llvm.attend(*x))


def test_nan_in_what_is_seen_reaches_the_output():
    q, k, v, mask = make(1, 2, (2, 1, 16), 40)
    mask[:] = True
    mask[0, 1, 7] = False
    k[0, 0, 7] = torch.nan
    o = llvm.attend(q, k, v, mask)
    assert o[0, 0].isnan().all() and o[0, 1].isfinite().all()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from([(8, 2, 64), (3, 1, 24), (2, 2, 7)]),
    st.integers(1, 1200),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 2**20),
)
def test_bits_depend_on_the_query_and_its_visible_cells_alone(
    n_batch, n_tokens, heads, n_cells, density, in_front, n_threads, seed
):
    """Whatever else is in the batch, wherever the visible cells lie, however many threads."""
    torch.manual_seed(seed)
    q, k, v, mask = make(n_batch, n_tokens, heads, n_cells)
    mask = torch.rand(mask.shape) < density
    if in_front:
        mask = torch.arange(n_cells) < mask.sum(-1, keepdim=True)
    mask[..., 0] = True
    unseen = ~mask.any(1)[:, None].expand(-1, heads[1], -1)
    k[unseen] = v[unseen] = torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    together = llvm.attend_invariant(q, k, v, mask)
    torch.set_num_threads(before)
    assert together.isfinite().all()
    b, t = seed % n_batch, seed // 7 % n_tokens
    cells = mask[b, t].nonzero().squeeze(1)
    # the query and what it sees, in memory of their own
    alone = llvm.attend_invariant(
        q[b : b + 1, t : t + 1].clone(),
        k[b : b + 1, :, cells],
        v[b : b + 1, :, cells],
        torch.ones(1, 1, len(cells), dtype=torch.bool),
    )
    assert torch.equal(alone[0, 0], together[b, t])


@pytest.mark.parametrize("heads", [(8, 1, 24), (4, 2, 36), (3, 1, 9)])
@pytest.mark.parametrize(("n_tokens", "n_cells"), [(1, 5), (3, 700), (20, 40)])
def test_values_are_columns_of_the_keys(fast, heads, n_tokens, n_cells):
    """As in latent attention: keys longer than values, one row for both, a scale of its own."""
    q, k, _, mask = make(2, n_tokens, heads, n_cells)
    v = k[..., : heads[2] - 8]
    o = fast(q, k, v, mask, 0.125)
    law = naive.attend(q.double(), k.double(), v.double(), mask, 0.125)
    assert o.shape == (2, n_tokens, heads[0], heads[2] - 8)
    assert nmse(o, law) < F32
    for invariant in (llvm.attend_invariant, with_torch.attend_invariant):
        assert nmse(invariant(q, k, v, mask, 0.125), law) < F32


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 20)])
@pytest.mark.parametrize(("n_tokens", "n_cells"), [(1, 1), (3, 40), (2, 1100)])
def test_sinks_take_weight(fast, n_tokens, n_cells, heads):
    q, k, v, mask = make(2, n_tokens, heads, n_cells)
    mask[0, 0] = False
    mask[0, 0, 0] = True
    sinks = torch.randn(heads[0]) + 3
    sinks[0] = 200.0  # takes all, and overflows nothing
    law = naive.attend(q.double(), k.double(), v.double(), mask, None, sinks.double())
    # a single cell keeps what the sink leaves of its value
    scores = (q[0, 0, -1] @ k[0, -1, 0] * heads[2] ** -0.5).double()
    kept = 1 / (1 + (sinks[-1].double() - scores).exp())
    torch.testing.assert_close(law[0, 0, -1], kept * v[0, -1, 0].double())
    assert nmse(fast(q, k, v, mask, sinks=sinks), law) < F32
    for invariant in (llvm.attend_invariant, with_torch.attend_invariant):
        assert nmse(invariant(q, k, v, mask, None, sinks), law) < F32
