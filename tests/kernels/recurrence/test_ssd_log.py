"""The log of state-space duality and its fold: every prefix is a snapshot, invariant forms."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.recurrence import UpdateLog, delta_rule
from kernels.recurrence import ssd as op
from kernels.recurrence.delta_rule import with_llvm as delta_with_llvm
from kernels.recurrence.ssd import naive, with_llvm, with_torch
from tests.support.closeness import nmse
from tests.support.ssd_inputs import make, strided

IMPLEMENTATIONS = pytest.mark.parametrize(
    "module", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"]
)
folding = {
    ssd: partial(delta.fold, grouped=True)
    for ssd, delta in (
        (naive, delta_rule.naive),
        (with_torch, delta_rule.with_torch),
        (with_llvm, delta_with_llvm),
    )
}
F32 = 1e-11
CHUNK = with_torch.CHUNK


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_tokens", [1, 3, 9, CHUNK + 3])
def test_every_prefix_of_the_log_is_a_snapshot(module, n_tokens):
    inputs = make(n_tokens, n_batch=2, p=4, n=8)
    wanted, kept = naive.ssd(*inputs.double(), n_snapshots=n_tokens)
    for given in (inputs, strided(inputs)):
        o, log = module.ssd_log(*given)
        assert nmse(o, wanted) < F32
        assert log.right is given.B and log.g is given.g
        assert torch.equal(log.left, given.dt.unsqueeze(-1) * given.x)
        for n in {1, 2, n_tokens // 2, n_tokens} - {0}:
            if n <= n_tokens:
                assert nmse(folding[module](given.state, log, n), kept[:, -n]) < F32
        assert torch.equal(folding[module](given.state, log, 0), inputs.state)


@IMPLEMENTATIONS
@pytest.mark.parametrize("counts", [[0, 3, 7], [7, 7, 1], [0, 0, 0]], ids=str)
def test_rows_of_different_lengths(module, counts):
    """Each row as if it were alone, whatever its log holds beyond its tokens."""
    inputs = make(7, n_batch=3)
    _, law = naive.ssd_log(*inputs)
    log = UpdateLog(*(part.clone() for part in law))
    for row, n in enumerate(counts):
        for part in log:
            part[row, n:] = torch.nan
    folded = folding[module](inputs.state, log, torch.tensor(counts))
    for row, n in enumerate(counts):
        state = inputs.state[row : row + 1]
        alone = UpdateLog(*(part[row : row + 1, :n] for part in log))
        assert nmse(folded[row : row + 1], folding[naive](state.double(), alone, n)) < F32
    state = inputs.state.clone()
    assert folding[module](state, log, torch.tensor(counts), out=state) is state
    assert torch.equal(state, folded)


@pytest.mark.parametrize(
    ("into", "logged", "fold"),
    [
        tuple(
            partial(form, invariant=True)
            for form in (with_torch.ssd_into, with_torch.ssd_log, folding[with_torch])
        ),
        (with_llvm.ssd_into, with_llvm.ssd_log, folding[with_llvm]),
        tuple(
            partial(form, invariant=True)
            for form in (op.ssd_into, op.ssd_log, partial(delta_rule.fold, grouped=True))
        ),
    ],
    ids=["torch", "llvm", "public"],
)
@pytest.mark.parametrize(("p", "n"), [(8, 16), (12, 20), (64, 64)])
def test_the_same_bits_in_any_portions(into, logged, fold, p, n):
    """All at once, token by token with states, and from logs folded at any point."""
    inputs = make(9, n_batch=3, p=p, n=n)
    slots = [torch.full_like(inputs.state, torch.nan) for _ in range(2)]
    o = into(*inputs, slots=slots)
    also_o, log = logged(*inputs)
    assert torch.equal(also_o, o)
    for b in range(3):
        at, states = inputs.state[b : b + 1].clone(), []
        for t in range(9):
            one = inputs.sequences(b, b + 1).tokens(t, t + 1, at)
            assert torch.equal(into(*one, slots=[at])[0, 0], o[b, t])
            states.append(at[0].clone())
        assert torch.equal(slots[0][b], states[-1]) and torch.equal(slots[1][b], states[-2])
        for count in (1, 4, 9):
            assert torch.equal(fold(inputs.state, log, count)[b], states[count - 1])
        mixed = fold(inputs.state, log, torch.tensor([2, 7, 5]))
        assert torch.equal(mixed[b], states[(2, 7, 5)[b] - 1])


@torch.inference_mode()
def test_the_public_functions_agree_in_inference_mode():
    inputs = make(20, n_batch=2)
    truth = naive.ssd(*inputs.double())
    o, kept = op.ssd(*inputs)
    logged, log = op.ssd_log(*inputs)
    assert nmse(o, truth[0]) < F32 and nmse(logged, truth[0]) < F32
    assert nmse(kept, truth[1]) < F32
    assert nmse(delta_rule.fold(inputs.state, log, 20, grouped=True), truth[1][:, 0]) < F32
