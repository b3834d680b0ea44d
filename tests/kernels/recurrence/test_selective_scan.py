"""The selective scan: its definition, states on the way, aliases, bits."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import torch_version
from kernels.recurrence.selective_scan import (
    scan_into,
    scan_into_naive,
    scan_into_with_llvm,
    scan_slots,
    scan_slots_naive,
    scan_slots_with_llvm,
)

INTO = pytest.mark.parametrize(
    "run", [scan_into_naive, torch_version(scan_into), scan_into_with_llvm, scan_into]
)
SLOTS = pytest.mark.parametrize(
    "run", [scan_slots_naive, torch_version(scan_slots), scan_slots_with_llvm, scan_slots]
)


def _inputs(n_batch: int, n_tokens: int, n_channels: int, n_state: int):
    """As a layer hands them over: parts of wider rows."""
    generator = torch.Generator().manual_seed(n_tokens * n_channels)
    wide = torch.rand(n_batch, n_tokens, 2 * n_channels + 3, generator=generator)
    x, dt = wide[..., :n_channels] - 0.5, wide[..., n_channels : 2 * n_channels]
    low = torch.rand(n_batch, n_tokens, 2 * n_state + 5, generator=generator) - 0.5
    B, C = low[..., 5:].split(n_state, -1)
    A = -3 * torch.rand(n_state, n_channels, generator=generator)
    D, state = torch.rand(n_channels), torch.rand(n_batch, n_state, n_channels) - 0.5
    return x, dt, A, B, C, D, state


def _definition(x, dt, A, B, C, D, state):
    """Outputs and the states after every token, float64."""
    x, dt, A, B, C, D, S = (each.double() for each in (x, dt, A, B, C, D, state))
    outputs, states = [], []
    for t in range(x.shape[1]):
        S = (dt[:, t, None] * A).exp() * S + torch.einsum("bc,bn->bnc", dt[:, t] * x[:, t], B[:, t])
        outputs.append(torch.einsum("bnc,bn->bc", S, C[:, t]) + D * x[:, t])
        states.append(S)
    return torch.stack(outputs, 1), states


@INTO
@pytest.mark.parametrize("sizes", [(1, 1, 5, 3), (2, 4, 64, 16), (1, 7, 37, 2), (2, 3, 128, 5)])
@pytest.mark.parametrize("n_slots", [1, 3])
def test_outputs_and_states_are_those_of_the_definition(run, sizes, n_slots):
    inputs = _inputs(*sizes)
    n_slots = min(n_slots, sizes[1])
    wanted, states = _definition(*inputs)
    slots = [torch.full_like(inputs[6], torch.nan) for _ in range(n_slots)]
    o = run(*inputs, slots=slots)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-5, atol=1e-6)
    for slot, state in zip(slots, states[::-1], strict=False):
        torch.testing.assert_close(slot.double(), state, rtol=1e-5, atol=1e-6)


@INTO
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_slot_may_be_the_state(run, at):
    *inputs, state = _inputs(2, 5, 20, 4)
    wanted, states = _definition(*inputs, state)
    slots = [torch.empty_like(state) for _ in range(3)]
    slots[at] = state
    torch.testing.assert_close(run(*inputs, state, slots=slots).double(), wanted, atol=1e-6, rtol=0)
    for slot, one in zip(slots, states[::-1], strict=False):
        torch.testing.assert_close(slot.double(), one, rtol=1e-5, atol=1e-6)


@SLOTS
def test_rows_of_a_pool(run):
    *inputs, state = _inputs(2, 4, 24, 3)
    wanted, states = _definition(*inputs, state)
    pool = torch.rand(9, 3, 24)
    pool[5], pool[2] = state
    before = pool.clone()
    write = torch.tensor([[5, 7, 0], [1, 2, 8]])
    o = run(*inputs, pool, torch.tensor([5, 2]), write)
    torch.testing.assert_close(o.double(), wanted, rtol=0, atol=1e-6)
    for b, numbers in enumerate(write.tolist()):
        for back, number in enumerate(numbers):
            torch.testing.assert_close(
                pool[number].double(), states[-1 - back][b], atol=1e-6, rtol=0
            )
    assert torch.equal(pool[[3, 4, 6]], before[[3, 4, 6]])


@pytest.mark.parametrize("n_channels", [21, 64])
@pytest.mark.parametrize("run", [scan_into, torch_version(scan_into)])
def test_bits_do_not_depend_on_portions(run, n_channels):
    *inputs, state = _inputs(3, 6, n_channels, 4)
    x, dt, A, B, C, D = inputs
    whole = torch.empty_like(state)
    o = run(*inputs, state, slots=[whole], invariant=True)
    for b in range(3):
        one, now = slice(b, b + 1), state[b : b + 1].clone()
        for some in (slice(0, 1), slice(1, 5), slice(5, 6)):
            parts = x[one, some], dt[one, some], A, B[one, some], C[one, some], D
            found = run(*parts, now, slots=[now], invariant=True)
            assert torch.equal(found, o[one, some])
        assert torch.equal(now, whole[one])


def test_slots_of_other_shapes_are_refused():
    *inputs, state = _inputs(1, 2, 8, 2)
    with pytest.raises(ValueError, match="not contiguous"):
        scan_into_with_llvm(*inputs, state, slots=[torch.empty(1, 8, 2).transpose(1, 2)])
