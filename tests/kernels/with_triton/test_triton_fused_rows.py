"""Products that share a launch, what is done to their results in it, and norms that round rows for
the products that read them: the bits of the operations one after the other."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import counters
from kernels.linear.block_parts import PreparedRows, Residual, quantise
from kernels.linear.blocks import pack_blocks, stack_weights
from kernels.linear.integer_blocks import with_triton
from kernels.linear.integer_blocks.rows_with_triton import (
    MOST_NORMED,
    integer_rows,
    norm_after,
    operation_rows,
)
from kernels.linear.integer_blocks.with_triton import (
    integer_linear,
    opened,
    products,
    products_of_columns,
)
from kernels.linear.packed import PackedWeight
from kernels.norm import with_triton as norm
from kernels.pointwise import naive as pointwise_law
from kernels.pointwise import with_triton as pointwise
from tests.support.closeness import nmse
from tests.support.random_blocks import random_blocks

# a block of zeros has no factor: numpy, in which the interpreter counts, says so
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("few_programs"),
]
N_IN = 512


def blocks(type_name: str, n_out: int, device: str) -> PackedWeight:
    return pack_blocks(random_blocks(type_name, n_out, N_IN).to(device), type_name, "q8")


def numbers(n_out: int, device: str) -> PackedWeight:
    data = torch.randn(n_out, N_IN, device=device)
    return PackedWeight("f32", (n_out, N_IN), data.nbytes, data)


def rows(n: int, device: str) -> torch.Tensor:
    """Columns of a wider matrix of NaN."""
    wide = torch.full((n, N_IN + 9), torch.nan)
    wide[:, 4 : 4 + N_IN] = torch.randn(n, N_IN)
    return wide.to(device)[:, 4 : 4 + N_IN]


@pytest.mark.parametrize("n_rows", [1, 9])
def test_matrices_of_several_types_are_one_launch(device, n_rows):
    """Long and short blocks, two kinds of sums, and numbers, into one row with a residual."""
    x, types = rows(n_rows, device), ["Q4_K", "Q6_K", "Q8_0", "Q2_K", "Q4_0"]
    parts = [blocks(name, 5 + i, device) for i, name in enumerate(types)]
    plain = numbers(3, device)
    residual = torch.randn(n_rows, 40, device=device)[:, 2 : 2 + 38]
    (y,) = products(x, [stack_weights([*parts, plain])], residual=Residual(residual))
    apart = [integer_linear(x, one.data.bytes, one.data.type) for one in parts]
    wanted = residual + torch.cat([*apart, x @ plain.data.T], 1)
    assert y.shape == (n_rows, 38)
    assert torch.equal(y[:, :35], wanted[:, :35])
    law = residual[:, 35:].double() + x.double() @ plain.data.double().T
    assert nmse(y[:, 35:].cpu(), law.cpu()) < 1e-12
    one, other = products(x, [parts[0], plain])
    assert torch.equal(one, apart[0])
    assert nmse(other.cpu(), (x.double() @ plain.data.double().T).cpu()) < 1e-12


def test_a_row_has_the_bits_it_has_alone(device):
    x, weights = rows(11, device), [blocks("Q4_K", 6, device), numbers(5, device)]
    whole = products(x, weights, invariant=True)
    gated = opened(x, weights[0], "swiglu", (), invariant=True)
    for i in (0, 6, 10):
        alone = products(x[i : i + 1], weights, invariant=True)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))
        assert torch.equal(opened(x[i : i + 1], weights[0], "swiglu", ())[0], gated[i])


@pytest.mark.parametrize(
    ("name", "constants", "types"),
    [
        ("swiglu", (), ("Q4_K",)),
        ("swiglu", (0.5,), ("Q8_0",)),
        ("clamped_swiglu", (0.5,), ("Q4_K", "Q6_K")),
        ("situ", (4.0, 25.0), ("Q5_K", "Q8_0")),
        ("geglu", (), ("Q4_K", "Q6_K")),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_rows", [1, 5])
@pytest.mark.thinned(6)
def test_a_gate_is_opened_where_it_is_made(device, n_rows, name, constants, types):
    x, width = rows(n_rows, device) / 8, 7
    packed = stack_weights(
        [blocks(type_name, 2 * width // len(types), device) for type_name in types]
    )
    y = opened(x, packed, name, constants)
    gate, up = products(x, [packed])[0].chunk(2, -1)
    assert torch.equal(
        y, getattr(pointwise, name)(gate, up, *constants or ((None,) if name == "swiglu" else ()))
    )


def test_what_has_no_place_in_the_launch_is_left(device):
    x = rows(3, device)
    assert products(x, [numbers(1025, device)]) is None
    assert products(x, [PackedWeight("bf16", (4, N_IN), 0, torch.zeros(4, N_IN))]) is None
    assert products(rows(65, device), [blocks("Q8_0", 4, device)]) is None
    odd = stack_weights([blocks("Q8_0", 3, device), blocks("Q4_K", 5, device)])
    assert opened(x, odd, "swiglu", ()) is None


def assert_integers(given: PreparedRows) -> None:
    """Those of the numbers."""
    flat = given.numbers.reshape(-1, given.shape[-1])
    apart = integer_rows(flat, list(given.integers))
    for part, made in given.integers.items():
        law = quantise(flat.cpu(), long=bool(part))
        assert torch.equal(made.integers.cpu().long(), law.integers.flatten(1))
        assert torch.equal(made.scales.cpu(), law.scales)
        assert all(torch.equal(a, b) for a, b in zip(made, apart[part], strict=True))


READS = [("Q4_K", "Q8_0", "Q2_K"), ("Q6_K",), ("Q8_0",)]


@pytest.mark.parametrize("types", READS, ids=str)
@pytest.mark.parametrize("n_rows", [1, 4])
@pytest.mark.thinned(6)
def test_rows_are_normed_and_rounded(device, n_rows, types):
    x, weight = rows(n_rows, device), torch.randn(N_IN, device=device)
    reads = [blocks(name, 4, device) for name in types]
    y = norm.rms_norm_rows(x.unsqueeze(0), weight, 1e-6, reads)
    assert isinstance(y, PreparedRows)
    assert torch.equal(y.numbers[0], norm.rms_norm(x, weight, 1e-6))
    assert_integers(y)
    assert torch.equal(products(y, reads[:1])[0][0], products(y.numbers, reads[:1])[0][0])
    assert isinstance(norm.rms_norm_rows(x, weight, 1e-6, [numbers(4, device)]), torch.Tensor)


@pytest.mark.parametrize("types", READS, ids=str)
@pytest.mark.parametrize(
    ("n_heads", "d"), [(4, 128), (32, 16), (2, 256), (1, 512), (128, 4), (8, 96), (3, 256)], ids=str
)
@pytest.mark.thinned(12)
def test_heads_are_gated_and_rounded(device, n_heads, d, types):
    """Heads of a power of two fill blocks together; others are rounded in a launch of their own.
    The gate is columns of something wider."""
    n_in = n_heads * d
    x = torch.randn(2, 3, n_heads, d, device=device)
    gate = torch.randn(2, 3, n_in + 5, device=device)[..., 3:-2].view(2, 3, n_heads, d)
    weights = torch.randn(n_heads, d, device=device)
    reads = [pack_blocks(random_blocks(name, 4, n_in).to(device), name, "q8") for name in types]
    for y, wanted in (
        (
            norm.gated_rms_norm_rows(x, gate, weights[0], 1e-6, sigmoid=True, reads=reads),
            norm.gated_rms_norm(x, gate.contiguous(), weights[0], 1e-6, sigmoid=True),
        ),
        (
            norm.group_rms_norm_rows(x, gate, weights, 1e-6, reads=reads),
            norm.group_rms_norm(x, gate.contiguous(), weights, 1e-6),
        ),
    ):
        assert isinstance(y, PreparedRows)
        assert torch.equal(y.numbers, wanted.flatten(2))
        assert_integers(y)


@pytest.mark.parametrize("types", READS, ids=str)
@pytest.mark.parametrize("name", ["output_gate", "multiply", "swiglu", "relu2"])
@pytest.mark.thinned(8)
def test_operations_are_rounded(device, name, types):
    x, other = rows(3, device), rows(3, device)
    operands = (x,) if name == "relu2" else (x, other)
    y = operation_rows(name, operands, [blocks(type_name, 4, device) for type_name in types])
    assert isinstance(y, PreparedRows)
    law = getattr(pointwise_law, name)(*(each.cpu().double() for each in operands))
    torch.testing.assert_close(y.numbers.cpu().double(), law, rtol=1e-6, atol=1e-30)
    assert_integers(y)
    assert operation_rows(name, operands, [numbers(4, device)]) is None


@pytest.mark.parametrize(
    ("n_rows", "width", "types"), [(1, 256, READS[0]), (3, 256, READS[1]), (1, 512, READS[2])]
)
@pytest.mark.thinned(6)
def test_the_last_of_a_group_of_programs_rounds_it(device, n_rows, width, types, monkeypatch):
    """Also a second time: counters are zeros again."""
    if device == "cpu":
        # a program for each column takes the interpreter 20 s
        monkeypatch.setattr(with_triton, "columns_of", lambda *_: 16)
    x, packed = rows(n_rows, device), blocks("Q8_0", 2 * width, device)
    reads = [pack_blocks(random_blocks(name, 4, width).to(device), name, "q8") for name in types]
    wanted = opened(x, packed, "swiglu", ())
    for _ in range(2):
        y = opened(x, packed, "swiglu", (), reads=reads)
        assert isinstance(y, PreparedRows)
        assert torch.equal(y.numbers, wanted)
        assert_integers(y)
        assert not counters(x.device).any()


@pytest.mark.parametrize(
    ("n_rows", "d", "closing", "types", "invariant"),
    [
        (1, 256, ["Q4_K"], READS[0], False),
        (3, 256, ["Q6_K", "Q8_0"], READS[1], True),
        (4, 96, ["Q4_0"], READS[2], False),
        (1, 576, ["Q5_0"], READS[2], True),
        (2, 72, ["IQ4_XS"], (), False),
    ],
    ids=str,
)
@pytest.mark.thinned(4)
def test_the_last_program_norms_the_sum(device, n_rows, d, closing, types, invariant, monkeypatch):
    """Also a second time: the counter is zero again."""
    if device == "cpu":
        monkeypatch.setattr(with_triton, "columns_of", lambda *_: 32)
    x, before = rows(n_rows, device), torch.randn(1, n_rows, d, device=device)
    packed = stack_weights([blocks(name, d // len(closing), device) for name in closing])
    reads = [pack_blocks(random_blocks(name, 4, d).to(device), name, "q8") for name in types]
    given = torch.randn(d, device=device), 1e-6, reads
    (wanted,) = products(x, [packed], residual=Residual(before), invariant=invariant)
    for _ in range(2):
        residual = Residual(before, given)
        (y,) = products(x, [packed], residual=residual, invariant=invariant)
        assert torch.equal(y, wanted)
        normed, alone = residual.normed, norm.rms_norm_rows(y, *given)
        assert normed is not None and normed.shape == before.shape
        assert isinstance(normed, PreparedRows) == isinstance(alone, PreparedRows) == bool(types)
        if isinstance(normed, PreparedRows) and isinstance(alone, PreparedRows):
            assert_integers(normed)
            normed, alone = normed.numbers, alone.numbers
        assert torch.equal(normed, alone.view(normed.shape))
        assert not counters(x.device).any()


def test_many_rows_are_normed_by_a_launch_of_their_own(device):
    then = torch.ones(MOST_NORMED // 3, device=device), 1e-6, ()
    for n_rows, is_alone in ((3, False), (4, True)):
        residual = Residual(torch.empty(n_rows, len(then[0]), device="meta"), then)
        found = norm_after(residual, n_rows, MOST_NORMED // len(then[0]))
        assert (found is None) == (residual.normed is None) == is_alone


@pytest.mark.parametrize(
    ("n_rows", "width", "types"),
    [(1, 64, ("Q4_0", "Q8_0")), (3, 96, ("Q5_1",)), (2, 256, ("Q4_K", "Q2_K"))],
    ids=str,
)
@pytest.mark.thinned(4)
def test_columns_of_results_are_rounded_where_they_are_made(
    device, n_rows, width, types, monkeypatch
):
    """The bits of products one after the other, of two types side by side, whose rows lie apart."""
    if device == "cpu":
        monkeypatch.setattr(with_triton, "columns_of", lambda *_: 32)
    x, first = rows(n_rows, device), blocks("Q8_0", 3 * width + 5, device)
    more = [pack_blocks(random_blocks(name, 6, width).to(device), name, "q8") for name in types]
    columns = [(5 + i * (width + width // 2), matrix) for i, matrix in enumerate(more)]
    gates = numbers(3, device)
    wanted = products(x, [first, gates])
    apart = [
        integer_linear(wanted[0][:, at : at + width], one.data.bytes, one.data.type)
        for at, one in columns
    ]
    for _ in range(2):
        found = products_of_columns(x, [first, gates], columns)
        assert found is not None
        assert all(map(torch.equal, found[0], wanted))
        assert all(map(torch.equal, found[1], apart))
        assert not counters(x.device).any()


def test_columns_that_have_no_place_in_the_launch_are_left(device):
    x, first = rows(1, device), blocks("Q8_0", 96, device)
    wide, narrow = (
        pack_blocks(random_blocks("Q8_0", 4, n).to(device), "Q8_0", "q8") for n in (64, 32)
    )
    assert products_of_columns(x, [first], [(0, wide), (64, narrow)]) is None
    assert products_of_columns(rows(65, device), [first], [(0, wide)]) is None
    plain = PackedWeight("f32", (4, 64), 0, torch.ones(4, 64, device=device))
    assert products_of_columns(x, [first], [(0, plain)]) is None
