"""The delta rule's log and fold: law against fast version, every prefix against snapshots."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import UpdateLog, delta_rule
from kernels.recurrence.delta_rule import naive, with_llvm, with_torch
from tests.support import delta_inputs
from tests.support.closeness import nmse
from tests.support.delta_inputs import Inputs, strided

F32 = 1e-12
F64 = 1e-26
LENGTHS = [1, 2, 5, 17, 33, 65]
FAST = pytest.mark.parametrize("module", [with_torch, with_llvm], ids=["torch", "llvm"])
GATES = pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
FOLDS = pytest.mark.parametrize(
    "run", [naive.fold, with_torch.fold, with_llvm.fold], ids=["naive", "torch", "llvm"]
)


def make(
    n_tokens: int, *, d: int = 16, n_batch: int = 1, kda: bool = False, lowest_g: float = -1.0
) -> Inputs:
    """v has its own width, so that no transposed product goes unseen."""
    return delta_inputs.make(2, d, n_tokens, n_batch, 2, kda, lowest_g, d_v=d + 8)


def first(log: UpdateLog, row: int, n: int) -> UpdateLog:
    return UpdateLog(*(x[row : row + 1, :n] for x in log))


def test_one_token_by_hand():
    q, k, v, beta = (torch.tensor(x).reshape(1, 1, 1, 1) for x in (3.0, -0.5, 1.0, 0.25))
    state, g = torch.full((1, 1, 1, 1), 8.0), torch.tensor([[[0.5]]]).log()
    for run in (naive.gated_delta_log, with_torch.gated_delta_log, with_llvm.gated_delta_log):
        # S = 8 / 2 = 4, u = (1 + 2) / 4 = 0.75, S = 4 - 0.375 = 3.625, o = 10.875
        o, log = run(q, k, v, g, beta[..., 0], state, grouped=False)
        torch.testing.assert_close(o.flatten(), torch.tensor([10.875]))
        torch.testing.assert_close(log.right.flatten(), torch.tensor([0.75]))
        for fold in (naive.fold, with_torch.fold, with_llvm.fold):
            folded = fold(state, log, 1, grouped=False)
            torch.testing.assert_close(folded.flatten(), torch.tensor([3.625]))


@GATES
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_batch", [1, 3])
@pytest.mark.parametrize("n_tokens", [*LENGTHS, 32, 64])
def test_the_log_is_that_of_the_law(n_tokens, n_batch, grouped, kda):
    inputs = make(n_tokens, n_batch=n_batch, kda=kda)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=grouped)
    for module in (with_torch, with_llvm):
        o, log = module.gated_delta_log(*inputs, grouped=grouped)
        assert nmse(o, wanted) < F32
        assert nmse(log.right, law.right) < F32
        assert log.left is inputs.k and log.g is inputs.g
    exact = with_torch.gated_delta_log(*inputs.double(), grouped=grouped)
    assert nmse(exact[0], wanted) < F64
    assert nmse(exact[1].right, law.right) < F64


@GATES
@FAST
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_outputs_are_those_of_the_delta_rule(module, n_tokens, kda):
    inputs = make(n_tokens, n_batch=2, kda=kda)
    o, _ = module.gated_delta_log(*inputs, grouped=False)
    wanted, _ = with_torch.gated_delta_rule(*inputs, grouped=False)
    assert nmse(o, wanted) < F32


@GATES
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_every_prefix_is_a_snapshot(n_tokens, grouped, kda):
    inputs = make(n_tokens, lowest_g=-0.3, kda=kda)
    _, kept = with_torch.gated_delta_rule(*inputs, grouped=grouped, n_snapshots=n_tokens)
    for module in (with_torch, with_llvm):
        _, log = module.gated_delta_log(*inputs, grouped=grouped)
        for n in range(1, n_tokens + 1):
            assert nmse(module.fold(inputs.state, log, n, grouped=grouped), kept[:, -n]) < F32
        assert torch.equal(module.fold(inputs.state, log, 0, grouped=grouped), inputs.state)
    exact = inputs.double()
    _, law = naive.gated_delta_log(*exact, grouped=grouped)
    for n in (0, 1, n_tokens // 2, n_tokens):
        ours = with_torch.fold(exact.state, law, n, grouped=grouped)
        assert nmse(ours, naive.fold(exact.state, law, n, grouped=grouped)) < F64


@GATES
@FOLDS
@pytest.mark.parametrize("counts", [[0, 3, 7], [7, 7, 1], [0, 0, 0]], ids=str)
def test_rows_of_different_lengths(run, counts, kda):
    """Each row as if it were alone, whatever its log holds beyond its tokens."""
    inputs = make(7, n_batch=3, kda=kda)
    _, log = with_torch.gated_delta_log(*inputs, grouped=False)
    log = UpdateLog(*(x.clone() for x in log))
    for row, n in enumerate(counts):
        for x in log:
            x[row, n:] = torch.nan
    folded = run(inputs.state, log, torch.tensor(counts), grouped=False)
    for row, n in enumerate(counts):
        state = inputs.state[row : row + 1]
        alone = naive.fold(state.double(), first(log, row, n), n, grouped=False)
        assert nmse(folded[row : row + 1], alone) < F32
        if n == 0:
            assert torch.equal(folded[row : row + 1], state)


@GATES
@FOLDS
@pytest.mark.parametrize("n", [0, 1, 5, torch.tensor([2, 5])], ids=["0", "1", "5", "rows"])
def test_fold_into_given_memory(run, n, kda):
    inputs = make(6, n_batch=2, kda=kda)
    _, log = with_torch.gated_delta_log(*inputs, grouped=True)
    state, wanted = inputs.state.clone(), run(inputs.state, log, n, grouped=True)
    assert torch.equal(inputs.state, state)  # out of place by default
    assert wanted.data_ptr() != inputs.state.data_ptr()
    elsewhere = torch.full_like(state, torch.nan)
    assert run(inputs.state, log, n, grouped=True, out=elsewhere) is elsewhere
    assert torch.equal(elsewhere, wanted)
    assert torch.equal(inputs.state, state)
    assert run(state, log, n, grouped=True, out=state) is state
    assert torch.equal(state, wanted)


@GATES
@FAST
@pytest.mark.parametrize("g", [-20.0, -1000.0])
@pytest.mark.parametrize("n_tokens", [1, 5, 33, 65])
def test_strong_decay_neither_overflows_nor_poisons(module, n_tokens, g, kda):
    inputs = make(n_tokens, n_batch=2, kda=kda)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, log = module.gated_delta_log(*inputs, grouped=False)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    assert nmse(o, wanted) < F32 and nmse(log.right, law.right) < F32
    for n in (n_tokens, torch.tensor([n_tokens, 1])):
        folded = module.fold(inputs.state, log, n, grouped=False)
        assert nmse(folded, naive.fold(inputs.state.double(), law, n, grouped=False)) < F32


@GATES
@FAST
def test_weak_gates_after_strong_ones_keep_their_precision(module, kda):
    inputs = make(32, kda=kda)
    g = torch.full_like(inputs.g, -1e-3)
    g[:, :24:2] = -40.0
    inputs = inputs._replace(g=g)
    _, log = module.gated_delta_log(*inputs, grouped=False)
    _, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    folded = module.fold(inputs.state, log, 32, grouped=False)
    assert nmse(folded, naive.fold(inputs.state.double(), law, 32, grouped=False)) < F32


@GATES
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 4, 40])
@pytest.mark.parametrize(
    "module", [with_torch, with_llvm, delta_rule], ids=["torch", "llvm", "public"]
)
@torch.inference_mode()
def test_any_strides(module, n_tokens, grouped, kda):
    plain = make(n_tokens, n_batch=2, kda=kda)
    permuted = strided(plain)
    o, log = module.gated_delta_log(*permuted, grouped=grouped)
    wanted, law = naive.gated_delta_log(*plain.double(), grouped=grouped)
    assert nmse(o, wanted) < F32
    folded = module.fold(permuted.state, log, n_tokens, grouped=grouped)
    assert nmse(folded, naive.fold(plain.state.double(), law, n_tokens, grouped=grouped)) < F32


@pytest.mark.parametrize(
    "run",
    [naive.gated_delta_into, with_torch.gated_delta_into, with_llvm.gated_delta_into],
    ids=["naive", "torch", "llvm"],
)
@pytest.mark.parametrize(
    ("n_tokens", "n_slots"), [(1, 1), (3, 1), (3, 3), (17, 1), (17, 17), (40, 1), (40, 5), (70, 40)]
)
@pytest.mark.parametrize("over", [None, 0, -1], ids=["apart", "newest", "oldest"])
def test_states_are_written_into_slots(run, n_tokens, n_slots, over):
    """Also when one of the slots is where the state was read."""
    inputs = make(n_tokens, d=8, n_batch=2)
    pool = torch.full((n_slots, *inputs.state.shape), torch.nan)
    slots = list(pool.unbind(0))
    state = inputs.state.clone()
    if over is not None:
        slots[over] = state
    o = run(*inputs._replace(state=state), grouped=False, slots=slots)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_slots)
    assert nmse(o, truth[0]) < F32
    assert nmse(torch.stack(slots, 1), truth[1]) < F32
    assert over is not None or torch.equal(state, inputs.state)
