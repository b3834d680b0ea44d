"""State-space duality in Triton against the law, in f64 on the processor."""

from __future__ import annotations

import pytest
import torch

from kernels.pointwise.with_triton import step_gates
from kernels.recurrence import UpdateLog, ssd
from kernels.recurrence import with_triton as shared
from kernels.recurrence.delta_rule import naive as delta_naive
from kernels.recurrence.delta_rule import with_triton as delta_with_triton
from kernels.recurrence.ssd import naive, with_triton
from kernels.recurrence.with_triton import FEW_TOKENS
from tests.support.closeness import nmse
from tests.support.delta_pool import scattered
from tests.support.ssd_inputs import make, strided

F32 = 1e-11
FEW, CHUNK = FEW_TOKENS, with_triton.CHUNK


@pytest.fixture(autouse=True)
def ran(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each run of chunks. The interpreter pays for each program: there one holds a
    whole state."""
    if device == "cpu":
        for name in ("ROWS", "CHUNK_ROWS"):
            monkeypatch.setattr(with_triton, name, 32)
    n_tokens: list[int] = []
    run_chunks = with_triton.run_chunks

    def run(inputs, *args, **kwargs):
        n_tokens.append(inputs[0].shape[1])
        return run_chunks(inputs, *args, **kwargs)

    monkeypatch.setattr(with_triton, "run_chunks", run)
    return n_tokens


def assert_near(result: torch.Tensor, truth: torch.Tensor) -> None:
    assert result.dtype == torch.float32
    assert nmse(result.cpu(), truth) < F32


@pytest.mark.parametrize(
    ("n_tokens", "n_snapshots", "p", "n"),
    [
        (1, 1, 64, 128),
        (1, 1, 12, 20),
        (5, 3, 8, 16),
        (FEW + 1, 1, 64, 128),
        (FEW + 1, 1, 8, 16),
        (2 * CHUNK + 5, 4, 12, 20),
    ],
)
def test_equals_the_law(device, ran, n_tokens, n_snapshots, p, n):
    share = 1 if p > 12 else 2
    inputs = make(n_tokens, n_batch=2, n_groups=1, share=share, p=p, n=n)
    given = strided(inputs.to(device))
    o, kept = with_triton.ssd(*given, n_snapshots=n_snapshots)
    truth = naive.ssd(*inputs.double(), n_snapshots=n_snapshots)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])
    assert torch.equal(given.state.cpu(), inputs.state)
    in_chunks = n_tokens - n_snapshots + 1
    assert ran == ([in_chunks] if in_chunks > FEW else [])


def test_states_in_several_programs(device, monkeypatch):
    for name in ("ROWS", "CHUNK_ROWS"):
        monkeypatch.setattr(with_triton, name, 16)
    for n_tokens in (3, FEW + 3):
        inputs = make(n_tokens, n_groups=2, share=2, p=24, n=12)
        o, kept = with_triton.ssd(*inputs.to(device), n_snapshots=2)
        truth = naive.ssd(*inputs.double(), n_snapshots=2)
        assert_near(o, truth[0])
        assert_near(kept, truth[1])


@pytest.mark.parametrize("g", [-20.0, -1000.0, -torch.inf])
@pytest.mark.parametrize("n_tokens", [4, FEW + 4])
def test_strong_decay_neither_overflows_nor_poisons(device, n_tokens, g):
    inputs = make(n_tokens, n_groups=1)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, kept = with_triton.ssd(*inputs.to(device))
    truth = naive.ssd(*inputs.double())
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


def test_a_forgetful_token_does_not_hide_the_others(device):
    inputs = make(2 * CHUNK, n_groups=1)
    inputs.g.fill_(-1e-3)[:, [2, 18]] = -5000.0
    o, kept = with_triton.ssd(*inputs.to(device))
    truth = naive.ssd(*inputs.double())
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


@pytest.mark.parametrize("n_tokens", [3, FEW + 9])
@pytest.mark.parametrize("over", [None, 0, -1], ids=["apart", "newest", "oldest"])
def test_the_newest_states_go_into_planes(device, n_tokens, over):
    inputs = make(n_tokens, n_batch=2, n_groups=1)
    planes = torch.full((4, 4, *inputs.state.shape[1:]), torch.nan, device=device)
    slots = list(planes[:3, 1:3].unbind(0))
    given = inputs.to(device)
    if over is not None:
        slots[over].copy_(given.state)
        given = given._replace(state=slots[over])
    o = with_triton.ssd_into(*given, slots=slots)
    truth = naive.ssd(*inputs.double(), n_snapshots=3)
    assert_near(o, truth[0])
    assert_near(torch.stack(slots, 1), truth[1])
    assert planes[3:].isnan().all() and planes[:, [0, 3]].isnan().all()


@pytest.mark.parametrize("over", [None, 0, 5, -1])
def test_more_slots_than_one_kernel_takes(device, monkeypatch, over):
    monkeypatch.setattr(shared, "MAX_SLOTS", 3)
    inputs = make(8, n_groups=1)
    slots = list(torch.full((8, *inputs.state.shape), torch.nan, device=device).unbind(0))
    given = inputs.to(device)
    if over is not None:
        slots[over].copy_(given.state)
        given = given._replace(state=slots[over])
    o = with_triton.ssd_into(*given, slots=slots)
    truth = naive.ssd(*inputs.double(), n_snapshots=8)
    assert_near(o, truth[0])
    assert_near(torch.stack(slots, 1), truth[1])


def test_slots_of_different_strides_are_refused(device):
    inputs = make(2, p=8, n=8).to(device)
    slots = [torch.empty_like(inputs.state), torch.empty_like(inputs.state).transpose(2, 3)]
    with pytest.raises(ValueError, match="differ in their strides"):
        with_triton.ssd_into(*inputs, slots=slots)


def test_the_bits_are_those_of_states_given_as_tensors(device):
    inputs = make(6, n_batch=2)
    pool, given = scattered(inputs.state, 2, over=-1).to(device), inputs.to(device)
    slots = [torch.empty_like(given.state) for _ in range(2)]
    expected = with_triton.ssd_into(*given, slots=slots)
    found = with_triton.ssd_slots(*given[:6], pool.rows, pool.read, pool.write)
    assert torch.equal(found, expected)
    assert torch.equal(pool.rows[pool.write], torch.stack(slots, 1))


def test_step_gates_in_the_launch(device):
    """The bits of them apart, of columns of something wider."""
    inputs = make(3, n_batch=2).to(device)
    pools = [scattered(inputs.state, 2, over=-1).to(device) for _ in range(2)]
    steps = torch.randn(*inputs.dt.shape, 2, device=device)[..., 1]
    raw = torch.randn(2, steps.shape[-1], device=device).unbind(0)
    x, _, _, *others = inputs[:6]
    first, other = ((pool.rows, pool.read, pool.write) for pool in pools)
    found = ssd.ssd_slots(x, steps, steps, *others, *first, raw=raw)
    gates = step_gates(steps, *raw)
    assert torch.equal(found, with_triton.ssd_slots(x, *gates, *others, *other))
    assert torch.equal(*(pool.rows[pool.write] for pool in pools))


@pytest.mark.parametrize("n_tokens", [1, 5, FEW + 5])
def test_the_log_rebuilds_the_states(device, ran, n_tokens):
    inputs = make(n_tokens, n_batch=2, n_groups=1)
    given = strided(inputs.to(device))
    o, log = with_triton.ssd_log(*given)
    wanted, law = naive.ssd_log(*inputs.double())
    assert_near(o, wanted)
    assert_near(log.left, law.left)
    assert log.right is given.B and log.g is given.g
    for n in {0, 1, n_tokens}:
        folded = delta_with_triton.fold(given.state, log, n, grouped=True)
        assert_near(folded, delta_naive.fold(inputs.state.double(), law, n, grouped=True))
    counts = torch.tensor([1, 0])
    poisoned = UpdateLog(*(part.clone() for part in log))
    for part in poisoned:
        part[0, 1:], part[1] = torch.nan, torch.nan
    state = given.state.clone().contiguous()
    folded = delta_with_triton.fold(state, poisoned, counts.to(device), grouped=True, out=state)
    assert folded is state
    assert_near(folded, delta_naive.fold(inputs.state.double(), law, counts, grouped=True))
    assert ran == ([n_tokens] if n_tokens > FEW else [])


def test_a_sequence_has_the_same_bits_among_many_and_before_later_tokens(device):
    inputs = make(FEW + 20, n_batch=3, n_groups=1).to(device)
    o, kept = with_triton.ssd(*inputs)
    one = with_triton.ssd(*inputs.sequences(1, 2))
    assert torch.equal(o[1:2], one[0]) and torch.equal(kept[1:2], one[1])
    shorter, _ = with_triton.ssd(*inputs.tokens(0, FEW + 7))
    assert torch.equal(o[:, : FEW + 7], shorter)
