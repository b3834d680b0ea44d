"""The gated delta rule from and to rows of a pool: naive, in torch, and the public function."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence.delta_rule import (
    gated_delta_into,
    gated_delta_slots,
    naive,
    with_llvm,
    with_torch,
)
from tests.support.delta_inputs import make
from tests.support.delta_pool import assert_the_rest_is_poison, scattered


@pytest.mark.parametrize("n_tokens", [1, 4, 40])
def test_torch_looks_at_no_number_on_the_host(n_tokens):
    """On the device `meta` there are none to look at."""
    inputs = make(2, 8, n_tokens, 2).to("meta")
    rows = torch.empty(9, *inputs.state.shape[1:], device="meta")
    read = torch.zeros(2, dtype=torch.int64, device="meta")
    write = torch.zeros(2, min(n_tokens, 3), dtype=torch.int64, device="meta")
    o = with_torch.gated_delta_slots(*inputs[:5], rows, read, write, grouped=False)
    assert o.shape == inputs.v.shape
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        naive.gated_delta_slots(*inputs[:5], rows, read, write, grouped=False)


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("grouped", [False, True], ids=["tiled", "grouped"])
@pytest.mark.parametrize(("n_tokens", "n"), [(1, 1), (4, 4), (7, 2)])
@pytest.mark.parametrize("module", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
def test_the_bits_are_those_of_states_chosen_by_the_host(module, n_tokens, n, grouped, kda):
    inputs = make(2, 16, n_tokens, 3, repeat=2, kda=kda)
    pool = scattered(inputs.state, n, over=0)
    o = module.gated_delta_slots(*inputs[:5], pool.rows, pool.read, pool.write, grouped=grouped)
    slots = [torch.empty_like(inputs.state) for _ in range(n)]
    assert torch.equal(o, module.gated_delta_into(*inputs, grouped=grouped, slots=slots))
    assert torch.equal(pool.rows[pool.write], torch.stack(slots, 1))


@pytest.mark.parametrize("shift", [0, 1], ids=["on lines", "beside"])
@pytest.mark.parametrize(("d_v", "over"), [(64, 0), (64, -1), (48, None)])
def test_large_states_go_past_the_caches_with_the_same_bits(d_v, over, shift, monkeypatch):
    inputs = make(2, 16, 5, 3, repeat=2, d_v=d_v)
    found = []
    for large in (1 << 60, 0):
        monkeypatch.setattr(with_llvm, "LARGE", large)
        torch.manual_seed(7)
        pool = scattered(inputs.state, 3, over)
        somewhere = torch.empty(pool.rows.numel() + shift)[shift:].view(pool.rows.shape)
        somewhere.copy_(pool.rows)
        o = with_llvm.gated_delta_slots(*inputs[:5], somewhere, pool.read, pool.write, grouped=True)
        found.append((o, somewhere.nan_to_num(123.0)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_more_rows_than_tokens_are_refused():
    inputs = make(1, 8, 2, 1)
    pool = scattered(inputs.state, 3, over=None)
    with pytest.raises(ValueError, match="2 tokens leave no 3 states"):
        gated_delta_slots(*inputs[:5], pool.rows, pool.read, pool.write, grouped=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("n_tokens", "n"), [(1, 1), (4, 4), (16, 5)])
@torch.inference_mode()
def test_a_recorded_call_follows_the_numbers_on_the_device(n_tokens, n, kda):
    """A CUDA graph replayed with other rows and inputs, with the bits of gated_delta_into."""
    given = make(4, 64, n_tokens, 3, repeat=2, kda=kda).to("cuda")
    pool = scattered(given.state.cpu(), n, over=0).to("cuda")
    arguments = *given[:5], pool.rows, pool.read, pool.write
    gated_delta_slots(*arguments, grouped=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gated_delta_slots(*arguments, grouped=False)
    for over in (None, 0, -1):
        inputs = make(4, 64, n_tokens, 3, repeat=2, kda=kda).to("cuda")
        other = scattered(inputs.state.cpu(), n, over).to("cuda")
        for old, new in zip((*given[:5], *pool), (*inputs[:5], *other), strict=True):
            old.copy_(new)
        graph.replay()
        slots = [torch.empty_like(inputs.state) for _ in range(n)]
        expected = gated_delta_into(*inputs, grouped=False, slots=slots)
        assert torch.equal(o, expected)
        assert torch.equal(pool.rows[pool.write], torch.stack(slots, 1))
        assert_the_rest_is_poison(pool)
