"""Every (row, expert) pair in one program, against each expert's own product bit by bit."""

from __future__ import annotations

import pytest
import torch

from kernels import moe
from kernels.dispatch import uses_llvm
from kernels.linear.blocks import pack_blocks, stack_weights
from kernels.linear.integer_blocks import TYPES, integer_linear
from kernels.linear.packed import BlockData, PackedWeight
from kernels.moe import Choice, experts, route
from kernels.moe.packed import RELU2, SWIGLU, Activation, PackedExperts, find_places, put_together
from tests.support.closeness import nmse
from tests.support.implementations import Implementation
from tests.support.random_blocks import random_blocks

naive = Implementation(moe, "naive")

pytestmark = pytest.mark.skipif(not uses_llvm(), reason="LLVM is not in use")

N_EXPERTS = 5


def q8(type: str, n_out: int, n_in: int, seed: int) -> PackedWeight:
    blocks = random_blocks(type, n_out, n_in, seed=seed)
    return PackedWeight("q8", (n_out, n_in), blocks.numel(), BlockData(blocks, type))


def stacked(parts: list[PackedWeight]) -> PackedWeight:
    rows, n_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return PackedWeight("parts", (rows, n_in), 0, tuple(parts))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.thinned(8)
def test_pairs_have_the_bits_of_each_experts_product(type: str) -> None:
    """Rows that share an expert, and experts that no one chose; 70 rows: one task is short."""
    from kernels.moe.with_llvm import multiply_pairs

    experts = [q8(type, 70, 256, seed) for seed in range(N_EXPERTS)]
    places = find_places(experts)
    assert places is not None
    x = torch.randn(6, 256)
    ids = torch.tensor([[3, 0], [3, 1], [0, 3], [1, 0], [2, 3], [1, 3]])
    y = multiply_pairs(x, ids, places)
    assert y.shape == (6, 2, 70)
    for i, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            expected = integer_linear(x[i : i + 1], experts[e].data.bytes, type)[0]
            assert torch.equal(y[i, j], expected)


def test_two_parts_lie_one_below_the_other() -> None:
    from kernels.moe.with_llvm import multiply_pairs

    halves = [[q8("Q4_K", 66, 512, 10 * e + i) for i in range(2)] for e in range(N_EXPERTS)]
    places = find_places([stacked(parts) for parts in halves])
    assert places is not None and places.n_parts == 2
    x, ids = torch.randn(1, 512), torch.tensor([[4, 2, 0]])
    y = multiply_pairs(x, ids, places)
    for j, e in enumerate(ids[0].tolist()):
        both = [integer_linear(x, part.data.bytes, "Q4_K")[0] for part in halves[e]]
        assert torch.equal(y[0, j], torch.cat(both))


def test_unlike_matrices_have_no_places() -> None:
    same = [q8("Q4_K", 8, 256, e) for e in range(2)]
    assert find_places(same) is not None
    assert find_places([*same, q8("Q6_K", 8, 256, 2)]) is None
    assert find_places([*same, q8("Q4_K", 9, 256, 2)]) is None
    unlike = stacked([q8("Q4_K", 8, 256, 0), q8("Q6_K", 8, 256, 1)])
    assert find_places([unlike, unlike]) is None
    assert find_places([PackedWeight("blocks", (8, 256), 0, same[0].data)]) is None
    assert find_places([PackedWeight("f32", (8, 256), 0, torch.zeros(8, 256))]) is None


def layer(n_experts: int, activation: Activation) -> PackedExperts:
    pairs = []
    for e in range(n_experts):
        gate, up, down = (
            pack_blocks(random_blocks(type, *shape, seed=3 * e + i), type, "q8")
            for i, (type, shape) in enumerate(
                (("Q4_K", (256, 512)), ("Q4_K", (256, 512)), ("Q6_K", (512, 256)))
            )
        )
        pairs.append((stack_weights([gate, up] if activation.gated else [up]), down))
    return put_together(pairs, "q8", activation)


@pytest.mark.parametrize("activation", [SWIGLU, RELU2], ids=lambda kind: kind.name)
@pytest.mark.thinned(4)
def test_experts_have_the_same_bits_at_every_width(activation: Activation) -> None:
    """In pairs, and grouped by expert; with and without neighbours."""
    packed = layer(4, activation)
    assert packed.places is not None
    x = torch.randn(40, 512)
    weights, ids = route(torch.randn(40, 4), None, Choice(2, "softmax"))
    together = experts(x, weights, ids, packed)
    law = naive.experts(x[:3], weights[:3], ids[:3], packed)
    assert nmse(together[:3], law) < 1e-12
    for width in (1, 2, 8, 16, 17):
        for start in (0, 40 - width):
            part = slice(start, start + width)
            for invariant in (False, True):
                alone = experts(x[part], weights[part], ids[part], packed, invariant=invariant)
                assert torch.equal(alone, together[part])


@pytest.mark.parametrize("d", [5, 16, 48, 100])
def test_results_add_up_in_the_order_of_the_choices(d: int) -> None:
    from kernels.moe.with_llvm import combine

    lines, weights = torch.randn(3, 4, d) * 1e4, torch.rand(3, 4)
    expected = torch.zeros(3, d)
    for j in range(4):
        expected = expected + weights[:, j : j + 1] * lines[:, j]
    assert torch.equal(combine(lines, weights), expected)
