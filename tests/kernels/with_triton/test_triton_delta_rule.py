"""The gated delta rule in Triton against the law, in f64 on the processor."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import UpdateLog
from kernels.recurrence import with_triton as shared
from kernels.recurrence.delta_rule import naive, with_triton
from tests.kernels.with_triton.conftest import INTERPRETED
from tests.support.closeness import nmse
from tests.support.delta_inputs import UPSTREAM, Inputs, make, strided

# what upstream asks for is 1e-7
F32 = 1e-11
# the interpreter takes milliseconds for a head's token; test_triton_delta_chunks has prompts for it
SHAPES = [shape for shape in UPSTREAM if not INTERPRETED or shape[2] <= 16 or shape[2] in (33, 65)]
REAL_WIDTHS = with_triton.NARROW, with_triton.WIDE


@pytest.fixture(autouse=True)
def _wide_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for each program: there one holds a whole state."""
    if device == "cpu":
        monkeypatch.setattr(with_triton, "NARROW", 128)
        monkeypatch.setattr(with_triton, "WIDE", 128)


def assert_near(result: torch.Tensor, truth: torch.Tensor) -> None:
    assert result.dtype == torch.float32
    assert nmse(result.cpu(), truth) < F32


@pytest.mark.parametrize(
    ("heads", "d", "n_tokens", "n_batch", "repeat", "kda", "n_snapshots"),
    SHAPES,
    ids=lambda x: str(x),
)
def test_upstream_shapes(device, heads, d, n_tokens, n_batch, repeat, kda, n_snapshots):
    if device == "cpu":
        heads, d = (1, 16) if n_tokens > 4 else (min(heads, 2), d)
    inputs = make(heads, d, n_tokens, n_batch, repeat, kda)
    o, kept = with_triton.gated_delta_rule(
        *inputs.to(device), grouped=False, n_snapshots=n_snapshots
    )
    assert o.shape == inputs.v.shape
    assert kept.shape == (n_batch, min(n_tokens, n_snapshots), heads * repeat, d, d)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_snapshots)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


@pytest.mark.parametrize("width", REAL_WIDTHS)
@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("d", [16, 12], ids=["d16", "d12"])
@pytest.mark.thinned(8)
def test_states_in_several_programs(device, monkeypatch, width, kda, d):
    """Also with sides that are no powers of two, and d_v unlike d_k."""
    for name in ("NARROW", "WIDE"):
        monkeypatch.setattr(with_triton, name, width)
    inputs = make(2, d, 3, 2, repeat=2, kda=kda, d_v=d + 8)
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=True, n_snapshots=2)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=True, n_snapshots=2)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


def test_programs_widen_once_there_are_enough(monkeypatch):
    for name, width in zip(("NARROW", "WIDE"), REAL_WIDTHS, strict=True):
        monkeypatch.setattr(with_triton, name, width)
    assert with_triton.columns_per_program(32, 128) == 8
    assert with_triton.columns_per_program(32 * 32, 128) == 16


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("grouped", [False, True], ids=["tiled", "grouped"])
@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.thinned(8)
def test_any_strides(device, n_tokens, grouped, kda):
    plain = make(2, 16, n_tokens, 2, repeat=3, kda=kda)
    permuted = strided(plain.to(device))
    assert not permuted.state.is_contiguous()
    o, kept = with_triton.gated_delta_rule(*permuted, grouped=grouped, n_snapshots=3)
    truth = naive.gated_delta_rule(*plain.double(), grouped=grouped, n_snapshots=3)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])
    assert torch.equal(permuted.state.cpu(), plain.state)


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
def test_a_snapshot_is_the_end_of_a_shorter_call(device, kda):
    """To the bit, as the recurrence promises; and one snapshot is the first of many."""
    inputs = make(2, 16, 6, 2, kda=kda, lowest_g=-1.0).to(device)
    o, kept = with_triton.gated_delta_rule(*inputs, grouped=False, n_snapshots=5)
    for back in range(5):
        shorter = inputs.tokens(0, 6 - back)
        o_short, end = with_triton.gated_delta_rule(*shorter, grouped=False)
        assert torch.equal(kept[:, back], end[:, 0])
        assert torch.equal(o[:, : 6 - back], o_short)


@pytest.mark.parametrize("cut", [1, 4])
def test_two_calls_continue_one_another_to_the_bit(device, cut):
    inputs = make(2, 16, 6, 2, lowest_g=-1.0).to(device)
    o, kept = with_triton.gated_delta_rule(*inputs, grouped=False)
    head, middle = with_triton.gated_delta_rule(*inputs.tokens(0, cut), grouped=False)
    rest = inputs.tokens(cut, 6, state=middle[:, 0])
    tail, end = with_triton.gated_delta_rule(*rest, grouped=False)
    assert torch.equal(torch.cat((head, tail), 1), o)
    assert torch.equal(end, kept)


def test_a_sequence_has_the_same_bits_among_many(device):
    inputs = make(1, 8, 2, 17, repeat=2, lowest_g=-1.0).to(device)
    o, kept = with_triton.gated_delta_rule(*inputs, grouped=True, n_snapshots=2)
    for b in (0, 9, 16):
        alone = Inputs(*(x[b : b + 1] for x in inputs))
        one = with_triton.gated_delta_rule(*alone, grouped=True, n_snapshots=2)
        assert torch.equal(o[b : b + 1], one[0])
        assert torch.equal(kept[b : b + 1], one[1])


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("g", [-20.0, -1000.0])
def test_strong_decay_neither_overflows_nor_poisons(device, kda, g):
    inputs = make(2, 16, 5, 1, kda=kda)
    inputs = inputs._replace(g=torch.full_like(inputs.g, g))
    o, kept = with_triton.gated_delta_rule(*inputs.to(device), grouped=False, n_snapshots=5)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=5)
    assert_near(o, truth[0])
    assert_near(kept, truth[1])


@pytest.mark.parametrize(
    ("n_tokens", "n_planes"), [(1, 4), (2, 4), (3, 3), (5, 2)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("over", [None, 0, -1], ids=["apart", "newest", "oldest"])
@pytest.mark.thinned(6)
def test_states_are_written_into_planes(device, n_tokens, n_planes, over):
    """Planes [K, cells, ...] of which a call writes some cells; the rest keeps its bits."""
    inputs = make(2, 8, n_tokens, 2, lowest_g=-1.0)
    planes = torch.randn(n_planes, 5, *inputs.state.shape[1:]).to(device)
    before, here = planes.clone(), slice(1, 3)
    n_fresh = min(n_planes, n_tokens)
    slots = list(planes[:n_fresh, here].unbind(0))
    given = inputs.to(device)
    if over is not None:
        slots[over].copy_(given.state)
        given = given._replace(state=slots[over])
    o = with_triton.gated_delta_into(*given, grouped=False, slots=slots)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_fresh)
    assert_near(o, truth[0])
    assert_near(planes[:n_fresh, here], truth[1].transpose(0, 1))
    assert torch.equal(planes[n_fresh:], before[n_fresh:])
    assert torch.equal(planes[:, :1], before[:, :1])
    assert torch.equal(planes[:, 3:], before[:, 3:])


def test_slots_in_any_order(device):
    """Rows of a pool, as a ring or a free list hands them out, and memory elsewhere."""
    inputs = make(2, 8, 4, 1, lowest_g=-1.0)
    pool = torch.full((6, *inputs.state.shape), torch.nan, device=device)
    slots = [pool[4], torch.full_like(pool[0], torch.nan), pool[0], pool[3]]
    with_triton.gated_delta_into(*inputs.to(device), grouped=False, slots=slots)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=4)
    assert_near(torch.stack(slots, 1), truth[1])
    assert pool[[1, 2, 5]].isnan().all()


@pytest.mark.parametrize(
    ("n_slots", "over"), [(1, 0), (3, None), (3, -1), (4, 0), (7, 5), (7, -1), (8, None), (8, 0)]
)
def test_more_slots_than_one_kernel_takes(device, monkeypatch, n_slots, over):
    monkeypatch.setattr(shared, "MAX_SLOTS", 3)
    inputs = make(1, 8, 8, 2, lowest_g=-1.0)
    slots = list(torch.full((n_slots, *inputs.state.shape), torch.nan, device=device).unbind(0))
    given = inputs.to(device)
    if over is not None:
        slots[over].copy_(given.state)
        given = given._replace(state=slots[over])
    o = with_triton.gated_delta_into(*given, grouped=False, slots=slots)
    truth = naive.gated_delta_rule(*inputs.double(), grouped=False, n_snapshots=n_slots)
    assert_near(o, truth[0])
    assert_near(torch.stack(slots, 1), truth[1])


def test_slots_of_different_strides_are_refused(device):
    inputs = make(1, 8, 2, 1).to(device)
    slots = [torch.empty_like(inputs.state), torch.empty_like(inputs.state).transpose(2, 3)]
    with pytest.raises(ValueError, match="differ in their strides"):
        with_triton.gated_delta_into(*inputs, grouped=False, slots=slots)


@pytest.mark.parametrize(("n_tokens", "grouped"), [(1, False), (4, True)])
def test_every_prefix_of_the_log_is_a_snapshot(device, n_tokens, grouped):
    inputs = make(2, 16, n_tokens, 2, repeat=2, lowest_g=-1.0, d_v=24)
    given = strided(inputs.to(device))
    o, log = with_triton.gated_delta_log(*given, grouped=grouped)
    wanted, law = naive.gated_delta_log(*inputs.double(), grouped=grouped)
    assert_near(o, wanted)
    assert_near(log.right, law.right)
    assert log.left is given.k and log.g is given.g
    _, kept = with_triton.gated_delta_rule(*given, grouped=grouped, n_snapshots=n_tokens)
    for n in range(1, n_tokens + 1):
        folded = with_triton.fold(given.state, log, n, grouped=grouped)
        assert torch.equal(folded, kept[:, -n])
        assert_near(folded, naive.fold(inputs.state.double(), law, n, grouped=grouped))
    assert torch.equal(with_triton.fold(given.state, log, 0, grouped=grouped), given.state)


@pytest.mark.parametrize("counts", [[0, 3, 7], [7, 7, 1], [0, 0, 0]], ids=str)
def test_rows_of_different_lengths(device, counts):
    """Each row as if it were alone, whatever its log holds beyond its tokens."""
    inputs = make(1, 16, 7, 3, repeat=2, lowest_g=-1.0)
    _, law = naive.gated_delta_log(*inputs.double(), grouped=False)
    log = UpdateLog(*(x.float() for x in law))
    for row, n in enumerate(counts):
        for x in log:
            x[row, n:] = torch.nan
    on_device = UpdateLog(*(x.to(device) for x in log))
    state, n_tokens = inputs.state.to(device), torch.tensor(counts, device=device)
    truth = naive.fold(inputs.state.double(), law, torch.tensor(counts), grouped=False)
    folded = with_triton.fold(state, on_device, n_tokens, grouped=False)
    assert_near(folded, truth)
    assert torch.equal(state.cpu(), inputs.state)
    assert with_triton.fold(state, on_device, n_tokens, grouped=False, out=state) is state
    assert torch.equal(state, folded)
