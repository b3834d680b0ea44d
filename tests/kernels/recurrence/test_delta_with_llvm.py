"""The delta rule through LLVM: bits that depend on nothing but the token, and every shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.recurrence import UpdateLog, delta_rule
from kernels.recurrence.delta_rule import naive, with_llvm
from kernels.recurrence.delta_rule.programs_with_llvm import COLUMNS, Sides
from tests.support.closeness import nmse
from tests.support.delta_inputs import make, strided

F32 = 1e-12


@settings(max_examples=20)
@given(
    cuts=st.sets(st.integers(1, 40)),
    n_batch=st.integers(1, 3),
    row=st.integers(0, 2),
    kda=st.booleans(),
    d=st.sampled_from([(16, 16), (20, 24), (5, 3)]),
    seed=st.integers(0, 99),
)
def test_bits_depend_neither_on_portions_nor_on_neighbours(cuts, n_batch, row, kda, d, seed):
    torch.manual_seed(seed)
    inputs = make(2, d[0], 41, n_batch, repeat=2, kda=kda, lowest_g=-1.0, d_v=d[1])
    o, states = with_llvm.gated_delta_rule(*inputs, grouped=True, n_snapshots=41)
    row %= n_batch
    state = inputs.state[row : row + 1].clone()
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 41], strict=True):
        rows = [x[row : row + 1, start:stop] for x in inputs[:5]]
        part = with_llvm.gated_delta_into(*rows, state, grouped=True, slots=[state])
        assert torch.equal(part[0], o[row, start:stop])
        assert torch.equal(state[0], states[row, 41 - stop])


@settings(max_examples=15)
@given(n_tokens=st.integers(1, 20), n=st.integers(0, 20), seed=st.integers(0, 99))
def test_a_log_folds_to_the_very_states(n_tokens, n, seed):
    torch.manual_seed(seed)
    n = min(n, n_tokens)
    inputs = make(2, 16, n_tokens, 2, repeat=2, lowest_g=-1.0, d_v=24)
    o, kept = with_llvm.gated_delta_rule(*inputs, grouped=False, n_snapshots=n_tokens)
    logged, log = with_llvm.gated_delta_log(*inputs, grouped=False)
    assert torch.equal(logged, o)
    assert log.left is inputs.k and log.g is inputs.g
    states = [inputs.state, *kept.flip(1).unbind(1)]
    assert torch.equal(with_llvm.fold(inputs.state, log, n, grouped=False), states[n])
    mixed = with_llvm.fold(inputs.state, log, torch.tensor([n, n_tokens]), grouped=False)
    assert torch.equal(mixed[0], states[n][0]) and torch.equal(mixed[1], states[-1][1])
    # in two parts, as a log that is committed bit by bit
    rest = UpdateLog(*(x[:, n:] for x in log))
    whole = with_llvm.fold(states[n].clone(), rest, n_tokens - n, grouped=False)
    assert torch.equal(whole, states[-1])


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_threads(threads, kda):
    inputs = make(8, 64, 5, 2, kda=kda, lowest_g=-1.0)
    before = torch.get_num_threads()
    results = []
    try:
        for n in (1, threads):
            torch.set_num_threads(n)
            results.append(with_llvm.gated_delta_rule(*inputs, grouped=False, n_snapshots=5))
    finally:
        torch.set_num_threads(before)
    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("d_v", [1, 3, 6, 12, 48, 96, COLUMNS, 3 * COLUMNS])
@pytest.mark.parametrize("d_k", [1, 7, 12, 48])
@pytest.mark.thinned(12)
def test_any_sides(d_k, d_v, kda):
    plain = make(2, d_k, 3, 2, repeat=2, kda=kda, lowest_g=-1.0, d_v=d_v)
    truth = naive.gated_delta_rule(*plain.double(), grouped=True, n_snapshots=2)
    for inputs in (plain, strided(plain)):
        o, kept = with_llvm.gated_delta_rule(*inputs, grouped=True, n_snapshots=2)
        assert nmse(o, truth[0]) < F32
        assert nmse(kept, truth[1]) < F32


def test_whole_rows_up_to_a_width():
    widths = {128: 64, 256: 64, 64: 64, 32: 32, 96: 32, 20: 4, 7: 1}
    assert {d_v: Sides(16, d_v).width for d_v in widths} == widths


@pytest.mark.parametrize("n_tokens", [1, 3, 9])
def test_states_beside_the_slots_stay_as_they_were(n_tokens):
    """Planes of which only some rows and some depths are written."""
    inputs = make(2, 8, n_tokens, 2, lowest_g=-1.0)
    planes = torch.arange(5.0 * 4 * 2 * 8 * 8).view(5, 4, 2, 8, 8)
    before, n_slots = planes.clone(), min(n_tokens, 3)
    with_llvm.gated_delta_into(*inputs, grouped=False, slots=planes[1 : 1 + n_slots, 1:3].unbind(0))
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_slots)
    written = planes[1 : 1 + n_slots, 1:3]
    assert nmse(written, truth[1].transpose(0, 1)) < F32
    written.copy_(before[1 : 1 + n_slots, 1:3])
    assert torch.equal(planes, before)


def test_slots_that_are_not_alike_are_refused():
    inputs = make(2, 8, 2, 1)
    slots = [torch.empty(1, 2, 8, 8), torch.empty(1, 2, 8, 9)[..., :8]]
    with pytest.raises(ValueError, match="differ in their strides"):
        with_llvm.gated_delta_into(*inputs, grouped=False, slots=slots)
    with pytest.raises(ValueError, match="do not lie side by side"):
        with_llvm.gated_delta_into(*inputs, grouped=False, slots=[slots[0].transpose(2, 3)])


@torch.inference_mode()
def test_the_public_functions_run_it():
    inputs = make(2, 16, 40, 1, lowest_g=-1.0)
    o, _ = with_llvm.gated_delta_log(*inputs, grouped=False)
    slot = torch.empty_like(inputs.state)
    for invariant in (False, True):
        same = delta_rule.gated_delta_into(
            *inputs, grouped=False, slots=[slot], invariant=invariant
        )
        logged, log = delta_rule.gated_delta_log(*inputs, grouped=False, invariant=invariant)
        assert torch.equal(same, o) and torch.equal(logged, o)
        folded = delta_rule.fold(inputs.state, log, 40, grouped=False, invariant=invariant)
        assert torch.equal(folded, slot)
