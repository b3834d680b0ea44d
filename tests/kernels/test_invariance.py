"""The batch-invariant forms: near the law, and the same bits alone as next to anything else."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from kernels import attention, moe, norm
from kernels.attention import attend
from kernels.attention import with_llvm as llvm_attention
from kernels.linear.integers import weight_levels
from kernels.linear.packed import MODES
from kernels.moe import Choice, experts, pack_experts, route
from kernels.norm import gated_rms_norm, group_rms_norm, l2_norm, rms_norm
from kernels.pointwise import delta_gates, relu2, step_gates, swiglu
from kernels.pointwise.with_torch import invariant as torch_ops
from kernels.pointwise.with_torch import pointwise
from kernels.recurrence import conv, delta_rule
from kernels.recurrence.conv import causal_conv
from kernels.recurrence.delta_rule import naive as naive_delta
from kernels.recurrence.delta_rule import with_llvm, with_torch
from tests.support.attention import WithDefaults
from tests.support.closeness import nmse
from tests.support.delta_inputs import make
from tests.support.implementations import Implementation, implementations

naive_moe = Implementation(moe, "naive")

naive_attention, torch_attention = map(
    WithDefaults, implementations(attention, "naive", "with_torch")
)

naive_conv, torch_conv = implementations(conv, "naive", "with_torch")

torch_norm = Implementation(norm, "with_torch")

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
@pytest.mark.thinned(4)
def test_norms_and_gates(d):
    x, gate, weight = torch.randn(16, 3, d + 1)[..., :d], torch.randn(16, 3, d), torch.randn(d)
    groups = torch.randn(3, d)
    forms = {
        "rms": lambda s: rms_norm(x[s], weight, 1e-6),
        "l2": lambda s: l2_norm(x[s], 1e-6),
        "gated": lambda s: gated_rms_norm(x[s], gate[s], weight, 1e-6, invariant=True),
        "gated, torch": lambda s: torch_norm.gated_rms_norm(
            x[s], gate[s], weight, 1e-6, invariant=True
        ),
        "group": lambda s: group_rms_norm(x[s], gate[s], groups, 1e-6, invariant=True),
        "group, torch": lambda s: torch_norm.group_rms_norm(
            x[s], gate[s], groups, 1e-6, invariant=True
        ),
        "relu2": lambda s: relu2(x[s]),
        "steps": lambda s: step_gates(x[s], weight, weight, invariant=True)[0],
        "steps, torch": lambda s: torch_ops.step_gates(x[s], weight, weight)[1],
        "swiglu": lambda s: swiglu(gate[s], x[s], invariant=True),
        "swiglu, torch": lambda s: torch_ops.swiglu(gate[s], x[s]),
        "gates": lambda s: delta_gates(x[s], weight, weight, gate[s], invariant=True)[0],
        "beta": lambda s: delta_gates(x[s], weight, weight, gate[s], invariant=True)[1],
        "gates, torch": lambda s: torch_ops.delta_gates(x[s], weight, weight, gate[s])[0],
        "beta, torch": lambda s: torch_ops.delta_gates(x[s], weight, weight, gate[s])[1],
    }
    for name, form in forms.items():
        together = form(slice(None))
        for width in WIDTHS:
            part = slice(16 - width, 16)
            assert torch.equal(form(part), together[part]), name


@pytest.mark.parametrize(
    "run",
    [partial(causal_conv, invariant=True), partial(torch_conv.causal_conv, invariant=True)],
    ids=["op", "torch"],
)
@pytest.mark.parametrize("activate", [True, False])
@pytest.mark.parametrize("n_channels", [20, 64])
def test_conv(n_channels, activate, run):
    x, weight, window = (
        torch.randn(3, 16, n_channels),
        torch.randn(n_channels, 4),
        torch.randn(3, 3, n_channels),
    )
    options = {"bias": torch.randn(n_channels), "activate": activate}
    y, history = run(x, weight, window, **options)
    law, law_history = naive_conv.causal_conv(x, weight, window, **options)
    torch.testing.assert_close(y, law)
    assert torch.equal(history, law_history)
    for b in range(3):
        for t in range(16):
            before = history[b : b + 1, t : t + 3]
            one, _ = run(x[b : b + 1, t : t + 1], weight, before, **options)
            assert torch.equal(one[0, 0], y[b, t])


@pytest.mark.parametrize(
    "attend",
    [
        partial(attend, invariant=True),
        torch_attention.attend_invariant,
        WithDefaults(llvm_attention).attend_invariant,
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
                q[b : b + 1, t : t + 1],
                k[b : b + 1, :, :n],
                v[b : b + 1, :, :n],
                mask[b : b + 1, t : t + 1, :n],
            )
            assert torch.equal(alone[0, 0], o[b, t])


@pytest.mark.parametrize("mode", MODES)
def test_experts(mode):
    x, n_experts, d, f = torch.randn(16, 24), 6, 24, 20
    gate, up = torch.randn(2, n_experts, f, d)
    down = torch.randn(n_experts, d, f)
    pairs = [(torch.cat((g, u)), out) for g, u, out in zip(gate, up, down, strict=True)]
    weights, ids = route(torch.randn(16, n_experts), None, Choice(3, "softmax"))
    packed, law = (
        pack_experts(gate, up, down, mode),
        naive_moe.pack(gate, pairs, mode, levels=weight_levels()),
    )
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
    weights, ids = route(logits, None, Choice(n_used, "softmax"))
    for width in WIDTHS:
        some_weights, some_ids = route(logits[16 - width :], None, Choice(n_used, "softmax"))
        assert torch.equal(some_weights, weights[16 - width :])
        assert torch.equal(some_ids, ids[16 - width :])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("d", [8, 64])
@pytest.mark.parametrize(
    ("into", "logged", "fold"),
    [
        (
            partial(with_torch.gated_delta_into, invariant=True),
            partial(with_torch.gated_delta_log, invariant=True),
            partial(with_torch.fold, invariant=True),
        ),
        (with_llvm.gated_delta_into, with_llvm.gated_delta_log, with_llvm.fold),
        tuple(
            partial(form, invariant=True)
            for form in (delta_rule.gated_delta_into, delta_rule.gated_delta_log, delta_rule.fold)
        ),
    ],
    ids=["torch", "llvm", "public"],
)
def test_delta_rule(into, logged, fold, grouped, d):
    """All at once, token by token with states, and from logs folded at any point."""
    *rows, state = make(2, d, 9, 3, repeat=2, lowest_g=-2.0)
    law, _ = naive_delta.gated_delta_rule(*rows, state, grouped=grouped)
    slots = [torch.full_like(state, torch.nan) for _ in range(2)]
    o = into(*rows, state, grouped=grouped, slots=slots)
    assert nmse(o, law) < 1e-10
    also_o, log = logged(*rows, state, grouped=grouped)
    assert torch.equal(also_o, o)
    for b in range(3):
        at = state[b : b + 1].clone()
        states = []
        for t in range(9):
            one = [x[b : b + 1, t : t + 1] for x in rows]
            alone = into(*one, at, grouped=grouped, slots=[at])
            assert torch.equal(alone[0, 0], o[b, t])
            states.append(at[0].clone())
        assert torch.equal(slots[0][b], states[-1]) and torch.equal(slots[1][b], states[-2])
        for n in (1, 4, 9):
            assert torch.equal(fold(state, log, n, grouped=grouped)[b], states[n - 1])
        counts = torch.tensor([2, 7, 5])
        mixed = fold(state, log, counts, grouped=grouped)
        assert torch.equal(mixed[b], states[int(counts[b]) - 1])
    assert torch.equal(fold(state, log, 0, grouped=grouped), state)
