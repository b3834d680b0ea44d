"""Router and experts."""

from __future__ import annotations

import weakref

import pytest
import torch

from kernels import moe
from kernels.linear import integers
from kernels.linear import naive as linear_law
from kernels.linear import with_torch as linear_op
from kernels.linear.blocks import pack_blocks, stack_weights
from kernels.linear.dequant import dequantise
from kernels.linear.packed import MODES
from kernels.moe import Choice
from tests.support.closeness import nmse
from tests.support.implementations import implementations
from tests.support.random_blocks import random_blocks

naive, with_torch = implementations(moe, "naive", "with_torch")

ROUTES = pytest.mark.parametrize("ops", [naive, with_torch, moe], ids=["naive", "torch", "op"])
IMPLEMENTATIONS = pytest.mark.parametrize("ops", [naive, with_torch], ids=["naive", "torch"])
F32 = 1e-12
# measured against f32 on random matrices: 2.3e-5 and 5e-4
BOUNDS = {"f32": F32, "bf16": 1e-4, "int8": 2e-3, "int8x2": 1e-3, "q8": 2e-3}


def make(n_rows=5, n_experts=6, n_used=2, d=8, f=12):
    weights, ids = naive.route(torch.randn(n_rows, n_experts), None, Choice(n_used, "softmax"))
    gate, up = torch.randn(2, n_experts, f, d)
    return torch.randn(n_rows, d), weights, ids, gate, up, torch.randn(n_experts, d, f)


def pack(ops, gate, up, down, mode="f32"):
    """By the law, with weights of as many levels as this processor's products have."""
    pairs = [(torch.cat(pair), d) for *pair, d in zip(gate, up, down, strict=True)]
    levels = {"levels": integers.weight_levels()} if ops is naive else {}
    return ops.pack(gate, pairs, mode, **levels)


def dense(x, weights, ids, gate, up, down):
    """All experts for all rows in f64, those that were not chosen with weight 0."""
    every = torch.zeros(x.shape[0], gate.shape[0]).scatter(1, ids, weights).double()
    opened = torch.einsum("nd,efd->nef", x.double(), gate.double())
    hidden = torch.nn.functional.silu(opened) * torch.einsum("nd,efd->nef", x.double(), up.double())
    return torch.einsum("ne,nef,edf->nd", every, hidden, down.double())


@ROUTES
def test_route_by_hand(ops):
    logits = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, 3.0, 1.0, 2.0]]).log()
    weights, ids = ops.route(logits, None, Choice(2, "softmax"))
    assert ids.tolist() == [[3, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [4 / 7, 3 / 7]]))


@ROUTES
@pytest.mark.parametrize("n_used", [1, 3, 16])
def test_route_renormalises_the_largest_probabilities(ops, n_used):
    logits = torch.randn(9, 16) * 4
    weights, ids = ops.route(logits, None, Choice(n_used, "softmax"))
    assert weights.shape == ids.shape == (9, n_used)
    p = logits.double().softmax(-1)
    largest = p.sort(-1, descending=True).values[:, :n_used]
    torch.testing.assert_close(p.gather(1, ids), largest)
    assert nmse(weights, largest / largest.sum(-1, keepdim=True)) < F32


@ROUTES
@pytest.mark.parametrize("n_experts", [6, 64, 300])
def test_of_equal_experts_the_lower_id_comes_first(ops, n_experts):
    logits = torch.zeros(3, n_experts)
    logits[1, 4] = 1
    logits[2, [1, 3]] = -1
    _, ids = ops.route(logits, None, Choice(4, "softmax"))
    assert ids.tolist() == [[0, 1, 2, 3], [4, 0, 1, 2], [0, 2, 4, 5]]


@ROUTES
def test_a_vanishing_sum_is_not_blown_up(ops):
    n_experts = 20000
    logits = torch.zeros(1, n_experts)
    logits[0, 7] = 1e-3
    weights, ids = ops.route(logits, None, Choice(1, "softmax"))
    assert ids.item() == 7
    assert weights.item() == pytest.approx(1.001 / n_experts * 2**14, rel=1e-3)


@ROUTES
def test_route_survives_extreme_logits(ops):
    weights, ids = ops.route(torch.tensor([[9999.0, -1e4, 1e4, 0.0]]), None, Choice(2, "softmax"))
    assert ids.tolist() == [[2, 0]]
    odds = torch.tensor([[1.0, -1.0]]).sigmoid()
    torch.testing.assert_close(weights, odds)


@IMPLEMENTATIONS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_rows", [1, 2, 33])
@pytest.mark.parametrize("n_used", [1, 2, 6])
def test_experts_are_near_the_dense_sum(ops, mode, n_rows, n_used):
    x, weights, ids, *matrices = make(n_rows, n_used=n_used, d=64, f=96)
    packed = pack(ops, *matrices, mode)
    y = ops.experts(x, weights, ids, packed)
    assert y.dtype == torch.float32
    error = nmse(y, dense(x, weights, ids, *matrices))
    assert error < BOUNDS[mode]
    assert mode == "f32" or error > F32
    assert (packed.mode, packed.shape) == (mode, (6, 96, 64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_rows", [1, 7])
def test_torch_is_near_the_law(mode, n_rows):
    x, weights, ids, *matrices = make(n_rows, d=64, f=96)
    law = naive.experts(x, weights, ids, pack(naive, *matrices, mode))
    y = with_torch.experts(x, weights, ids, pack(with_torch, *matrices, mode))
    # a result at the border between two whole numbers may fall on either side
    bound = {
        "f32": F32,
        "bf16": 5e-5 if linear_op.has_bf16() else 1e-5,
        "int8": 1e-4,
        "int8x2": 1e-5,
    }[mode]
    assert nmse(y, law) < bound


@pytest.mark.parametrize("mode", MODES)
def test_the_public_names_do_the_same(mode):
    x, weights, ids, *matrices = make(9)
    packed = moe.pack_experts(*matrices, mode)
    expected = with_torch.experts(x, weights, ids, pack(with_torch, *matrices, mode))
    assert torch.equal(moe.experts(x, weights, ids, packed), expected)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_of_all_matrices(mode):
    *_, gate, up, down = make(n_experts=3, d=32, f=48)
    packed = moe.pack_experts(gate, up, down, mode)
    parts = [(torch.cat((gate[e], up[e])), down[e]) for e in range(3)]
    expected = sum(linear_op.pack(part, mode).n_bytes for pair in parts for part in pair)
    assert packed.n_bytes == expected
    if mode == "int8":
        assert packed.n_bytes == 3 * (3 * 48 * 32 + 4 * (2 * 48 + 32))


def test_experts_are_taken_one_at_a_time():
    alive: list[weakref.ref[torch.Tensor]] = []

    def matrices(*shape):
        for _ in range(5):
            # of 15 matrices those of the first, the last and the next expert may be in hand
            assert sum(ref() is not None for ref in alive) <= 8
            matrix = torch.randn(shape)
            alive.append(weakref.ref(matrix))
            yield matrix

    packed = moe.pack_experts(matrices(6, 4), matrices(6, 4), matrices(4, 6), "int8")
    assert packed.shape == (5, 6, 4)


@IMPLEMENTATIONS
@pytest.mark.parametrize("mode", MODES)
def test_experts_nobody_chose_are_not_read(ops, mode):
    x, weights, ids, gate, up, down = make(n_experts=8)
    ids = ids % 3
    expected = ops.experts(x, weights, ids, pack(ops, gate, up, down, mode))
    packed = pack(ops, gate, up, down, mode)
    packed.data[3:] = [None] * 5
    assert torch.equal(ops.experts(x, weights, ids, packed), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_depend_on_its_neighbours(mode):
    """With int8 to the bit, whatever the width."""
    x, weights, ids, *matrices = make(n_rows=21, n_experts=12, n_used=4, d=64, f=40)
    packed = pack(with_torch, *matrices, mode)
    together = with_torch.experts(x, weights, ids, packed)
    backwards = with_torch.experts(x.flip(0), weights.flip(0), ids.flip(0), packed).flip(0)
    alike = torch.equal if mode == "int8" else lambda a, b: nmse(a, b) < 1e-5
    assert alike(backwards, together)
    for width in (1, 2, 3, 5, 8, 16):
        for start in range(0, 22 - width, 3):
            part = slice(start, start + width)
            alone = with_torch.experts(x[part], weights[part], ids[part], packed)
            assert alike(alone, together[part])


@pytest.mark.parametrize("missing", ["has_vnni", "has_fbgemm", "has_bf16"])
def test_without_the_instructions_of_this_processor(missing, monkeypatch):
    if missing == "has_bf16":
        monkeypatch.setattr(linear_op, "has_bf16", lambda: False)
    else:
        monkeypatch.setattr(integers, "has_vnni", lambda: False)
    if missing == "has_fbgemm":
        monkeypatch.setattr(integers, "has_fbgemm", lambda: False)
    mode = "bf16" if missing == "has_bf16" else "int8"
    x, weights, ids, *matrices = make(7, d=32, f=48)
    y = with_torch.experts(x, weights, ids, pack(with_torch, *matrices, mode))
    law = naive.experts(x, weights, ids, pack(naive, *matrices, mode))
    assert nmse(y, law) < 1e-5


def test_the_law_in_the_modes_is_that_of_the_products():
    """One expert, one row: three products of kernels.linear and silu between them."""
    x, _, _, gate, up, down = make(1, 1, 1)
    one, first = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    levels = integers.weight_levels()
    for mode in MODES:
        opened, factor = (
            linear_law.linear(x, linear_law.pack(part[0], mode, levels)) for part in (gate, up)
        )
        hidden = torch.nn.functional.silu(opened) * factor
        expected = linear_law.linear(hidden, linear_law.pack(down[0], mode, levels))
        y = naive.experts(x, one, first, pack(naive, gate, up, down, mode))
        assert nmse(y, expected) < F32


def test_other_modes_and_unequal_numbers_are_refused():
    *_, gate, up, down = make()
    with pytest.raises(ValueError, match="'f16' is not one of f32, bf16, int8"):
        moe.pack_experts(gate, up, down, "f16")
    with pytest.raises(ValueError, match="shorter"):
        moe.pack_experts(gate, up, down[:-1], "f32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nothing_waits_for_the_gpu():
    """Neither routing nor the products: the host may go on, and a CUDA graph can hold them."""
    x, logits = torch.randn(5, 64, device="cuda"), torch.randn(5, 6, device="cuda")
    packed = moe.pack_experts(*(part.cuda() for part in make(d=64, f=32)[3:]), "bf16")
    expected = moe.experts(x, *moe.route(logits, None, Choice(2, "softmax")), packed)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = moe.experts(x, *moe.route(logits, None, Choice(2, "softmax")), packed)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("mode", ["blocks", "bf16", "q8"])
@pytest.mark.parametrize("ops", [naive, with_torch, moe], ids=["naive", "torch", "op"])
@pytest.mark.parametrize("n_rows", [1, 40])
def test_experts_that_stay_in_their_blocks(mode, ops, n_rows):
    """Down in another type than gate and up, which of one expert are of two types themselves."""
    kinds, shapes = ("Q4_K", "Q6_K", "Q8_0"), ((256, 512), (256, 512), (512, 256))
    x, weights, ids, *_ = make(n_rows, n_experts=3, d=512)
    x = 1e-3 * x  # so that half precision holds the scales of what becomes of it
    blocks = [
        [random_blocks(kind, *shape, seed=10 * e + i) for e in range(3)]
        for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]
    packed = moe.put_together(
        (
            (
                stack_weights([pack_blocks(gate, kinds[0], mode), pack_blocks(up, kinds[1], mode)]),
                pack_blocks(down, kinds[2], mode),
            )
            for gate, up, down in zip(*blocks, strict=True)
        ),
        mode,
    )
    matrices = [
        torch.stack([dequantise(part.flatten(), kind, 256 * 512).view(shape) for part in parts])
        for parts, kind, shape in zip(blocks, kinds, shapes, strict=True)
    ]
    exact = dense(x, weights, ids, *matrices)
    assert nmse(ops.experts(x, weights, ids, packed), exact) < BOUNDS.get(mode, F32)
    assert (packed.mode, packed.shape) == (mode, (3, 256, 512))
    assert packed.n_bytes == sum(part.numel() for parts in blocks for part in parts)
    again = moe.experts(x, weights, ids, packed, invariant=True)
    assert nmse(again, exact) < BOUNDS.get(mode, F32)
    last = slice(n_rows - 1, n_rows)
    alone = moe.experts(x[last], weights[last], ids[last], packed, invariant=True)
    assert torch.equal(alone, again[last])
