"""The selective scan in Triton against its definition, in f64 on the processor."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import selective_scan as naive
from kernels.recurrence import with_triton
from kernels.recurrence.with_triton import FEW_TOKENS
from tests.support.closeness import nmse
from tests.support.delta_pool import LAYOUTS, assert_the_rest_is_poison, scattered

F32 = 1e-11


def make(n_tokens: int, n_batch: int = 2, n_channels: int = 40, n_state: int = 5):
    """x, dt, A, B, C, D and the state, as a layer hands them over: parts of wider rows, between
    which there is nothing to be read."""
    generator = torch.Generator().manual_seed(n_tokens + n_channels)

    def part(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        wide = torch.full((*shape[:-1], 2 * shape[-1] + 3), torch.nan)
        drawn = torch.rand(shape, generator=generator)
        wide[..., 2 : 2 + shape[-1]] = low + (high - low) * drawn
        return wide[..., 2 : 2 + shape[-1]]

    x, dt = (part(n_batch, n_tokens, n_channels, low=low) for low in (-1.0, 0.0))
    B, C = (part(n_batch, n_tokens, n_state, low=-1.0) for _ in range(2))
    A, D = part(n_state, n_channels, low=-3.0, high=0.0), part(n_channels)
    state = torch.rand(n_batch, n_state, n_channels, generator=generator) - 0.5
    return [x, dt, A, B, C, D, state]


def there(inputs, device):
    """On the device, as strided as they are here, NaN around them included."""
    found = []
    for one in inputs:
        whole = one.new_empty(0).set_(one.untyped_storage()).to(device)
        found.append(whole.as_strided(one.shape, one.stride(), one.storage_offset()))
    return found


def truth(inputs, n_slots):
    inputs = [each.double() for each in inputs]
    slots = [torch.empty_like(inputs[6]) for _ in range(n_slots)]
    return naive.scan_into_naive(*inputs, slots=slots), slots


def assert_near(result, wanted):
    assert result.dtype == torch.float32
    assert nmse(result.cpu(), wanted) < F32


@pytest.mark.parametrize("over", [None, 0, -1], ids=["apart", "newest", "oldest"])
@pytest.mark.parametrize(
    ("n_tokens", "n_slots", "n_channels", "n_state"),
    [(1, 1, 40, 5), (5, 3, 40, 5), (4, 4, 130, 16), (FEW_TOKENS + 5, 3, 20, 4), (3, 2, 7, 1)],
)
def test_outputs_and_states_are_those_of_the_definition(
    device, n_tokens, n_slots, n_channels, n_state, over
):
    inputs = make(n_tokens, n_channels=n_channels, n_state=n_state)
    wanted, states = truth(inputs, n_slots)
    given = there(inputs, device)
    planes = torch.full((n_slots + 1, 4, n_state, n_channels), torch.nan, device=device)
    slots = list(planes[:n_slots, 1:3].unbind(0))
    if over is not None:
        slots[over].copy_(given[6])
        given[6] = slots[over]
    assert_near(with_triton.scan_into(*given, slots=slots), wanted)
    for slot, state in zip(slots, states, strict=True):
        assert_near(slot, state)
    assert planes[n_slots:].isnan().all() and planes[:, [0, 3]].isnan().all()


def test_more_slots_than_one_kernel_takes(device, monkeypatch):
    monkeypatch.setattr(with_triton, "MAX_SLOTS", 3)
    inputs = make(8)
    wanted, states = truth(inputs, 8)
    slots = [torch.full_like(inputs[6], torch.nan, device=device) for _ in range(8)]
    assert_near(with_triton.scan_into(*there(inputs, device), slots=slots), wanted)
    assert_near(torch.stack(slots), torch.stack(states))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("over", [None, 0, 1])
def test_rows_of_a_pool(device, layout, over):
    inputs = make(4)
    wanted, states = truth(inputs, 2)
    pool = scattered(inputs[6], 2, over, layout).to(device)
    given = there(inputs[:6], device)
    assert_near(with_triton.scan_slots(*given, pool.rows, pool.read, pool.write), wanted)
    for back, state in enumerate(states):
        assert_near(pool.rows[pool.write[:, back]], state)
    assert_the_rest_is_poison(pool)


def test_strong_decay_neither_overflows_nor_poisons(device):
    inputs = make(3)
    inputs[2] = torch.full_like(inputs[2], -torch.inf)
    wanted, states = truth(inputs, 1)
    slot = torch.empty_like(inputs[6], device=device)
    assert_near(with_triton.scan_into(*there(inputs, device), slots=[slot]), wanted)
    assert_near(slot, states[0])
