"""glm5-next: layers that go by another's choice of pools, its gates, what is refused."""

from __future__ import annotations

import pytest
import torch

import engine.model.mixers.attention as mixers
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.families import read_config
from engine.model.info import describe
from engine.model.loader import load_model
from tests.support.golden_files import golden_file
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.rewrite_gguf import DROP

TWO_LAYERS, MTP = "glm5-next-a-f32", "glm5-next-b-mtp-f32"


def _logits(model, tokens):
    return model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits


@pytest.mark.parametrize("are_kept", [False, True], ids=["without tensors", "with idle ones"])
def test_a_layer_goes_by_the_choice_of_the_one_before(
    are_kept, golden, reference, variant, monkeypatch
):
    """Layers 1 and 3 attend. The same by hand: layer 3 is given what layer 1 chose."""
    if not golden_file(f"{TWO_LAYERS}.gguf").exists():
        pytest.skip("the golden file is not here")

    def without(tensors):
        for name in [name for name in tensors if name.startswith("blk.3.indexer")]:
            del tensors[name]

    keys = {"{arch}.attention.indexer.types": [True, True, True, False]}
    with GgufFile.open(variant(TWO_LAYERS, keys, None if are_kept else without)) as file:
        told = []
        model = load_model(file, progress=lambda done, total, _: told.append(done == total))
    assert told[-1]
    tokens = reference(TWO_LAYERS)["tokens"][:60].tolist()
    choose, chosen = mixers.choose_pools, []

    def first(*given, **how):
        chosen.append(choose(*given, **how))
        return chosen[0]

    monkeypatch.setattr(mixers, "choose_pools", first)
    wanted = _logits(golden(TWO_LAYERS), tokens)
    assert len(chosen) == 2
    assert not torch.equal(*chosen)
    monkeypatch.undo()
    torch.testing.assert_close(_logits(model, tokens), wanted, rtol=0, atol=0)


def test_a_limit_given_once_holds_for_all_layers_and_for_the_shared_expert(golden, variant):
    limit = {"{arch}.swiglu_clamp_exp": 2.0, "{arch}.swiglu_clamp_shexp": DROP}
    with GgufFile.open(variant(MTP, limit)) as file:
        assert read_config(file).blocks == golden(MTP).config.blocks
    with GgufFile.open(variant(MTP, {**limit, "{arch}.swiglu_clamp_shexp": 0.0})) as file:
        blocks = read_config(file).blocks
    assert blocks[0].ffn.gating is None
    assert blocks[1].ffn.shared_gating is None
    assert blocks[1].ffn.gating == ("clamped_swiglu", (2.0,))


def test_gates_without_keys(variant):
    """Scores are sigmoids; the decay has no bound."""
    keys = {"{arch}.kda.gate_lower_bound": DROP, "{arch}.attention.layer_norm_epsilon": DROP}
    with GgufFile.open(variant(MTP, keys)) as file:
        config = read_config(file)
    assert config.blocks[0].mixers[0].bound is None
    assert config.blocks[1].mixers[0].index_eps == 0.0
    assert config.blocks[1].ffn.router.scores == "sigmoid"
    with GgufFile.open(variant(MTP, {"{arch}.expert_gating_func": 1})) as file:
        assert read_config(file).blocks[1].ffn.router.scores == "softmax"


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"attention.indexer.types": [True, False, True]}, ModelFileError, "llama.cpp aborts"),
        ({"attention.indexer.types": [True]}, ModelFileError, "not 3 flags"),
        ({"attention.indexer.kpool_select_tail": False}, UnsupportedModelError, "is NaN"),
        ({"attention.indexer.kpool": 1}, ModelFileError, "outside 2"),
        ({"attention.indexer.top_k": 26}, ModelFileError, "pools of 4"),
        ({"attention.indexer.key_length": 1 << 40}, ModelFileError, "key_length"),
        ({"attention.layer_norm_epsilon": -1.0}, ModelFileError, "not an epsilon"),
        ({"attention.q_lora_rank": DROP}, ModelFileError, "q_lora_rank"),
        ({"attention.head_count_kv": [0, 1, 0, 0]}, ModelFileError, "does not attend"),
        ({"rope.dimension_count": 8}, UnsupportedModelError, "no positions"),
        ({"hyper_connection.count": 2}, UnsupportedModelError, "with 4"),
        ({"hyper_connection.sinkhorn_iterations": 1 << 30}, ModelFileError, "outside 1"),
        ({"hyper_connection.epsilon": 2.0}, ModelFileError, "not an epsilon"),
        ({"swiglu_clamp_exp": [2.0]}, ModelFileError, "not 4 numbers"),
        ({"swiglu_clamp_shexp": -1.0}, ModelFileError, "a limit"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_file_and_place(keys, error, words, variant):
    path = variant(MTP, {f"{{arch}}.{key}": value for key, value in keys.items()})
    with GgufFile.open(path) as file, pytest.raises(error, match=words) as caught:
        read_config(file)
    assert path.name in str(caught.value)
    assert caught.value.remedy


def test_without_an_output_matrix(variant):
    def tied(tensors):
        del tensors["output.weight"]

    with (
        GgufFile.open(variant(MTP, edit=tied)) as file,
        pytest.raises(UnsupportedModelError, match="output matrix of their own"),
    ):
        read_config(file)


def test_what_llama_cpp_does_with_the_mtp_block_is_said():
    with GgufFile.open(golden_file(f"{MTP}.gguf")) as file:
        assert "no graph for the MTP block" in describe(file).llama_cpp
