"""Products with GGUF blocks: against gguf-py's weights."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels.linear import block_linear as op
from kernels.linear.block_linear import with_llvm
from kernels.linear.block_linear.operands_with_llvm import Arithmetic, has_terms
from kernels.linear.block_linear.rows_with_llvm import takes_groups
from kernels.processor import has_feature
from tests.support.closeness import nmse
from tests.support.implementations import implementations
from tests.support.random_blocks import random_blocks

naive, with_torch = implementations(op, "naive", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "run",
    [naive.block_linear, with_torch.block_linear, with_llvm.block_linear, op.block_linear],
    ids=["naive", "torch", "llvm", "op"],
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("type_name", op.TYPES)
@pytest.mark.parametrize("leading", [(1,), (2, 3)])
def test_products_with_gguf_weights(run, type_name, leading):
    blocks, x = random_blocks(type_name, 7, 512), torch.randn(*leading, 512)
    weight = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])
    y = run(x, blocks, type_name)
    assert y.shape == (*leading, 7)
    assert nmse(y, x.double() @ torch.from_numpy(weight).double().T) < 1e-12
    half = run(x.to(torch.bfloat16), blocks, type_name)
    assert half.dtype == torch.float32
    assert torch.equal(half, run(x.to(torch.bfloat16).float(), blocks, type_name))


@IMPLEMENTATIONS
@pytest.mark.parametrize("type_name", op.TYPES)
@pytest.mark.parametrize("n_rows", [1, 5, 20])
@pytest.mark.parametrize("n_out", [3, 40])
def test_rounded_products(run, type_name, n_rows, n_out):
    blocks, x = random_blocks(type_name, n_out, 256), torch.randn(n_rows, 256)
    weight = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])
    exact = torch.from_numpy(weight).double()
    y = run(x, blocks, type_name, rounded=True)
    in_terms = has_terms(type_name) and has_feature("avx512bf16") and (n_rows <= 8 or n_out < 32)
    if in_terms and run in (with_llvm.block_linear, op.block_linear):
        assert nmse(y, x.bfloat16().double() @ exact.T) < 1e-12
    else:
        assert nmse(y, x.bfloat16().double() @ exact.bfloat16().double().T) < 1e-12


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_rows", [1, 3, 20])
@pytest.mark.parametrize("n_out", [5, 70])
def test_plain_numbers(run, n_rows, n_out):
    weight, x = torch.randn(n_out, 96), torch.randn(n_rows, 96)
    y = run(x, weight.view(torch.uint8), "F32")
    assert nmse(y, x.double() @ weight.double().T) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 3, 8, 9, 20])
@pytest.mark.parametrize("n_out", [8, 70])
def test_numbers_of_16_bits_have_the_bits_of_f32(dtype, n_rows, n_out):
    weight, x = torch.randn(n_out, 96).to(dtype), torch.randn(n_rows, 96)
    type_name = "F16" if dtype == torch.float16 else "BF16"
    for invariant in (False, True):
        y = op.block_linear(x, weight.view(torch.uint8), type_name, invariant=invariant)
        plain = op.block_linear(x, weight.float().view(torch.uint8), "F32", invariant=invariant)
        assert torch.equal(y, plain)


# around the number of rows of a call, of a panel, of three panels; of a tile of weights
@pytest.mark.parametrize("n_rows", [1, 7, 8, 9, 16, 17, 47, 48, 49, 100])
@pytest.mark.parametrize("n_out", [1, 31, 32, 33, 100, 513])
@pytest.mark.parametrize("rounded", [False, True])
def test_llvm_at_every_edge(n_rows, n_out, rounded):
    blocks, x = random_blocks("Q8_0", n_out, 96), torch.randn(n_rows, 3, 96)[:, 1]
    y = with_llvm.block_linear(x, blocks, "Q8_0", rounded=rounded)
    assert nmse(y, naive.block_linear(x, blocks, "Q8_0", rounded=rounded)) < 1e-12


@pytest.mark.parametrize("type_name", ["Q8_0", "F32"])
@pytest.mark.parametrize("n_rows", [1, 2, 4, 5])
def test_short_weight_rows_have_the_same_bits_in_groups_of_four(type_name, n_rows):
    """Seven of eight rows are no whole groups, and are multiplied one by one."""
    weight, x = torch.randn(8, 160), torch.randn(n_rows, 160)
    weight[3] = 0
    x[:, 7] = -x[:, 7].abs()
    blocks = random_blocks("Q8_0", 8, 160) if type_name == "Q8_0" else weight.view(torch.uint8)
    how = Arithmetic(rounded=False, fused=False)
    four_fit = n_rows == 1 or (n_rows <= 4 and has_feature("avx512f"))
    assert takes_groups(type_name, n_rows, how, 8, blocks.shape[1]) == four_fit
    whole = with_llvm.block_linear(x, blocks, type_name)
    part = with_llvm.block_linear(x, blocks[:7], type_name)
    assert torch.equal(whole[:, :7].view(torch.int32), part.view(torch.int32))


def test_rows_longer_than_a_stack_has_room_for():
    blocks, x = random_blocks("Q4_0", 40, 1 << 19), torch.randn(10, 1 << 19)
    for invariant in (False, True):
        y = with_llvm.block_linear(x, blocks, "Q4_0", invariant=invariant)
        assert nmse(y, naive.block_linear(x, blocks, "Q4_0")) < 1e-10


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.thinned(4)
def test_processors_with_and_without_products_in_bfloat16(monkeypatch, fused):
    """Without them, rounded numbers are multiplied in f32."""
    if fused and not has_feature("avx512bf16"):
        pytest.skip("this processor has none")
    how = Arithmetic(rounded=True, fused=fused)
    monkeypatch.setattr(with_llvm, "arithmetic", lambda *, rounded: how)
    for type_name in ("Q8_0", "Q4_K"):
        blocks = random_blocks(type_name, 64, 512)
        for n_rows in (2, 20):
            x = torch.randn(n_rows, 512)
            y = with_llvm.block_linear(x, blocks, type_name, rounded=True)
            weights_too = type_name == "Q8_0" or n_rows > 8 or not fused
            inputs = x if weights_too else x.bfloat16().float()
            law = naive.block_linear(inputs, blocks, type_name, rounded=weights_too)
            assert nmse(y, law) < 1e-12


@pytest.mark.parametrize(
    "run", [with_torch.block_linear, with_llvm.block_linear], ids=["torch", "llvm"]
)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("n_out", [20, 70])
def test_invariant_rows_have_the_same_bits_in_any_company(run, rounded, n_out):
    blocks, x = random_blocks("Q6_K", n_out, 256), torch.randn(60, 256)
    together = run(x, blocks, "Q6_K", rounded=rounded, invariant=True)
    for start, stop in ((0, 1), (3, 5), (7, 16), (10, 27), (11, 60)):
        part = run(x[start:stop], blocks, "Q6_K", rounded=rounded, invariant=True)
        assert torch.equal(part, together[start:stop])
    assert torch.equal(
        run(x.flip(0), blocks, "Q6_K", rounded=rounded, invariant=True), together.flip(0)
    )


@pytest.mark.parametrize("type_name", ["Q5_0", "IQ4_XS"])
def test_other_types_are_refused(type_name):
    with pytest.raises(ValueError, match=f"{type_name}, only with Q8_0, Q4_0"):
        op.block_linear(torch.ones(1, 32), torch.zeros(1, 22, dtype=torch.uint8), type_name)


@pytest.mark.parametrize(("n_in", "n_bytes"), [(64, 34), (64, 102), (64, 69), (63, 68)])
def test_rows_of_another_length_are_refused(n_in, n_bytes):
    blocks = torch.zeros(3, n_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{n_bytes} bytes are no row of {n_in} Q8_0"):
        op.block_linear(torch.ones(1, n_in), blocks, "Q8_0")
