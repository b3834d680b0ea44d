"""The gated delta rule of prompts in Triton, chunk by chunk, against the law in f64."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence.delta_rule import naive, with_triton
from kernels.recurrence.with_triton import FEW_TOKENS
from tests.support.closeness import nmse
from tests.support.delta_inputs import Inputs, make, strided

# what upstream asks for is 1e-7
F32 = 1e-11
FEW, CHUNK = FEW_TOKENS, with_triton.CHUNK


@pytest.fixture(autouse=True)
def ran(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each run of chunks. The interpreter pays for each program: there one holds a
    whole state."""
    if device == "cpu":
        monkeypatch.setattr(with_triton, "COLUMNS", 64)
    n_tokens: list[int] = []
    run_chunks = with_triton.run_chunks

    def run(inputs, *args, **kwargs):
        n_tokens.append(inputs[2].shape[1])
        return run_chunks(inputs, *args, **kwargs)

    monkeypatch.setattr(with_triton, "run_chunks", run)
    return n_tokens


def assert_near(result: torch.Tensor, truth: torch.Tensor) -> None:
    assert result.dtype == torch.float32
    assert nmse(result.cpu(), truth) < F32


@pytest.mark.parametrize("lowest_g", [-20.0, -0.05], ids=["strong", "weak"])
@pytest.mark.parametrize("n_tokens", [FEW + 1, 2 * CHUNK, 3 * CHUNK + 5])
@pytest.mark.thinned(6)
def test_equals_the_law(device, ran, n_tokens, lowest_g):
    """Gates that forget within a chunk, and gates that keep every token to the end."""
    inputs = make(1, 32, n_tokens, 2, lowest_g=lowest_g)
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False)
    assert o.shape == inputs.v.shape and kept.shape == truth[1].shape
    assert_near(o, truth[0])
    assert_near(kept, truth[1])
    assert ran == [n_tokens]


def test_few_tokens_stay_in_the_recurrence(device, ran):
    few = make(1, 8, FEW, 1).to(device)
    with_triton.gated_delta_rule(*few, grouped=False)
    with_triton.gated_delta_log(*few, grouped=False)
    # of 17 tokens the last one hands out its state, and the one before
    with_triton.gated_delta_rule(*make(1, 8, FEW + 1, 1).to(device), grouped=False, n_snapshots=2)
    assert ran == []


@pytest.mark.parametrize("grouped", [False, True], ids=["tiled", "grouped"])
def test_any_strides_and_sides(device, monkeypatch, grouped):
    """Heads of sides that are no powers of two, over several programs."""
    monkeypatch.setattr(with_triton, "COLUMNS", 16)
    plain = make(2, 12, 19, 1, repeat=2, d_v=20, lowest_g=-1.0)
    permuted = strided(plain.to(device))
    o, kept = with_triton.gated_delta_rule(*permuted, grouped=grouped)
    truth = naive.gated_delta_rule(*plain.double(), grouped=grouped)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])
    assert torch.equal(permuted.state.cpu(), plain.state)


def test_keys_of_more_than_one_product(device):
    """Also with some that fill no product of tiles."""
    for d in (128, 80):
        inputs = make(1, d, 20, 1, lowest_g=-1.0)
        o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False)
        truth = naive.gated_delta_rule(*inputs.double(), grouped=False)
        assert_near(o, truth[0])
        assert_near(kept, truth[1])


@pytest.mark.parametrize(
    ("n_tokens", "n_slots", "over"),
    [(40, 1, 0), (40, 3, None), (40, 12, -1), (40, 24, 0), (40, 25, -1), (34, 34, None)],
)
def test_the_newest_states_go_into_planes(device, ran, n_tokens, n_slots, over):
    """Within a chunk, over its border, over more than one, and as many as there are tokens."""
    inputs = make(1, 8, n_tokens, 2, lowest_g=-1.0)
    planes = torch.full((n_slots + 1, 4, *inputs.state.shape[1:]), torch.nan, device=device)
    slots = list(planes[:n_slots, 1:3].unbind(0))
    given = inputs.to(device)
    if over is not None:
        slots[over].copy_(given.state)
        given = given._replace(state=slots[over])
    o = with_triton.gated_delta_into(*given, grouped=False, slots=slots)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_slots)
    assert_near(o, truth[0])
    assert_near(torch.stack(slots, 1), truth[1])
    assert planes[n_slots:].isnan().all() and planes[:, [0, 3]].isnan().all()
    assert ran == ([n_tokens - n_slots + 1] if n_tokens - n_slots >= FEW else [])


def test_more_snapshots_than_tokens(device):
    inputs = make(1, 8, 18, 1, lowest_g=-1.0)
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False, n_snapshots=20)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=20)
    assert kept.shape[1] == 18
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


@pytest.mark.parametrize("g", [-20.0, -1000.0, -torch.inf])
def test_strong_decay_neither_overflows_nor_poisons(device, g):
    inputs = make(1, 16, 20, 1)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


def test_a_forgetful_token_does_not_hide_the_others(device):
    """After a gate of e^-5000 the differences of long sums would have lost the small gates."""
    inputs = make(1, 16, 32, 1, lowest_g=-1e-2)
    inputs.g[:, [2, 18]] = -5000.0
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


@pytest.mark.parametrize("g", [None, -20.0, -torch.inf], ids=["weak", "strong", "all"])
def test_gates_per_channel(device, ran, g):
    """Any strides, keys of more than one product that fill none, a token that forgets the rest."""
    inputs = make(1, 40, 19, 1, repeat=2, kda=True, d_v=20, lowest_g=-0.05)
    if g is None:
        inputs.g[:, 5] = -5000.0
    else:
        inputs.g[..., ::2] = g
    permuted = strided(inputs.to(device))
    o, kept = with_triton.gated_delta_rule(*permuted, grouped=True)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=True)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])
    assert ran == [19]


def test_the_log_of_gates_per_channel(device, ran):
    inputs = make(1, 16, 21, 1, kda=True, lowest_g=-1.0, d_v=24)
    given = inputs.to(device)
    o, log = with_triton.gated_delta_log(*given, grouped=False)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    assert_near(o, wanted)
    assert_near(log.right, law.right)
    shorter, _ = with_triton.gated_delta_rule(*given.tokens(0, 18), grouped=False)
    assert torch.equal(o[:, :18], shorter)
    folded = with_triton.fold(given.state, log, 20, grouped=False)
    assert_near(folded, naive.fold(inputs.state.double(), law, 20, grouped=False))
    assert ran == [21, 18]


def test_alike_keys_written_in_full(device):
    """The hardest system to solve: one key again and again, nothing forgotten."""
    inputs = make(1, 16, 40, 1, lowest_g=-1e-4)
    inputs = inputs._replace(
        k=inputs.k[:, :1].expand(inputs.k.shape), beta=torch.ones_like(inputs.beta)
    )
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


def test_a_sequence_has_the_same_bits_among_many_and_before_later_tokens(device):
    inputs = make(1, 8, 20, 2, repeat=2, lowest_g=-1.0).to(device)
    o, kept = with_triton.gated_delta_rule(*inputs, grouped=True)
    alone = Inputs(*(x[1:2] for x in inputs))
    one = with_triton.gated_delta_rule(*alone, grouped=True)
    assert torch.equal(o[1:2], one[0])
    assert torch.equal(kept[1:2], one[1])
    shorter = with_triton.gated_delta_rule(*inputs.tokens(0, 18), grouped=True)
    assert torch.equal(o[:, :18], shorter[0])


@pytest.mark.parametrize("grouped", [False, True], ids=["tiled", "grouped"])
def test_the_log_rebuilds_the_states(device, ran, grouped):
    inputs = make(2, 16, 21, 1, repeat=2, lowest_g=-1.0, d_v=24)
    given = strided(inputs.to(device))
    o, log = with_triton.gated_delta_log(*given, grouped=grouped)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=grouped)
    assert_near(o, wanted)
    assert_near(log.right, law.right)
    assert log.left is given.k and log.g is given.g
    assert torch.equal(given.state.cpu(), inputs.state)
    for n in (1, 21):
        folded = with_triton.fold(given.state, log, n, grouped=grouped)
        assert_near(folded, naive.fold(inputs.state.double(), law, n, grouped=grouped))
    assert ran == [21]
