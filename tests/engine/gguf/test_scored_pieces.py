"""Vocabularies with scores: ids are those of llama.cpp 0c1e57098, byte for byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf.metadata import TypedMetadata
from engine.gguf.tokenizer import Tokenizer
from tests.support.scored_vocabularies import keys, texts

# of the ids that llama_tokenize gave for 1,500 texts, as JSON
DIGESTS = {
    "llama": "bed5cc50cd39281c1e975b2b39deaffb8ee66fac1553e3e3caeef1644aae4935",
    "plamo2": "146b9b0e2788847e16307b8997f9e66c2f6d785076fef3091b690bb42251db3b",
}


def build(model: str, **changes) -> Tokenizer:
    found = keys(model) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    types = {"scores": "f4", "token_type": "i4"}
    for key, dtype in types.items():
        found[f"tokenizer.ggml.{key}"] = np.array(found[f"tokenizer.ggml.{key}"], dtype)
    return Tokenizer.from_gguf(TypedMetadata(Path("x.gguf"), found))


@pytest.mark.parametrize("model", DIGESTS)
def test_ids_are_those_of_llama_cpp(model):
    tokenizer = build(model)
    ids = [tokenizer.encode(text) for text in texts(1500)]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == DIGESTS[model]


@pytest.mark.parametrize("model", DIGESTS)
def test_ids_become_the_text_again(model):
    tokenizer = build(model, add_space_prefix=False)
    for text in texts(200, 5):
        if any(odd in text for odd in ("\ufeff", "\u2581", "<")):
            continue  # these are dropped, read as a space, and hidden
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_space_goes_in_front_and_after_special_tokens():
    tokenizer = build("llama")
    assert tokenizer.decode(tokenizer.encode("and<s>and the")) == " and and the"
    assert build("plamo2").decode(build("plamo2").encode("and<s>and")) == "andand"


def test_special_tokens_have_llama_cpps_defaults():
    tokenizer = build("llama")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert not build("plamo2").add_bos


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": [0.0]}, "1 scores for"),
        ({"tokens": ["a"]}, "no token for byte 0x00"),
        ({"token_type": [1]}, "1 types for"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_a_sentence(changes, named):
    with pytest.raises(ModelFileError, match=named):
        build("plamo2", **changes)
