"""Models that round as llama.cpp does: against its recorded logits, and expert by expert."""

from __future__ import annotations

import math

import pytest
import torch

from engine.batch import Span
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from engine.model.weights import Weights
from kernels.linear.block_parts import round_rows
from kernels.linear.dequant import dequantise
from kernels.moe import experts
from kernels.pointwise import swiglu
from tests.support.closeness import nmse
from tests.support.golden_runs import DATA, golden
from tests.support.random_blocks import random_blocks


def errors(model: HybridModel, name: str) -> torch.Tensor:
    """NMSE at every position against the logits that llama.cpp gave."""
    tokens = golden(name)["tokens"].tolist()
    memory = HybridMemory.for_model(model.config, 1, len(tokens), torch.device("cpu"))
    span = Span(0, 0, tokens, range(len(tokens)))
    (ubatch,) = memory.split([span], 512, "equal")
    expected = torch.from_numpy(golden(name)["logits"]).double()
    apart = model.forward(ubatch, memory).logits.double() - expected
    return apart.square().mean(1) / expected.square().mean(1)


@pytest.mark.parametrize("name", ["qwen35-h-v2x-mtp-q8_0", "qwen35-g-v2x-q4_k_m"])
def test_only_tipped_roundings_are_between_q8_and_llama_cpp(name: str) -> None:
    """Sums in another order round a number to another integer here and there; the states keep it.
    Where they have not, logits agree as well as sums of f32 can."""
    with GgufFile.open(DATA / f"{name}.gguf") as file:
        exact = errors(load_model(file, compute="blocks"), name)
        rounded = errors(load_model(file, compute="q8", as_llama_cpp=True), name)
    assert exact.min() > 1e-5
    assert rounded.min() < 1e-11
    assert rounded.mean() < exact.mean() / 4


def test_a_float_file_is_not_rounded() -> None:
    name = "qwen35-b-v2x-tied-f32"
    with GgufFile.open(DATA / f"{name}.gguf") as file:
        exact, rounded = (load_model(file, compute="q8", as_llama_cpp=yes) for yes in (False, True))
    assert torch.equal(errors(exact, name), errors(rounded, name))
    assert errors(exact, name).mean() < 1e-9


class _Reader:
    """Experts whose matrices are of two types."""

    def __init__(self, types: dict[str, str], shapes: dict[str, tuple[int, int, int]]) -> None:
        self.types = types
        self.blocks = {
            name: random_blocks(types[name], math.prod(shape[:-1]), shape[-1], seed=i)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def type(self, name):
        return self.types[name]

    def is_scaled(self, name):
        return False

    def scale(self, name):
        return None

    def take_blocks(self, name, shape):
        return self.blocks[name].unflatten(0, shape[:-1])

    def take_each(self, name, shape):
        for blocks in self.take_blocks(name, shape):
            numbers = dequantise(blocks.flatten(), self.types[name], shape[1] * shape[2])
            yield numbers.view(shape[1:])


@pytest.mark.parametrize("mode", ["f32", "q8"])
@pytest.mark.parametrize("invariant", [False, True])
def test_experts_round_for_the_type_of_each_matrix(mode: str, invariant: bool) -> None:
    n, width, d = 4, 32, 256
    sizes = {"gate": (n, width, d), "up": (n, width, d), "down": (n, d, width)}
    shapes = {f"ffn_{name}_exps.weight": shape for name, shape in sizes.items()}
    names = list(shapes)
    types = dict(zip(names, ("Q4_K", "Q8_0", "Q4_0"), strict=True))
    reader = _Reader(types, shapes)
    packed = Weights(reader, shapes, mode, as_llama_cpp=True).experts()
    generator = torch.Generator().manual_seed(3)
    x = 1e-3 * torch.randn(6, d, generator=generator)  # half precision holds what becomes of it
    ids = torch.randint(0, n, (6, 2), generator=generator)
    share = torch.rand(6, 2, generator=generator)
    found = experts(x, share, ids, packed, invariant=invariant)

    gate, up, down = (list(reader.take_each(name, shapes[name])) for name in names)
    expected = torch.zeros(6, d)
    for i, row in enumerate(x.unsqueeze(1)):
        for weight, e in zip(share[i].tolist(), ids[i].tolist(), strict=True):
            opened = swiglu(round_rows(row, "Q4_K") @ gate[e].T, round_rows(row, "Q8_0") @ up[e].T)
            expected[i] += weight * (round_rows(opened, "Q4_0") @ down[e].T)[0]
    assert nmse(found, expected) < 1e-7
    exact = Weights(reader, shapes, "f32").experts()
    assert nmse(experts(x, share, ids, exact, invariant=invariant), expected) > 1e-6
