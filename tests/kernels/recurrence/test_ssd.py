"""State-space duality: hand case, law against fast versions, snapshots, rows of a pool."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.recurrence import ssd as op
from kernels.recurrence.ssd import naive, with_llvm, with_torch
from tests.support.closeness import nmse
from tests.support.delta_pool import scattered
from tests.support.ssd_inputs import make, strided

IMPLEMENTATIONS = pytest.mark.parametrize(
    "module", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"]
)
FAST = pytest.mark.parametrize("module", [with_torch, with_llvm], ids=["torch", "llvm"])
F32, F64 = 1e-11, 1e-24
CHUNK = with_torch.CHUNK


@IMPLEMENTATIONS
def test_two_tokens_by_hand(module):
    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).reshape(1, 2, 1, 1)

    x, dt, B, C = numbers(4, 1), numbers(0.5, 2), numbers(3, -1), numbers(2, 3)
    g = numbers(math.log(0.5), 0)[..., 0]
    D, state = torch.tensor([10.0]), torch.full((1, 1, 1, 1), 8.0)
    o, kept = module.ssd(x, dt[..., 0], g, B, C, D, state, n_snapshots=2)
    # token 0: S = 8 / 2 + 2 * 3 = 10, o = 10 * 2 + 10 * 4 = 60
    # token 1: S = 10 + 2 * -1 = 8, o = 8 * 3 + 10 * 1 = 34
    torch.testing.assert_close(o.flatten(), torch.tensor([60.0, 34.0]))
    torch.testing.assert_close(kept.flatten(), torch.tensor([8.0, 10.0]))


@pytest.mark.parametrize("n_batch", [1, 3])
@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 31, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_every_length_and_depth(n_tokens, n_batch):
    inputs = make(n_tokens, n_batch=n_batch, n_groups=1)
    o, states = naive.ssd(*inputs.double(), n_snapshots=n_tokens)
    for n_snapshots in {1, 2, 5, CHUNK + 3, n_tokens}:
        for module, given, bound in (
            (with_torch, inputs.double(), F64),
            (with_torch, inputs, F32),
            (with_llvm, inputs, F32),
        ):
            result, kept = module.ssd(*given, n_snapshots=n_snapshots)
            assert kept.shape[1] == min(n_tokens, n_snapshots)
            assert nmse(result, o) < bound
            assert nmse(kept, states[:, :n_snapshots]) < bound


@FAST
@pytest.mark.parametrize(("p", "n"), [(1, 1), (3, 5), (12, 20), (64, 128), (80, 256)])
@pytest.mark.parametrize("n_tokens", [1, 3, 9])
def test_any_sides_and_strides(module, n_tokens, p, n):
    inputs = make(n_tokens, n_batch=2, p=p, n=n)
    o, kept = naive.ssd(*inputs.double(), n_snapshots=2)
    for given in (inputs, strided(inputs)):
        result, states = module.ssd(*given, n_snapshots=2)
        assert nmse(result, o) < F32
        assert nmse(states, kept) < F32
        assert torch.equal(given.state, inputs.state)


@FAST
@pytest.mark.parametrize("g", [-20.0, -1000.0])
def test_strong_decay_neither_overflows_nor_poisons(module, g):
    inputs = make(CHUNK + 6)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, kept = module.ssd(*inputs, n_snapshots=3)
    truth = naive.ssd(*inputs.double(), n_snapshots=3)
    assert nmse(o, truth[0]) < F32
    assert nmse(kept, truth[1]) < F32


@FAST
def test_weak_decay_after_strong_keeps_its_precision(module):
    inputs = make(CHUNK)
    inputs.g.fill_(-1e-3)[:, : CHUNK // 2 : 2] = -40.0
    o, kept = module.ssd(*inputs)
    truth = naive.ssd(*inputs.double())
    assert nmse(o, truth[0]) < F32
    assert nmse(kept, truth[1]) < F32


@FAST
@pytest.mark.parametrize("n_tokens", [1, 5, CHUNK + 9])
@pytest.mark.parametrize("over", [None, 0, 1, -1])
def test_states_are_written_into_planes(module, n_tokens, over):
    """Planes [K, cells, ...] of which a call writes some cells; the rest keeps its bits."""
    inputs = make(n_tokens, n_batch=2)
    n_fresh = min(4, n_tokens)
    planes = torch.full((5, 4, *inputs.state.shape[1:]), torch.nan)
    slots = list(planes[:n_fresh, 1:3].unbind(0))
    given = inputs
    if over is not None and over < n_fresh:
        slots[over].copy_(inputs.state)
        given = inputs._replace(state=slots[over])
    o = module.ssd_into(*given, slots=slots)
    truth = naive.ssd(*inputs.double(), n_snapshots=n_fresh)
    assert nmse(o, truth[0]) < F32
    assert nmse(planes[:n_fresh, 1:3], truth[1].transpose(0, 1)) < F32
    planes[:n_fresh, 1:3] = torch.nan
    assert planes.isnan().all()


@pytest.mark.parametrize("module", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
def test_rows_by_number_have_the_bits_of_slots(module):
    inputs = make(6, n_batch=2)
    pool = scattered(inputs.state, 3, over=1)
    slots = [torch.empty_like(inputs.state) for _ in range(3)]
    o = module.ssd_into(*inputs, slots=slots)
    found = module.ssd_slots(*inputs[:6], pool.rows, pool.read, pool.write)
    assert torch.equal(found, o)
    assert torch.equal(pool.rows[pool.write], torch.stack(slots, 1))


def test_more_rows_than_tokens_are_refused():
    inputs = make(2)
    with pytest.raises(ValueError, match="leave no 3 states"):
        op.ssd_slots(*inputs[:6], inputs.state, torch.zeros(1).long(), torch.zeros(1, 3).long())


def test_slots_that_are_not_alike_are_refused():
    inputs = make(2, p=8, n=8)
    slots = [torch.empty(1, 4, 8, 8), torch.empty(1, 4, 8, 9)[..., :8]]
    with pytest.raises(ValueError, match="differ in their strides"):
        with_llvm.ssd_into(*inputs, slots=slots)
    with pytest.raises(ValueError, match="do not lie side by side"):
        with_llvm.ssd_into(*inputs, slots=[slots[0].transpose(2, 3)])
    pool, row = slots[0].transpose(2, 3), torch.zeros(1, 1).long()
    with pytest.raises(ValueError, match="do not lie side by side"):
        with_llvm.ssd_slots(*inputs[:6], pool, row[0], row)


@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_threads(threads):
    inputs = make(5, n_batch=2, share=8, p=64, n=64)
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, threads):
            torch.set_num_threads(n)
            results.append(with_llvm.ssd(*inputs, n_snapshots=5))
    finally:
        torch.set_num_threads(before)
    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)
