"""Dequantisation: the same bits as gguf-py for every type that gguf-py can decode."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear import block_parts, dequant
from kernels.linear.dequant import dequantise
from tests.support.random_blocks import random_blocks

COMMON = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
COMMON += ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
OTHERS = ["Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
OTHERS += ["TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
WITHOUT_DECODER = ["Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no one has written is NaN (or 0xAA), not whatever was there."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0xAA)

    monkeypatch.setattr(torch, "empty", poison)


def block_of(type_name: str) -> tuple[int, int]:
    """Elements and bytes per block."""
    elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return elements, n_bytes


def random_bytes(type_name: str, n_elements: int, seed: int = 42) -> np.ndarray:
    """Blocks of random bits: scales of every magnitude, infinite and NaN among them."""
    block, n_bytes = block_of(type_name)
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, n_elements // block * n_bytes, dtype=np.uint8)


def law(raw: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])


def assert_same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bit patterns; where both are NaN, sign and payload are the processor's business."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    a, b = found.numpy(), np.ascontiguousarray(expected)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    numbers = ~np.isnan(b)
    assert numbers.mean() > 0.5
    np.testing.assert_array_equal(a.view(np.uint32)[numbers], b.view(np.uint32)[numbers])


def test_the_types_are_those_of_gguf_py() -> None:
    assert set(dequant.DECODERS) == set(COMMON)
    assert set(dequant.OF_PARTS) < set(OTHERS)
    every = {type_.name for type_ in gguf.GGMLQuantizationType}
    assert every == {*COMMON, *OTHERS, *WITHOUT_DECODER}


@pytest.mark.parametrize("type_name", COMMON)
@pytest.mark.parametrize("n_more", [0, 1, 3])
def test_random_blocks_over_several_slices(type_name: str, n_more: int) -> None:
    n = 2 * dequant.SLICE_ELEMENTS + n_more * block_of(type_name)[0]
    raw = random_bytes(type_name, n, seed=n_more)
    assert_same_bits(dequantise(torch.from_numpy(raw), type_name, n), law(raw, type_name))


@pytest.mark.parametrize("type_name", COMMON + OTHERS)
@pytest.mark.parametrize("n_blocks", [1, 3, 17])
def test_few_blocks(type_name: str, n_blocks: int) -> None:
    n = n_blocks * block_of(type_name)[0]
    for seed in range(4):
        raw = random_bytes(type_name, n, seed)
        expected = law(raw, type_name)
        if np.isnan(expected).mean() < 0.5:
            assert_same_bits(dequantise(torch.from_numpy(raw), type_name, n), expected)


@pytest.mark.parametrize("type_name", dequant.OF_PARTS)
def test_types_that_only_a_gpu_decodes_here(type_name: str) -> None:
    """The same functions on the processor; the bits of scales are tame, to be numbers."""
    block, _ = block_of(type_name)
    raw = random_blocks(type_name, 16, 4 * block)
    out = torch.empty(64, block)
    dequant.OF_PARTS[type_name](raw.view(64, -1), out)
    assert_same_bits(out.flatten(), law(raw.flatten().numpy(), type_name))


@pytest.mark.parametrize("type_name", COMMON)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0x7C00])
def test_scales_at_the_edges_of_float16(type_name: str, scale: int) -> None:
    """Zeros of both signs, subnormals, one, the largest number, infinity."""
    block, n_bytes = block_of(type_name)
    raw = random_bytes(type_name, 64 * block).reshape(64, n_bytes)
    halves = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    if n_bytes > 4:
        for start in halves.get(type_name, [0]):
            raw[:, start : start + 2] = np.array([scale], "<u2").view(np.uint8)
    found = dequantise(torch.from_numpy(raw.reshape(-1)), type_name, 64 * block)
    expected = law(raw.reshape(-1), type_name)
    np.testing.assert_array_equal(np.isnan(found.numpy()), np.isnan(expected))
    numbers = ~np.isnan(expected)
    bits = found.numpy().view(np.uint32), expected.view(np.uint32)
    np.testing.assert_array_equal(bits[0][numbers], bits[1][numbers])


@pytest.mark.parametrize("type_name", OTHERS)
def test_other_types_over_several_slices(type_name: str) -> None:
    n = dequant.SLICE_ELEMENTS + 256
    raw = random_bytes(type_name, n)
    assert_same_bits(dequantise(torch.from_numpy(raw), type_name, n), law(raw, type_name))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "BF16"])
def test_the_naive_decoders_agree(type_name: str) -> None:
    block, n_bytes = block_of(type_name)
    raw = random_bytes(type_name, 8 * block)
    out = torch.empty(8, block)
    dequant.naive_decoder(type_name)(torch.from_numpy(raw).view(8, n_bytes), out)
    assert_same_bits(out.flatten(), law(raw, type_name))


def test_known_values() -> None:
    """Q8_0 and Q4_0 by hand: scale 0.5; the two's complement bytes; nibbles minus eight."""
    half = np.array([0.5], "<f2").view(np.uint8)
    q8 = np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    assert dequantise(torch.from_numpy(q8), "Q8_0", 32).tolist() == [i / 2 for i in range(-16, 16)]
    q4 = np.concatenate([half, np.full(16, 0xF0, np.uint8)])
    assert dequantise(torch.from_numpy(q4), "Q4_0", 32).tolist() == [-4.0] * 16 + [3.5] * 16


@pytest.mark.parametrize("type_name", WITHOUT_DECODER)
def test_types_without_a_decoder(type_name: str) -> None:
    block, n_bytes = block_of(type_name)
    with pytest.raises(NotImplementedError):
        dequantise(torch.zeros(n_bytes, dtype=torch.uint8), type_name, block)


@pytest.mark.parametrize(("n_bytes", "n_elements"), [(34, 31), (33, 32), (34, 64), (0, 32)])
def test_a_wrong_size_is_refused(n_bytes: int, n_elements: int) -> None:
    with pytest.raises(ValueError, match="Q8_0"):
        dequantise(torch.zeros(n_bytes, dtype=torch.uint8), "Q8_0", n_elements)


@pytest.mark.parametrize("type_name", COMMON)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_start_need_not_be_aligned(type_name: str, shift: int) -> None:
    n = 2 * block_of(type_name)[0]
    raw = random_bytes(type_name, n, seed=7)
    padded = torch.from_numpy(np.concatenate([np.zeros(shift, np.uint8), raw]))
    found, expected = dequantise(padded[shift:], type_name, n), law(raw, type_name)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_the_result_has_its_own_memory() -> None:
    raw = torch.ones(4, dtype=torch.float32).view(torch.uint8)
    found = dequantise(raw, "F32", 4)
    raw.zero_()
    assert found.tolist() == [1.0] * 4


class LargestOperation(TorchDispatchMode):
    """Notes the number of elements of the largest operation that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            # joining copies its inputs one by one
            parts = args[0] if func.overloadpacket in JOINS else [result]
            self.n_elements = max(self.n_elements, *(part.numel() for part in parts))
        return result


JOINS = (torch.ops.aten.cat, torch.ops.aten.stack)


@pytest.mark.parametrize("type_name", COMMON)
def test_no_operation_is_large_enough_for_several_threads(type_name: str) -> None:
    block, n_bytes = block_of(type_name)
    n = dequant.SLICE_ELEMENTS // block
    blocks, out = torch.zeros(n, n_bytes, dtype=torch.uint8), torch.zeros(n, block)
    with LargestOperation() as largest:
        dequant.DECODERS[type_name](blocks, out)
    assert 0 < largest.n_elements <= block_parts.GRAIN
