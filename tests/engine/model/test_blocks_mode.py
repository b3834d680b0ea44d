"""Matrices left in GGUF blocks, against the same model in f32 and llama.cpp's logits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import OptionError
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model import loader
from engine.model.loader import load_model, resolve_compute
from engine.model.mixers.recurrent import _qkv_and_z
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.weights import MatrixRows, Weights
from kernels.linear import integer_blocks, linear
from kernels.linear.blocks import stays_in_blocks
from kernels.linear.dequant import dequantise
from kernels.moe import experts
from tests.support.closeness import nmse
from tests.support.golden_in_blocks import distance
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.random_blocks import random_blocks

ROOT = Path(__file__).parents[3]
QUANTISED = ("qwen35-h-v2x-mtp-q8_0", "qwen35-g-v2x-q4_k_m")
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("name", QUANTISED)
def test_logits_are_those_of_the_expanded_weights(name):
    assert distance(name, torch.device("cpu"), [20, 3, 1]) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTISED)
def test_logits_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; the interpreter runs the kernels")
    # all the large matrices of these files are in blocks, so that nothing is rounded to bf16
    assert distance(name, CUDA, [20, 3, 1]) < 1e-3


def test_logits_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.golden_in_blocks", QUANTISED[0], "cpu", "2"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "DRAFTSCOPE_KERNELS": "triton"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout) < 1e-4


@pytest.mark.parametrize("type", ["IQ3_S", "NVFP4"])
def test_a_model_of_a_processors_types_is_multiplied_as_the_law_has_it(type, tmp_path, monkeypatch):
    path, tokens = tmp_path / "tiny.gguf", list(range(3, 23))
    write_random_model(path, size="tiny", quant=type.lower())
    with GgufFile.open(path) as file:
        in_blocks = [t for t in file.tensors.values() if t.type.name == type]
        model = load_model(file, compute="q8")
    assert in_blocks and stays_in_blocks(type, "q8", torch.device("cpu"))
    assert not stays_in_blocks(type, "q8", CUDA), "a GPU has no such product"
    logits = []
    for run in (integer_blocks._run, integer_blocks.integer_linear_naive):
        monkeypatch.setattr(integer_blocks, "_run", run)
        memory = NaiveMemory.for_model(model.config)
        logits.append(model.forward(ubatch_of(tokens), memory).logits)
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


def test_the_matrices_take_what_the_file_takes(golden_path):
    with GgufFile.open(golden_path(QUANTISED[0])) as file:
        blocks, wide = (load_model(file, compute=mode) for mode in ("blocks", "f32"))
        sizes = {t.type.name: 0 for t in file.tensors.values()}
        for tensor in file.tensors.values():
            sizes[tensor.type.name] += tensor.n_bytes
    assert blocks.compute == "blocks"
    # next to them the embedding as f32, and beta and decay, which stay f32 in every narrow mode
    assert blocks.weight_bytes < 0.6 * wide.weight_bytes
    assert blocks.weight_bytes > sizes["Q8_0"]


class _Reader:
    """Tensors of random Q8_0 blocks."""

    def __init__(self, shapes):
        self.released = []
        self.blocks = {
            name: random_blocks("Q8_0", math.prod(shape[:-1]), shape[-1], seed=i)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def type(self, name):
        return "Q8_0"

    def is_scaled(self, name):
        return False

    def scale(self, name):
        return None

    def take_blocks(self, name, shape):
        return self.blocks[name].unflatten(0, shape[:-1])

    def settle(self, names, joined):
        return joined

    def release(self, names):
        self.released.extend(names)

    def take_each(self, name, shape):
        for blocks in self.take_blocks(name, shape):
            yield dequantise(blocks.flatten(), "Q8_0", shape[1] * shape[2]).view(shape[1:])

    def take(self, name, shape):
        n_out, n_in = shape
        return dequantise(self.blocks[name].flatten(), "Q8_0", n_out * n_in).view(n_out, n_in)


def test_rows_are_rearranged_as_blocks():
    """The legacy tensor of qwen3next groups rows by key head: blocks move as numbers do."""
    ssm = DeltaNetPart(4, 8, 2, 4, grouped=True, joint_gates=True)
    shapes = {"ssm_in.weight": (ssm.conv_dim + ssm.value_dim, 64)}
    reader, x = _Reader(shapes), torch.randn(3, 64)
    got, wanted = (
        (weights := Weights(reader, shapes, mode)).stack(_qkv_and_z(weights, ssm)).packed
        for mode in ("blocks", "f32")
    )
    assert (got.mode, got.shape) == ("blocks", wanted.shape)
    assert nmse(linear(x, got), linear(x, wanted)) < 1e-12
    untouched = linear(x, Weights(reader, shapes, "f32").project("ssm_in.weight").packed)
    assert not torch.equal(linear(x, wanted), untouched)


def test_rows_are_copied_only_where_they_do_not_lie_together():
    shapes = {"a": (32, 64), "b": (32, 64)}
    reader, x = _Reader(shapes), torch.randn(3, 64)
    whole = torch.cat([reader.blocks["a"], reader.blocks["b"]])
    apart = Weights(reader, shapes, "blocks").project("a", "b").packed.data.bytes
    assert reader.released and set(reader.released) == {"a", "b"}
    reader.blocks = dict(zip("ab", whole.split(32), strict=True))
    reader.released.clear()
    weights = Weights(reader, shapes, "blocks")
    together = weights.project("a", "b").packed
    assert together.data.bytes.data_ptr() == whole.data_ptr() and not reader.released
    assert torch.equal(together.data.bytes, whole) and torch.equal(apart, whole)
    turned = weights.project("b", "a").packed
    assert turned.data.bytes.data_ptr() != whole.data_ptr()
    assert torch.equal(linear(x, turned), linear(x, together).roll(32, 1))
    one = weights.project("a").packed.data.bytes
    assert one.data_ptr() == whole.data_ptr() and len(one) == 32


def test_a_tensor_is_given_back_once_all_of_its_rows_are_copied():
    reader = _Reader({"a": (32, 64)})
    weights = Weights(reader, {"a": (32, 64)}, "blocks")
    first, second, third, last = weights.rows("a").rearranged(lambda data: data.split(8))
    between = MatrixRows(torch.randn(8, 64))
    weights.stack([first, third])
    weights.stack([first, third, between, second])
    weights.stack([last, first, between, second, third])  # these two lie where they were read
    assert not reader.released
    weights.stack([first, third, between, second, last])
    assert reader.released == ["a"]


@pytest.mark.parametrize("fused", [False, True])
def test_experts_stay_in_their_blocks(fused):
    n, width, d = 4, 32, 64
    openers = {"gate_up": 2 * width} if fused else {"gate": width, "up": width}
    shapes = {f"ffn_{name}_exps.weight": (n, rows, d) for name, rows in openers.items()}
    shapes["ffn_down_exps.weight"] = (n, d, width)
    reader = _Reader(shapes)
    weights = {mode: Weights(reader, shapes, mode) for mode in ("blocks", "bf16", "q8", "f32")}
    packed = {mode: each.experts() for mode, each in weights.items()}
    x, chosen = torch.randn(5, d), torch.randint(0, n, (5, 1))
    share = torch.ones(5, 1)
    exact = experts(x, share, chosen, packed["f32"])
    for mode, bound in (("blocks", 1e-12), ("bf16", 1e-4), ("q8", 1e-3)):
        assert packed[mode].mode == mode
        assert nmse(experts(x, share, chosen, packed[mode]), exact) < bound
        assert weights[mode].n_bytes == n * 3 * width * d * 34 // 32


def test_neighbours_of_one_type_become_one_matrix():
    weights = Weights(_Reader({}), {}, "blocks")
    q8, q4 = (MatrixRows(random_blocks(kind, 5, 64), kind) for kind in ("Q8_0", "Q4_0"))
    numbers = MatrixRows(torch.randn(2, 64))
    packed = weights.stack([q8, q8, q4, numbers, q8]).packed
    assert [(part.mode, part.shape) for part in packed.data] == [
        ("blocks", (10, 64)),
        ("blocks", (5, 64)),
        ("f32", (2, 64)),
        ("blocks", (5, 64)),
    ]
    x = torch.randn(4, 64)
    whole = torch.cat(
        [
            dequantise(part.data.flatten(), part.type, 5 * 64).view(5, 64)
            if part.type
            else part.data
            for part in (q8, q8, q4, numbers, q8)
        ]
    )
    torch.testing.assert_close(linear(x, packed), x @ whole.T, rtol=1e-5, atol=1e-3)
    assert weights.n_bytes == 15 * 68 + 5 * 36 + 4 * 128


@pytest.mark.parametrize(
    ("name", "n_params", "types", "mode"),
    [
        ("auto", 10, {"F32", "Q4_K"}, "blocks"),
        ("auto", 10, {"F32", "IQ4_XS"}, "f32"),
        ("auto", 10**9, {"BF16"}, "bf16"),
        ("f32", 10**9, {"Q4_K"}, "f32"),
        ("bf16", 10, {"Q4_K"}, "bf16"),
        ("blocks", 10, {"F32"}, "blocks"),
        ("q8", 10, {"Q8_0"}, "q8"),
    ],
)
def test_modes_on_cuda(name, n_params, types, mode):
    assert resolve_compute(name, n_params, CUDA, types) == mode


def test_int8_is_refused_on_cuda():
    with pytest.raises(OptionError, match=r"int8 works only on the CPU.*cuda:0.*Use q8, blocks"):
        resolve_compute("int8", 10, CUDA, {"Q8_0"})


@pytest.mark.parametrize(
    ("bf16", "n_params", "types", "mode"),
    [
        (True, 10, {"F32"}, "f32"),
        (True, 10, {"F32", "Q4_K"}, "blocks"),
        (True, 10**9, {"Q4_K"}, "q8"),
        (False, 10**9, {"F32", "IQ4_XS"}, "q8"),
        (True, 10**9, {"F32", "F16"}, "bf16"),
        (False, 10**9, {"F32", "F16", "NVFP4"}, "q8"),
    ],
)
@pytest.mark.parametrize("llvm", [True, False])
def test_auto_on_the_processor(monkeypatch, bf16, n_params, types, mode, llvm):
    features = {"avx2", "avx512f", "avx512bf16"} if bf16 else {"avx2"}
    monkeypatch.setattr(loader, "has_feature", features.__contains__)
    monkeypatch.setattr(loader, "uses_llvm", lambda: llvm)
    if mode in ("q8", "blocks") and not llvm:
        mode = "bf16" if bf16 and n_params > 10 else "f32"
    assert resolve_compute("auto", n_params, types=types) == mode
