"""The MTP head against llama.cpp, and the forms in which its tensors come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from tests.support.golden_files import second_set, with_mtp
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.rewrite_gguf import DROP

MODELS = [
    "qwen35-c-v2x-mtp-f32",
    "qwen35-h-v2x-mtp-q8_0",
    "qwen35moe-d-v2x-mtp-f32",
    *with_mtp(second_set()),
]
DENSE = "qwen35-c-v2x-mtp-f32"
BLOCK = "blk.4."


def _shifted(model: HybridModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Trunk hidden states h_p, and those of the position before, zeros at 0."""
    memory = NaiveMemory.for_model(model.config)
    hidden = model.forward(ubatch_of(tokens, outputs=[]), memory).hidden
    return hidden, torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)


def _load(path) -> HybridModel:
    with GgufFile.open(path) as file:
        return load_model(file)


def _head_logits(model: HybridModel, tokens: list[int]) -> torch.Tensor:
    _, before = _shifted(model, tokens)
    memory = NaiveMemory.for_head(model.config)
    return model.head.forward(ubatch_of(tokens), before, memory).logits


@pytest.mark.parametrize("name", MODELS)
def test_all_positions(name, golden, reference):
    arrays, model = reference(name), golden(name)
    tokens = arrays["mtp_tokens"].tolist()
    hidden, before = _shifted(model, tokens)
    rows = arrays["mtp_rows"]
    np.testing.assert_allclose(hidden[0].numpy()[rows], arrays["mtp_h"], rtol=0, atol=1e-3)
    memory = NaiveMemory.for_head(model.config)
    step = model.head.forward(ubatch_of(tokens), before, memory)
    np.testing.assert_allclose(step.logits.numpy()[rows], arrays["mtp_logits"], rtol=0, atol=1e-3)
    assert memory.n_commits == 1


@pytest.mark.parametrize("name", MODELS)
def test_greedy_chains(name, golden, reference):
    arrays, model = reference(name), golden(name)
    tokens = arrays["mtp_tokens"].tolist()
    _, before = _shifted(model, tokens)
    for row, start in enumerate(arrays["mtp_start"].tolist()):
        memory = NaiveMemory.for_head(model.config)
        model.head.forward(ubatch_of(tokens[:start], outputs=[]), before[:, :start], memory)
        token, hidden = tokens[start], before[:, start : start + 1]
        for step in range(3):
            out = model.head.forward(ubatch_of([token], start + step), hidden, memory)
            token, hidden = int(out.logits[0].argmax()), out.hidden
            assert token == arrays["mtp_chain"][row, step]
            np.testing.assert_allclose(
                out.logits[0].numpy(), arrays["mtp_chain_logits"][row, step], rtol=0, atol=1e-3
            )


def test_own_embedding_table_is_used(golden, reference, variant):
    """With the table rolled by one row, token t must act as token t - 1 did."""

    def edit(tensors):
        tensors[BLOCK + "nextn.embed_tokens.weight"] = np.roll(tensors["token_embd.weight"], 1, 0)

    tokens = reference(DENSE)["mtp_tokens"].tolist()
    _, before = _shifted(golden(DENSE), tokens)
    rolled = _load(variant(DENSE, edit=edit))
    moved = ubatch_of([token + 1 for token in tokens])
    got = rolled.head.forward(moved, before, NaiveMemory()).logits
    expected = golden(DENSE).head.forward(ubatch_of(tokens), before, NaiveMemory()).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_own_output_table_is_used(golden, reference, variant):
    def edit(tensors):
        tensors[BLOCK + "nextn.shared_head_head.weight"] = 2 * tensors["output.weight"]

    tokens = reference(DENSE)["mtp_tokens"].tolist()
    got = _head_logits(_load(variant(DENSE, edit=edit)), tokens)
    torch.testing.assert_close(got, 2 * _head_logits(golden(DENSE), tokens), rtol=0, atol=2e-4)


def test_output_norm_serves_where_the_head_has_none(reference, variant, tmp_path):
    name = BLOCK + "nextn.shared_head_norm.weight"

    def without(tensors):
        del tensors[name]

    def explicit(tensors):
        tensors[name] = tensors["output_norm.weight"]

    tokens = reference(DENSE)["mtp_tokens"].tolist()
    got = _head_logits(_load(variant(DENSE, edit=without)), tokens)
    expected = _head_logits(_load(variant(DENSE, edit=explicit)), tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_fused_qkv_in_the_mtp_block(golden, reference, variant):
    def edit(tensors):
        parts = [tensors.pop(f"{BLOCK}attn_{x}.weight") for x in "qkv"]
        tensors[BLOCK + "attn_qkv.weight"] = np.concatenate(parts)

    tokens = reference(DENSE)["mtp_tokens"].tolist()
    got = _head_logits(_load(variant(DENSE, edit=edit)), tokens)
    torch.testing.assert_close(got, _head_logits(golden(DENSE), tokens), rtol=0, atol=1e-4)


def test_trunk_alone_when_the_count_of_mtp_blocks_is_missing(golden, reference, variant):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(BLOCK)]:
            del tensors[name]

    keys = {
        "{arch}.nextn_predict_layers": DROP,
        "{arch}.block_count": 4,
        "{arch}.attention.recurrent_layers": [True, True, True, False],
    }
    model = _load(variant(DENSE, keys, edit))
    assert model.head is None
    tokens = reference(DENSE)["mtp_tokens"].tolist()
    got, _ = _shifted(model, tokens)
    expected, _ = _shifted(golden(DENSE), tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
