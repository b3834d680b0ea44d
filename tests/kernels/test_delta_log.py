"""The delta rule's log and fold: law against fast version, every prefix against snapshots."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kernels import delta_rule
from kernels.delta_rule import DeltaLog, log_with_torch, naive, with_llvm, with_torch
from tests.support.closeness import nmse

F32 = 1e-12
F64 = 1e-26
LENGTHS = [1, 2, 5, 17, 33, 65]
FAST = pytest.mark.parametrize("module", [log_with_torch, with_llvm], ids=["torch", "llvm"])
FOLDS = pytest.mark.parametrize(
    "run", [naive.fold, log_with_torch.fold, with_llvm.fold], ids=["naive", "torch", "llvm"]
)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def double(self) -> Inputs:
        return Inputs(*(x.double() for x in self))


def make(
    n_tokens: int,
    *,
    n_k_heads: int = 2,
    d: int = 16,
    n_batch: int = 1,
    repeat: int = 2,
    lowest_g: float = -1.0,
) -> Inputs:
    """v has its own width, so that no transposed product goes unseen."""
    n_heads, d_v = n_k_heads * repeat, d + 8
    q, k = (
        torch.nn.functional.normalize(torch.randn(n_batch, n_tokens, n_k_heads, d), dim=-1)
        for _ in range(2)
    )
    return Inputs(
        q,
        k,
        torch.rand(n_batch, n_tokens, n_heads, d_v) * 5.3 - 0.3,
        torch.rand(n_batch, n_tokens, n_heads) * lowest_g,
        torch.rand(n_batch, n_tokens, n_heads),
        torch.rand(n_batch, n_heads, d, d_v) * 2 - 1,
    )


def first(log: DeltaLog, row: int, n: int) -> DeltaLog:
    return DeltaLog(*(x[row : row + 1, :n] for x in log))


def test_one_token_by_hand():
    q, k, v, beta = (torch.tensor(x).reshape(1, 1, 1, 1) for x in (3.0, -0.5, 1.0, 0.25))
    state, g = torch.full((1, 1, 1, 1), 8.0), torch.tensor([[[0.5]]]).log()
    for run in (naive.gated_delta_log, log_with_torch.gated_delta_log, with_llvm.gated_delta_log):
        # S = 8 / 2 = 4, u = (1 + 2) / 4 = 0.75, S = 4 - 0.375 = 3.625, o = 10.875
        o, log = run(q, k, v, g, beta[..., 0], state, grouped=False)
        torch.testing.assert_close(o.flatten(), torch.tensor([10.875]))
        torch.testing.assert_close(log.u.flatten(), torch.tensor([0.75]))
        for fold in (naive.fold, log_with_torch.fold, with_llvm.fold):
            folded = fold(state, log, 1, grouped=False)
            torch.testing.assert_close(folded.flatten(), torch.tensor([3.625]))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_batch", [1, 3])
@pytest.mark.parametrize("n_tokens", [*LENGTHS, 32, 64])
def test_the_log_is_that_of_the_law(n_tokens, n_batch, grouped):
    inputs = make(n_tokens, n_batch=n_batch)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=grouped)
    for module in (log_with_torch, with_llvm):
        o, log = module.gated_delta_log(*inputs, grouped=grouped)
        assert nmse(o, wanted) < F32
        assert nmse(log.u, law.u) < F32
        assert log.k is inputs.k and log.g is inputs.g
    exact = log_with_torch.gated_delta_log(*inputs.double(), grouped=grouped)
    assert nmse(exact[0], wanted) < F64
    assert nmse(exact[1].u, law.u) < F64


@FAST
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_outputs_are_those_of_the_delta_rule(module, n_tokens):
    inputs = make(n_tokens, n_batch=2)
    o, _ = module.gated_delta_log(*inputs, grouped=False)
    wanted, _ = with_torch.gated_delta_rule(*inputs, grouped=False)
    assert nmse(o, wanted) < F32


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_every_prefix_is_a_snapshot(n_tokens, grouped):
    inputs = make(n_tokens, lowest_g=-0.3)
    _, kept = with_torch.gated_delta_rule(*inputs, grouped=grouped, n_snapshots=n_tokens)
    for module in (log_with_torch, with_llvm):
        _, log = module.gated_delta_log(*inputs, grouped=grouped)
        for n in range(1, n_tokens + 1):
            assert nmse(module.fold(inputs.state, log, n, grouped=grouped), kept[:, -n]) < F32
        assert torch.equal(module.fold(inputs.state, log, 0, grouped=grouped), inputs.state)
    exact = inputs.double()
    _, law = naive.gated_delta_log(*exact, grouped=grouped)
    for n in (0, 1, n_tokens // 2, n_tokens):
        ours = log_with_torch.fold(exact.state, law, n, grouped=grouped)
        assert nmse(ours, naive.fold(exact.state, law, n, grouped=grouped)) < F64


@FOLDS
@pytest.mark.parametrize("counts", [[0, 3, 7], [7, 7, 1], [0, 0, 0]], ids=str)
def test_rows_of_different_lengths(run, counts):
    """Each row as if it were alone, whatever its log holds beyond its tokens."""
    inputs = make(7, n_batch=3)
    _, log = log_with_torch.gated_delta_log(*inputs, grouped=False)
    log = DeltaLog(*(x.clone() for x in log))
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


@FOLDS
@pytest.mark.parametrize("n", [0, 1, 5, torch.tensor([2, 5])], ids=["0", "1", "5", "rows"])
def test_fold_into_given_memory(run, n):
    inputs = make(6, n_batch=2)
    _, log = log_with_torch.gated_delta_log(*inputs, grouped=True)
    state, wanted = inputs.state.clone(), run(inputs.state, log, n, grouped=True)
    assert torch.equal(inputs.state, state)  # out of place by default
    assert wanted.data_ptr() != inputs.state.data_ptr()
    elsewhere = torch.full_like(state, torch.nan)
    assert run(inputs.state, log, n, grouped=True, out=elsewhere) is elsewhere
    assert torch.equal(elsewhere, wanted)
    assert torch.equal(inputs.state, state)
    assert run(state, log, n, grouped=True, out=state) is state
    assert torch.equal(state, wanted)


@FAST
@pytest.mark.parametrize("g", [-20.0, -1000.0])
@pytest.mark.parametrize("n_tokens", [1, 5, 33, 65])
def test_strong_decay_neither_overflows_nor_poisons(module, n_tokens, g):
    inputs = make(n_tokens, n_batch=2)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, log = module.gated_delta_log(*inputs, grouped=False)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    assert nmse(o, wanted) < F32 and nmse(log.u, law.u) < F32
    for n in (n_tokens, torch.tensor([n_tokens, 1])):
        folded = module.fold(inputs.state, log, n, grouped=False)
        assert nmse(folded, naive.fold(inputs.state.double(), law, n, grouped=False)) < F32


@FAST
def test_weak_gates_after_strong_ones_keep_their_precision(module):
    inputs = make(32)
    g = torch.full_like(inputs.g, -1e-3)
    g[:, :24:2] = -40.0
    inputs = inputs._replace(g=g)
    _, log = module.gated_delta_log(*inputs, grouped=False)
    _, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    folded = module.fold(inputs.state, log, 32, grouped=False)
    assert nmse(folded, naive.fold(inputs.state.double(), law, 32, grouped=False)) < F32


def test_a_gate_per_channel_is_refused():
    inputs = make(2)
    channels = inputs.g.unsqueeze(-1).expand(*inputs.g.shape, 16)
    with pytest.raises(ValueError, match="one gate per head"):
        delta_rule.gated_delta_log(*inputs._replace(g=channels), grouped=False)
    log = DeltaLog(inputs.k, inputs.v, channels)
    with pytest.raises(ValueError, match="one gate per head"):
        delta_rule.fold(inputs.state, log, 1, grouped=False)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 4, 40])
@pytest.mark.parametrize(
    "module", [log_with_torch, with_llvm, delta_rule], ids=["torch", "llvm", "public"]
)
@torch.inference_mode()
def test_any_strides(module, n_tokens, grouped):
    plain = make(n_tokens, n_batch=2)
    strided = Inputs(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:4]),
        torch.stack((plain.beta, plain.beta + 9), -1)[..., 0],
        plain.state.transpose(2, 3).contiguous().transpose(2, 3),
    )
    o, log = module.gated_delta_log(*strided, grouped=grouped)
    wanted, law = naive.gated_delta_log(*plain.double(), grouped=grouped)
    assert nmse(o, wanted) < F32
    folded = module.fold(strided.state, log, n_tokens, grouped=grouped)
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
