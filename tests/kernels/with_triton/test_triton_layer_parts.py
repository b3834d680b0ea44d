"""Convolution, norms, rope, gates and products of heads in Triton, against the law in f64."""

from __future__ import annotations

import pytest
import torch

import kernels.norm
import kernels.rope
from kernels.dispatch import COUNTERS, counters
from kernels.linear import head_linear
from kernels.linear import with_triton as heads
from kernels.norm import with_triton as norm
from kernels.pointwise import naive as pointwise_law
from kernels.pointwise import with_triton as pointwise
from kernels.recurrence import channel_gates, conv
from kernels.recurrence import with_triton as recurrence
from kernels.rope import with_triton as rope
from kernels.rows import streams as mixed
from kernels.rows import with_triton as streams
from kernels.rows.record import on_host, row_record
from tests.kernels.rows.test_record import assert_of_numpy
from tests.support.closeness import nmse
from tests.support.implementations import implementations

heads_law, conv_law, gates_law, rope_law, norm_law, streams_law = (
    implementations(module, "naive")[0]
    for module in (head_linear, conv, channel_gates, kernels.rope, kernels.norm, mixed)
)

F32 = 1e-12


def permuted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with the last axis outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


@pytest.mark.parametrize("n_taps", [1, 2, 4])
@pytest.mark.parametrize("n_tokens", [1, 2, 9])
@pytest.mark.parametrize("strides", ["plain", "permuted"])
def test_convolution(device, n_tokens, n_taps, strides):
    x, weight = torch.randn(3, n_tokens, 150), torch.randn(150, n_taps)
    window = torch.randn(3, n_taps - 1, 150)
    given = [part.to(device) for part in (x, weight, window)]
    if strides == "permuted":
        given = [permuted(part) for part in given]
    y, history = recurrence.causal_conv(*given)
    wanted, _ = conv_law.causal_conv(x.double(), weight.double(), window.double())
    assert y.shape == x.shape
    assert nmse(y.cpu(), wanted) < F32
    assert torch.equal(history.cpu(), torch.cat((window, x), 1))


@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_with_a_bias_and_without_activation(device, biased, activate):
    x, weight, window = torch.randn(2, 3, 20), torch.randn(20, 4), torch.randn(2, 3, 20)
    bias = torch.randn(40)[::2] if biased else None
    given = [part if part is None else part.to(device) for part in (x, weight, window, bias)]
    y, _ = recurrence.causal_conv(*given, activate=activate)
    exact = [part if part is None else part.double() for part in (x, weight, window, bias)]
    wanted, _ = conv_law.causal_conv(*exact, activate=activate)
    assert nmse(y.cpu(), wanted) < F32


def test_a_window_from_the_history_leads_on(device):
    x, weight = torch.randn(2, 7, 20).to(device), torch.randn(20, 4).to(device)
    window = torch.randn(2, 3, 20).to(device)
    whole, _ = recurrence.causal_conv(x, weight, window)
    head, history = recurrence.causal_conv(x[:, :5], weight, window)
    tail, _ = recurrence.causal_conv(x[:, 5:], weight, history[:, 5:])
    assert torch.equal(torch.cat((head, tail), 1), whole)


@pytest.mark.parametrize("over", [False, True], ids=["apart", "over"])
@pytest.mark.parametrize(("n_tokens", "n"), [(1, 1), (2, 2), (5, 5), (16, 3), (17, 2)])
@pytest.mark.parametrize("n_taps", [2, 4])
def test_windows_come_from_rows_and_go_to_rows(device, n_taps, n_tokens, n, over):
    """With the bits of windows chosen by the host; all other rows are garbage and stay so."""
    pool = torch.full((16, n_taps - 1, 150), torch.nan)
    read = torch.tensor([7, 2])
    pool[read] = torch.randn(2, n_taps - 1, 150)
    x, weight = torch.randn(2, n_tokens, 152)[..., 1:-1], torch.randn(150, n_taps)
    write = torch.tensor([[7 if over else 0, 1, 3, 9, 10], [8, 2 if over else 4, 5, 11, 12]])[:, :n]
    there = pool.to(device)
    first = x.to(device), weight.to(device)
    wanted, history = recurrence.causal_conv(*first, there[read.to(device)])
    y = recurrence.causal_conv_slots(*first, there, read.to(device), write.to(device), None)
    both, rows = torch.randn(2, n_tokens, 306, device=device), [read.to(device), write.to(device)]
    gate, values = both[..., 2:152], both[..., 153:303]
    pools = [pool.clone().to(device) for _ in range(2)]
    gated = recurrence.causal_conv_slots(values, first[1], pools[0], *rows, None, gate=gate)
    apart = recurrence.causal_conv_slots(gate * values, first[1], pools[1], *rows, None)
    assert torch.equal(gated, apart)
    assert torch.equal(*(each.nan_to_num(-1.0) for each in pools))
    expected = pool.clone()
    for i in range(n):
        end = n_tokens - (n - 1 - i)
        expected[write[:, i]] = history[:, end : end + n_taps - 1].cpu()
    assert torch.equal(y, wanted)
    assert torch.equal(there.cpu().nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("shape", [(1, 128), (2, 3, 96), (2, 3, 5, 16), (3, 1500)], ids=str)
@pytest.mark.parametrize("strides", ["plain", "permuted", "sliced"])
def test_norms(device, shape, strides):
    x, gate, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    change = {
        "plain": lambda part: part,
        "permuted": permuted,
        "sliced": lambda part: torch.cat((part + 9, part), -1)[..., shape[-1] :],
    }[strides]
    a, b, c = (change(part.to(device)) for part in (x, gate, weight))
    x, gate, weight = x.double(), gate.double(), weight.double()
    for y, wanted in (
        (norm.rms_norm(a, c, 1e-6), norm_law.rms_norm(x, weight, 1e-6)),
        (norm.l2_norm(a, 1e-6), norm_law.l2_norm(x, 1e-6)),
        (norm.gated_rms_norm(a, b, c, 1e-6), norm_law.gated_rms_norm(x, gate, weight, 1e-6)),
        (
            norm.gated_rms_norm(a, b, c, 1e-6, sigmoid=True),
            norm_law.gated_rms_norm(x, gate, weight, 1e-6, sigmoid=True),
        ),
    ):
        assert y.dtype == torch.float32
        assert nmse(y.cpu(), wanted) < F32


@pytest.mark.parametrize(("n_groups", "d"), [(1, 96), (3, 20), (2, 1500)])
def test_the_norm_of_groups(device, n_groups, d):
    x, gate = torch.randn(2, 2, 3, n_groups, d).unbind(0)
    weight = torch.randn(n_groups, d)
    wanted = norm_law.group_rms_norm(x.double(), gate.double(), weight.double(), 1e-6)
    y = norm.group_rms_norm(x.to(device), permuted(gate.to(device)), weight.to(device), 1e-6)
    assert nmse(y.cpu(), wanted) < F32


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 1500)], ids=str)
def test_squared_relu(device, shape):
    x = torch.randn(shape)
    x[..., 0] = -torch.inf
    y = pointwise.relu2(permuted(x.to(device)))
    assert torch.equal(y.cpu(), x.clamp(min=0).square())


def test_norms_of_zeros_and_of_tiny_rows(device):
    x = torch.stack((torch.zeros(16), torch.full((16,), 1e-12))).to(device)
    assert torch.equal(norm.l2_norm(x, 1e-6).cpu()[0], torch.zeros(16))
    wanted = norm_law.rms_norm(x.cpu().double(), torch.ones(16).double(), 1e-6)
    assert nmse(norm.rms_norm(x, torch.ones(16).to(device), 1e-6).cpu(), wanted) < F32


@pytest.mark.parametrize("n_rot", [2, 12, 16])
@pytest.mark.parametrize("strides", ["plain", "permuted"])
def test_rope(device, n_rot, strides):
    x = torch.randn(2, 3, 5, 16)
    positions = torch.randint(0, 9999, (2, 3))
    table = rope_law.rope_table(positions, n_rot, 1e4 ** -(torch.arange(n_rot // 2) / 8), 1.0)
    given = [part.to(device) for part in (x, *table)]
    if strides == "permuted":
        given = [permuted(part) for part in given]
    y = rope.apply_rope(*given)
    wanted = rope_law.apply_rope(x.double(), *(part.double() for part in table))
    assert nmse(y.cpu(), wanted) < F32
    assert torch.equal(y.cpu()[..., n_rot:], x[..., n_rot:])
    for back in (False, True):
        y = rope.rope_at_end(*given, back)
        wanted = rope_law.rope_at_end(x.double(), *(part.double() for part in table), back)
        assert nmse(y.cpu(), wanted) < F32
        assert torch.equal(y.cpu()[..., :-n_rot], x[..., :-n_rot])


@pytest.mark.parametrize(("head_dim", "n_rot"), [(4, 4), (16, 12), (20, 8), (128, 64)])
def test_rope_of_normed_heads(device, head_dim, n_rot):
    """The bits of the norm and then of the rotation, of columns of something wider."""
    wide = torch.full((2, 3, 5 * head_dim + 4), torch.nan)
    wide[..., 1:-3].normal_()
    x = wide.to(device)[..., 1:-3].view(2, 3, 5, head_dim)
    weight = torch.randn(5, head_dim, device=device)
    cos, sin = torch.randn(2, 2, 3, n_rot // 2, device=device).unbind(0)
    y = rope.norm_and_rope(x, weight, 1e-6, cos, sin)
    assert torch.equal(y, rope.apply_rope(norm.head_norm(x, weight, 1e-6), cos, sin))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "n_rot"), [(16, 12), (128, 64)])
def test_rotated_keys_and_values_go_to_their_cells(device, head_dim, n_rot, normed):
    """The bits of norm, rotation and cells one after the other; values stay as they are, infinite
    ones too."""
    wide = torch.full((2, 3, 7 * head_dim + 4), torch.nan)
    wide[..., 1:-3].normal_()
    wide[0, 0, -9] = torch.inf
    x = wide.to(device)[..., 1:-3].view(2, 3, 7, head_dim)
    weight = torch.randn(5, head_dim, device=device) if normed else None
    table = torch.randn(2, 2, 3, n_rot // 2, device=device).unbind(0)
    of, where = (torch.tensor(n, device=device) for n in ([2, 2, 2, 0, 0, 0], [6, 1, 2, 0, 3, 6]))
    there, apart = torch.full((2, 2, 3, 2, 7, head_dim), torch.nan, device=device).unbind(0)
    q = rope.rope_into_cells(x, weight, 1e-6, *table, (*there.unbind(0), of, where))
    qk, v = x[:, :, :5], x[:, :, 5:]
    turned = rope.norm_and_rope(qk, weight, 1e-6, *table) if normed else rope.apply_rope(qk, *table)
    assert torch.equal(q, turned[:, :, :3])
    streams.write_cells_each(list(zip(apart, (turned[:, :, 3:], v), strict=True)), of, where)
    assert torch.equal(there.cpu().nan_to_num(-9.0), apart.cpu().nan_to_num(-9.0))


def test_keys_and_values_go_to_their_cells(device):
    """Of unlike widths, out of rows with gaps; all other cells are garbage and stay so."""
    storage = [torch.full((3, 2, 7, d), torch.nan) for d in (24, 20)]
    rows = [torch.randn(2, 2, 5, d)[:, :, 3:] for d in (24, 20)]
    of, where = torch.tensor([2, 2, 0, 0]), torch.tensor([6, 1, 0, 3])
    there = [each.to(device) for each in storage]
    pairs = list(zip(there, (each.to(device) for each in rows), strict=True))
    streams.write_cells_each(pairs, of.to(device), where.to(device))
    for written, kept, given in zip(there, storage, rows, strict=True):
        for i in range(4):
            kept[of[i], :, where[i]] = given[i // 2, i % 2]
        assert torch.equal(written.cpu().nan_to_num(-9.0), kept.nan_to_num(-9.0))


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 96), (3, 1500)], ids=str)
@pytest.mark.parametrize("strides", ["plain", "permuted", "halves"])
def test_swiglu(device, shape, strides):
    """Also as the halves of one projection's output, as a layer hands them over."""
    gate, up = torch.randn(2, *shape) * 5
    gate[..., 0], gate[..., 1] = -80.0, 80.0
    given = gate.to(device), up.to(device)
    if strides == "permuted":
        given = permuted(given[0]), given[1]
    elif strides == "halves":
        given = torch.cat(given, -1).split(shape[-1], -1)
    y = pointwise.swiglu(*given)
    assert y.shape == shape and y.dtype == torch.float32
    assert nmse(y.cpu(), pointwise_law.swiglu(gate.double(), up.double())) < F32
    within = pointwise_law.swiglu(gate.double(), up.double(), 1.5)
    assert nmse(pointwise.swiglu(*given, 1.5).cpu(), within) < F32
    clamped = pointwise_law.clamped_swiglu(gate.double(), up.double(), 1.5)
    assert nmse(pointwise.clamped_swiglu(*given, 1.5).cpu(), clamped) < F32


@pytest.mark.parametrize("linear", [25.0, 0.0], ids=["both", "gate"])
@pytest.mark.parametrize("strides", ["plain", "halves"])
def test_situ(device, strides, linear):
    joined = torch.randn(2, 3, 140) * 8
    joined[..., 0], joined[..., 1], joined[..., 70], joined[..., 2] = -80.0, 80.0, 80.0, 1e-6
    gate, up = (part if strides == "halves" else part.clone() for part in joined.split(70, -1))
    y = pointwise.situ(gate.to(device), up.to(device), 4.0, linear)
    wanted = pointwise_law.situ(gate.double(), up.double(), 4.0, linear)
    torch.testing.assert_close(y.cpu().double(), wanted, rtol=2e-6, atol=1e-30)


def test_geglu(device):
    gate, up = (torch.randn(2, 3, 140) * 3).split(70, -1)
    wanted = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    y = pointwise.geglu(gate.to(device), up.to(device))
    torch.testing.assert_close(y.cpu().double(), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("strides", ["plain", "columns"])
def test_channel_gates(device, strides, bound):
    joined = torch.randn(2, 3, 37) * 9
    joined[..., 3], joined[..., 4], joined[..., 5] = -60.0, 60.0, -80.0
    decay, beta = joined[..., 1:33], joined[..., 33:]
    if strides == "plain":
        decay, beta = decay.clone(), beta.clone()
    dt, a = torch.randn(32), -torch.rand(32) / 2
    done = recurrence.channel_gates(*(x.to(device) for x in (decay, dt, a, beta)), bound)
    law = gates_law.channel_gates(*(x.double() for x in (decay, dt, a, beta)), bound)
    for ours, wanted in zip(done, law, strict=True):
        torch.testing.assert_close(ours.cpu().double(), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("n_heads", "d"), [(2, 4), (6, 20), (32, 128)])
def test_queries_keys_and_gates(device, n_heads, d, bound):
    """The bits of the norm and of the gates apart, from columns of something wider."""
    wide = torch.full((2, 3, n_heads * d + 7), torch.nan)
    wide[..., 3:-4].normal_()
    qk = wide.to(device)[..., 3:-4].view(2, 3, n_heads, d)
    n_channels = n_heads if bound is None else n_heads * d
    decay, beta = torch.randn(2, 3, n_channels, device=device), torch.randn(2, 3, n_heads)
    dt, a = torch.randn(n_channels, device=device), -torch.rand(n_channels, device=device)
    beta = beta.to(device)
    normed, g, opened = recurrence.normed_and_gated(qk, 1e-6, decay, dt, a, beta, bound)
    assert torch.equal(normed, norm.l2_norm(qk, 1e-6))
    apart = recurrence.channel_gates(decay, dt, a, beta, bound)
    assert torch.equal(g, apart[0]) and torch.equal(opened, apart[1])
    law = gates_law.channel_gates(*(x.cpu().double() for x in (decay, dt, a, beta)), bound)
    for ours, wanted in zip((g, opened), law, strict=True):
        torch.testing.assert_close(ours.cpu().double(), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("n_heads", [4, 24])
def test_step_gates(device, n_heads):
    step = torch.full((2, 3, n_heads + 3), torch.nan)
    step[..., 1:-2].normal_(std=9)
    step, dt, a = step[..., 1:-2], torch.randn(n_heads), -torch.rand(n_heads)
    done = pointwise.step_gates(step.to(device), dt.to(device), a.to(device))
    law = pointwise_law.step_gates(step.double(), dt.double(), a.double())
    for ours, wanted in zip(done, law, strict=True):
        torch.testing.assert_close(ours.cpu().double(), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("n_tokens", [1, 3, 9, 40])
@pytest.mark.parametrize(("n", "m"), [(5, 3), (40, 70)])
def test_products_of_heads(device, n_tokens, n, m):
    x = torch.full((2, n_tokens, 3, n + 5), torch.nan)[..., 2 : n + 2].normal_()
    weight = torch.randn(3, n, m)
    y = heads.head_linear(x.to(device), weight.to(device))
    assert y.shape == (2, n_tokens, 3, m)
    assert nmse(y.cpu(), heads_law.head_linear(x.double(), weight.double())) < F32


@pytest.mark.parametrize("d", [8, 700])
@pytest.mark.parametrize("strides", ["plain", "permuted"])
def test_mixed_streams(device, d, strides):
    m, x, y = 2 * torch.randn(2, 3, mixed.N_GATES), torch.randn(2, 3, 4, d), torch.randn(2, 3, d)
    scale, base, rounds = torch.randn(3), torch.randn(24), (20, 1e-6)
    gates = streams_law.stream_gates(m.double(), scale.double(), base.double(), *rounds)
    given = [each.to(device) for each in (m, y, gates.float())]
    if strides == "permuted":
        given = [permuted(each) for each in given]
    x_, scale_, base_ = (each.to(device) for each in (x, scale, base))
    for found, wanted in (
        (streams.stream_gates(given[0], scale_, base_, *rounds), gates),
        (streams.stream_gates(given[0][..., :4], scale_[:1], base_[:4], *rounds), gates[..., :4]),
        (streams.weigh_streams(x_, given[2]), streams_law.weigh_streams(x.double(), gates)),
        (
            streams.advance_streams(x_, given[1], given[2]),
            streams_law.advance_streams(x.double(), y.double(), gates),
        ),
    ):
        assert nmse(found.cpu(), wanted) < F32


@pytest.mark.parametrize("n_vocab", [40, 5000])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_record_of_rows(device, n_vocab):
    assert_of_numpy(n_vocab, streams.row_record, device)
    asked = torch.zeros(1, dtype=torch.int64, device=device)
    record = streams.row_record(torch.full((1, 5000), -torch.inf, device=device), 2, asked)
    assert record.shape == (1, 10) and record[0, :2].tolist() == [0, 1]
    assert not counters(torch.device(device)).any()


def test_a_record_of_more_rows_than_counters(device, monkeypatch):
    monkeypatch.setattr(streams, "_row_record", None)
    logits = torch.randn(COUNTERS + 1, 8, device=device)
    asked = torch.arange(COUNTERS + 1, device=device) % 8
    found = on_host(row_record(logits, 2, asked).cpu().numpy())
    assert torch.equal(torch.from_numpy(found.best), logits.cpu().argmax(1).int())
