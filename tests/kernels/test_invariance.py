"""The batch-invariant forms: near the law, and the same bits alone as beside anything else."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from kernels.attention import attend
from kernels.attention import naive as naive_attention
from kernels.attention import with_llvm as llvm_attention
from kernels.attention import with_torch as torch_attention
from kernels.conv import causal_conv
from kernels.conv import naive as naive_conv
from kernels.delta_rule import fold, gated_delta_into, gated_delta_log
from kernels.delta_rule import naive as naive_delta
from kernels.linear import MODES
from kernels.moe import experts, pack_experts, route
from kernels.moe import naive as naive_moe
from kernels.norm import gated_rms_norm, l2_norm, rms_norm
from kernels.pointwise import pointwise
from tests.support.closeness import nmse
from tests.support.delta_inputs import make

WIDTHS = (1, 2, 3, 4, 8, 16)


@pytest.mark.parametrize("function", [torch.sigmoid, functional.silu, functional.softplus])
@pytest.mark.parametrize("n", [1, 20, 100, 70_000])
def test_pointwise(function, n):
    x = torch.randn(n)
    y = pointwise(function, x, invariant=True)
    torch.testing.assert_close(y, function(x))
    for start, stop in ((0, n), (n // 3, n), (n // 2, n // 2 + 1), (0, n // 2 + 1)):
        assert torch.equal(pointwise(function, x[start:stop], invariant=True), y[start:stop])


def test_pointwise_leaves_the_rest_alone():
    x = torch.randn(3, 7, 2).transpose(0, 1)
    assert torch.equal(pointwise(torch.sigmoid, x, invariant=False), x.sigmoid())
    assert pointwise(torch.sigmoid, x, invariant=True).shape == x.shape


@pytest.mark.parametrize("d", [4, 20, 64, 1000])
def test_norms(d):
    x, gate, weight = torch.randn(16, 3, d + 1)[..., :d], torch.randn(16, 3, d), torch.randn(d)
    forms = {
        "rms": lambda s: rms_norm(x[s], weight, 1e-6),
        "l2": lambda s: l2_norm(x[s], 1e-6),
        "gated": lambda s: gated_rms_norm(x[s], gate[s], weight, 1e-6, invariant=True),
    }
    for name, form in forms.items():
        together = form(slice(None))
        for width in WIDTHS:
            part = slice(16 - width, 16)
            assert torch.equal(form(part), together[part]), name


@pytest.mark.parametrize("n_channels", [20, 64])
def test_conv(n_channels):
    x, weight, window = (
        torch.randn(3, 16, n_channels),
        torch.randn(n_channels, 4),
        torch.randn(3, 3, n_channels),
    )
    y, history = causal_conv(x, weight, window, invariant=True)
    law, law_history = naive_conv.causal_conv(x, weight, window)
    torch.testing.assert_close(y, law)
    assert torch.equal(history, law_history)
    for b in range(3):
        for t in range(16):
            one, _ = causal_conv(
                x[b : b + 1, t : t + 1], weight, history[b : b + 1, t : t + 3], invariant=True
            )
            assert torch.equal(one[0, 0], y[b, t])


@pytest.mark.parametrize(
    "attend",
    [
        partial(attend, invariant=True),
        torch_attention.attend_invariant,
        llvm_attention.attend_invariant,
    ],
    ids=["chosen", "torch", "llvm"],
)
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("n_cells", [70, 4000])
def test_attention(attend, head_dim, n_cells):
    q, (k, v) = torch.randn(2, 8, 4, head_dim), torch.randn(2, 2, 2, n_cells, head_dim)
    end = torch.tensor([[n_cells - 60], [n_cells - 30]]) + torch.arange(8)
    mask = torch.arange(n_cells) < end.unsqueeze(2)
    mask[1, :, 5] = False  # not only the first cells
    k[0, :, n_cells - 40 :], v[0, :, n_cells - 40 :] = torch.nan, torch.nan
    o = attend(q, k, v, mask)
    assert nmse(o, naive_attention.attend(q, k, v, mask)) < 1e-10
    for b in range(2):
        for t in range(8):
            n = int(end[b, t])
            alone = attend(
                q[b : b + 1, t : t + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n],
                mask[b : b + 1, t : t + 1, :n],
            )  # fmt: skip
            assert torch.equal(alone[0, 0], o[b, t])


@pytest.mark.parametrize("mode", MODES)
def test_experts(mode):
    x, n_experts, d, f = torch.randn(16, 24), 6, 24, 20
    gate, up = torch.randn(2, n_experts, f, d)
    down = torch.randn(n_experts, d, f)
    pairs = [(torch.cat((g, u)), out) for g, u, out in zip(gate, up, down, strict=True)]
    weights, ids = route(torch.randn(16, n_experts), 3)
    packed, law = pack_experts(gate, up, down, mode), naive_moe.pack(gate, pairs, mode)
    y = experts(x, weights, ids, packed, invariant=True)
    bound = {"f32": 1e-10, "bf16": 5e-5, "int8": 1e-4, "int8x2": 1e-5}[mode]
    assert nmse(y, naive_moe.experts(x, weights, ids, law)) < bound
    for width in WIDTHS:
        part = slice(16 - width, 16)
        some = experts(x[part], weights[part], ids[part], packed, invariant=True)
        assert torch.equal(some, y[part])


@pytest.mark.parametrize("n_used", [1, 3, 8])
def test_routing(n_used):
    logits = torch.randn(16, 10)
    weights, ids = route(logits, n_used)
    for width in WIDTHS:
        some_weights, some_ids = route(logits[16 - width :], n_used)
        assert torch.equal(some_weights, weights[16 - width :])
        assert torch.equal(some_ids, ids[16 - width :])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("d", [8, 64])
def test_delta_rule(grouped, d):
    """All at once, token by token with states, and from logs folded at any point."""
    *rows, state = make(2, d, 9, 3, repeat=2, lowest_g=-2.0)
    law, _ = naive_delta.gated_delta_rule(*rows, state, grouped=grouped)
    slots = [torch.full_like(state, torch.nan) for _ in range(2)]
    o = gated_delta_into(*rows, state, grouped=grouped, slots=slots, invariant=True)
    assert nmse(o, law) < 1e-10
    logged, log = gated_delta_log(*rows, state, grouped=grouped, invariant=True)
    assert torch.equal(logged, o)
    for b in range(3):
        at = state[b : b + 1].clone()
        states = []
        for t in range(9):
            one = [x[b : b + 1, t : t + 1] for x in rows]
            assert torch.equal(
                gated_delta_into(*one, at, grouped=grouped, slots=[at], invariant=True)[0, 0],
                o[b, t],
            )
            states.append(at[0].clone())
        assert torch.equal(slots[0][b], states[-1]) and torch.equal(slots[1][b], states[-2])
        for n in (1, 4, 9):
            assert torch.equal(
                fold(state, log, n, grouped=grouped, invariant=True)[b], states[n - 1]
            )
        counts = torch.tensor([2, 7, 5])
        mixed = fold(state, log, counts, grouped=grouped, invariant=True)
        assert torch.equal(mixed[b], states[int(counts[b]) - 1])
    assert torch.equal(fold(state, log, 0, grouped=grouped, invariant=True), state)
