"""Scales of matrices, as llama.cpp's converter writes them for NVFP4: s * W, whatever W is."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.model.families import read_config
from engine.model.info import describe
from engine.model.loader import load_model
from engine.model.tensors import check_tensors
from tests.support.golden_files import golden_file
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.shared_cases import case

MOE = "qwen35moe-d-v2x-mtp-f32"
MODELS = [MOE, "bailingmoe3-a-mtp-f32", "nemotron_h_moe-b-mtp-f32"]
TOKENS = [5, 17, 230, 41, 3, 99]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def _load(path, **options):
    with GgufFile.open(path) as file:
        model, info = load_model(file, **options), describe(file)
    assert model.weight_bytes == info.loaded_bytes[model.compute]
    return model


def _logits(model):
    """Of the trunk and of its MTP head."""
    out = model.forward(ubatch_of(TOKENS), NaiveMemory.for_model(model.config))
    return out.logits, model.head.forward(ubatch_of(TOKENS), out.hidden, NaiveMemory()).logits


def _equal(ours, theirs):
    for one, other in zip(_logits(ours), _logits(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _scale(name):
    return name.removesuffix("weight") + "scale"


def _scales(tensors, part=""):
    """A scale for every matrix with `part` in its name, for experts one each."""
    rng = np.random.default_rng(1)
    return {
        name: rng.uniform(0.5, 1.5, data.shape[0] if "_exps" in name else 1).astype(np.float32)
        for name, data in tensors.items()
        if name.endswith(".weight") and data.ndim > 1 and part in name
    }


def _multiply(tensors, scales):
    for name, scale in scales.items():
        tensors[name] = tensors[name] * scale.reshape((-1,) + (1,) * (tensors[name].ndim - 1))


@pytest.mark.parametrize("name", MODELS)
def test_a_scale_is_a_factor_of_its_matrix(name, variant):
    def with_scales(tensors):
        for weight, scale in _scales(tensors).items():
            tensors[_scale(weight)] = scale
            tensors[_scale(weight).replace("scale", "input_scale")] = 9 * scale

    def multiplied(tensors):
        _multiply(tensors, _scales(tensors))

    ours = variant(name, edit=with_scales, to="scales")
    _equal(_load(ours), _load(variant(name, edit=multiplied, to="multiplied")))


def _in_q8_0():
    """The matrices of the feed-forward layers, as blocks."""
    with GgufFile.open(golden_file(f"{MOE}.gguf")) as file:
        return {
            name: Q8_0
            for name, info in file.tensors.items()
            if "ffn_" in name and len(info.shape) > 1 and info.shape[-1] % 32 == 0
        }


@pytest.mark.parametrize("mode", ["blocks", "bf16", "int8"])
def test_blocks_with_a_scale_are_expanded(mode, variant):
    types = _in_q8_0()

    def with_scales(tensors):
        tensors.update({_scale(name): scale for name, scale in _scales(tensors, "ffn_").items()})

    def decoded(tensors):
        for name in types:
            stored = gguf.quants.quantize(tensors[name], Q8_0)
            tensors[name] = gguf.quants.dequantize(stored, Q8_0)
        _multiply(tensors, _scales(tensors, "ffn_"))

    ours = variant(MOE, edit=with_scales, quantise=types, to="scales")
    theirs = variant(MOE, edit=decoded, to="decoded")
    _equal(_load(ours, compute=mode), _load(theirs, compute=mode))


def test_in_mode_q8_blocks_stay_and_results_are_multiplied(variant):
    """By powers of two, which the blocks' own scales could hold as well."""
    types = _in_q8_0()

    def powers(tensors):
        return {
            name: np.exp2(np.round(6 * scale - 6)).astype(np.float32)
            for name, scale in _scales(tensors, "ffn_").items()
            if name in types
        }

    def with_scales(tensors):
        tensors.update({_scale(name): scale for name, scale in powers(tensors).items()})

    def multiplied(tensors):
        _multiply(tensors, powers(tensors))

    ours, theirs = (
        _load(variant(MOE, edit=edit, quantise=types, to=edit.__name__), compute="q8")
        for edit in (with_scales, multiplied)
    )
    _equal(ours, theirs)
    assert 0 < ours.weight_bytes - theirs.weight_bytes < 0.02 * theirs.weight_bytes


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("blk.0.ffn_up_exps.scale", np.ones(2, np.float32), "2 of F32 where 1 or"),
        ("blk.0.attn_gate.scale", np.ones(4, np.float32), "4 of F32 where 1 of F32 are needed"),
        ("blk.0.attn_gate.scale", np.ones(1, np.float16), "1 of F16 where 1 of F32"),
        ("output.input_scale", np.ones(3, np.float32), "3 of F32"),
    ],
)
def test_a_scale_of_another_shape_or_type_is_refused(name, value, words, variant):
    path = variant(MOE, edit=lambda tensors: tensors.update({name: value}))
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=words) as caught:
        check_tensors(file, read_config(file))
    assert caught.value.place == f"tensor {name}"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused(value, variant):
    scale = {"blk.0.attn_gate.scale": np.full(1, value, np.float32)}
    path = variant(MOE, edit=lambda tensors: tensors.update(scale))
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match="not finite"):
        load_model(file)


def test_llama_cpps_logits_with_a_scale_on_every_kind_of_weight():
    folder = case("02-nvfp4-scale-tensors")
    with np.load(folder / "scales-moe-f32-llama.cpp.npz") as arrays:
        tokens, wanted = arrays["tokens"].tolist(), arrays["logits"]
    model = _load(folder / "scales-moe-f32.gguf")
    out = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config))
    np.testing.assert_allclose(out.logits.numpy(), wanted, rtol=0, atol=1e-3)


def test_llama_cpps_logits_of_nvfp4_with_scales():
    """llama.cpp rounds the other side of a product to 8 bits: with its rounding the logits are its
    own but for the order of sums, without it they are as far off as rounding makes them."""
    folder = case("02-nvfp4-scale-tensors")
    with np.load(folder / "nvfp4-scales-llama.cpp.npz") as arrays:
        tokens, wanted = arrays["tokens"].tolist(), arrays["logits"]
    for rounds, most in ((False, 2e-3), (True, 1e-4)):
        model = _load(folder / "nvfp4-scales.gguf", compute="q8", as_llama_cpp=rounds)
        out = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config))
        error = np.square(out.logits.numpy() - wanted).mean()
        assert error < most * np.square(wanted).mean()
