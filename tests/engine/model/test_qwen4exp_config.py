"""Metadata of qwen4exp files: a sound configuration or a named error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families import read_config
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.parts.trunks import HyperConnections
from engine.model.tensors import check_tensors
from tests.support.rewrite_gguf import DROP

NAME = "qwen4exp-b-qsa-f32"


def check(path) -> ModelConfig:
    with GgufFile.open(path) as file:
        config = read_config(file)
        check_tensors(file, config)
        return config


def test_what_a_file_says(golden_path):
    config = check(golden_path(NAME))
    trunk, first, last = config.trunk, config.blocks[0], config.blocks[3]
    assert isinstance(trunk, HyperConnections)
    assert (trunk.n_streams, trunk.rank) == (4, 12)
    assert first.before == trunk.ngrams
    assert list(first.states()) == ["tokens", "ngrams", "state", "window"]
    assert first.states()["ngrams"].shape == (9, 256)
    assert first.states()["tokens"].shape == (2, 1)
    assert isinstance(first.mixers[0], DeltaNetPart)
    assert first.mixers[0].sigmoid_gate
    assert (first.kind, last.kind) == ("delta net", "sparse attention")
    assert (last.mixers[0].ratio, last.mixers[0].n_blocks) == (4, 2)
    assert config.output_norm is None


BAD: dict[str, list[Any]] = {
    "hyper_connection.count": [0, 1, 65, DROP],
    "hyper_connection.low_rank": [0, -1, 13, DROP],
    "attention.indexer.head_count": [0, 2**31, DROP],
    "attention.indexer.key_length": [0, 15, DROP],
    "attention.indexer.top_k": [0, -8, DROP],
    "attention.compress_ratios": [[0, 0, 4], [0, 0, 0, -4]],
    "embedding_length_per_layer_input": [0, 15, 2**31, DROP],
    "ple.layers": [[3], [-1], [4]],
    "ple.ngram_size": [1, 9, 4, DROP],
    "ple.heads_per_ngram": [0, 3, 33, DROP],
    "ple.conv_kernel": [0, 1, 40, 5, DROP],
    "ple.eos_token_id": [-1, 384, DROP],
    "ple.layer_multipliers": [[1, 2], DROP],
    "ple.head_vocab_sizes": [
        [97, 101, 103],
        [97, 101, 0, 107],
        [97, 101, 103, 116],
        [97, 101, 103, 2**62],
    ],
    "ple.head_offsets": [[0, 97, 198, 310], [0, 97]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD.items() for value in values], ids=str
)
def test_impossible_values_are_named(variant, key, value):
    with pytest.raises(ModelFileError) as caught:
        check(variant(NAME, {f"qwen4exp.{key}": value}))
    assert len(caught.value.message) < 250


def test_a_second_layer_of_ngrams_is_refused(variant):
    with pytest.raises(UnsupportedModelError, match="2 layers"):
        check(variant(NAME, {"qwen4exp.ple.layers": [0, 1]}))


def test_ngrams_and_ratios_may_be_absent(variant):
    def without(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".ple_" in name or name.startswith("per_layer")]:
            del tensors[name]

    keys = {"qwen4exp.ple.layers": DROP, "qwen4exp.attention.compress_ratios": DROP}
    config = check(variant(NAME, keys, without))
    assert config.blocks[0].before is None
    assert config.blocks[3].kind == "attention"
