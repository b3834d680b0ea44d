"""The models against llama.cpp's logits and states on the golden files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.parts.attention import (
    INDEX_ROW,
    CompressedAttentionPart,
    SparseLatentAttentionPart,
)
from engine.model.recurrence import StateKey
from tests.support.golden_files import second_set
from tests.support.naive_memory import NaiveMemory, ubatch_of

MODELS = [
    "qwen3-f-f32",
    "qwen35-a-f32",
    "qwen35-b-v2x-tied-f32",
    "qwen35-c-v2x-mtp-f32",
    "qwen35-g-v2x-q4_k_m",
    "qwen35-h-v2x-mtp-q8_0",
    "qwen35moe-d-v2x-mtp-f32",
    "qwen3next-e-v2x-f32",
    *second_set(),
]

FIELDS = {"S": ["state"], "conv": ["window"], "ple": ["ngrams"]}
"""Names of the states that stand side by side in an array of the golden files."""


def _widths(shape: str, n_prompt: int, n: int) -> list[int]:
    if shape == "prompt and continuation":
        return [n_prompt, n - n_prompt]
    if shape == "token by token":
        return [1] * n
    return [7] * (n // 7) + ([n % 7] if n % 7 else [])


@pytest.mark.parametrize("shape", ["prompt and continuation", "token by token", "sevens"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(6)
def test_logits(name, shape, golden, reference):
    arrays, model = reference(name), golden(name)
    tokens = arrays["tokens"].tolist()
    memory, parts, pos = NaiveMemory.for_model(model.config), [], 0
    for width in _widths(shape, int(arrays["n_prompt"]), len(tokens)):
        parts.append(model.forward(ubatch_of(tokens[pos : pos + width], pos), memory).logits)
        pos += width
    logits = torch.cat(parts).numpy()[arrays["rows"]]
    expected = arrays["logits_deq"] if "logits_deq" in arrays else arrays["logits"]
    worst = np.abs(logits - expected).max(1)
    assert worst.max() <= 1e-3
    assert np.median(worst) <= 1e-4


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith(("qwen3-f", "deepseek4"))]
)
def test_states_after_the_prompt(name, golden, reference):
    arrays, model = reference(name), golden(name)
    memory = NaiveMemory.for_model(model.config)
    prompt = arrays["tokens"][: int(arrays["n_prompt"])].tolist()
    model.forward(ubatch_of(prompt, outputs=[]), memory)
    stored = {key for key in arrays if key.startswith(("S_", "conv_", "ple_"))}
    if not stored:
        pytest.skip("the library that made the file showed no states")
    assert model.recurrent_layers == tuple(sorted({int(key.split("_")[1]) for key in stored}))
    for field in stored:
        kind, layer = field.split("_")
        names = FIELDS[kind]
        states = [memory.recurrent.states[StateKey(int(layer), name), 0][0] for name in names]
        atol = 1e-5 + 2e-6 * float(np.abs(arrays[field]).max())
        got = torch.cat(states, -1).numpy()
        np.testing.assert_allclose(got, arrays[field], rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("glm5-next")])
def test_rows_of_the_indexer_after_the_prompt(name, golden, reference):
    arrays, model = reference(name), golden(name)
    memory, n = NaiveMemory.for_model(model.config), int(arrays["n_prompt"])
    model.forward(ubatch_of(arrays["tokens"][:n].tolist(), outputs=[]), memory)
    layers = {int(key.rpartition("_")[2]) for key in arrays if key.startswith("idx_key_")}
    if not layers:
        pytest.skip("the library that made the file showed no rows")
    for layer in layers:
        (part,) = model.config.blocks[layer].mixers
        assert isinstance(part, SparseLatentAttentionPart)
        rows = memory.attention.cells[StateKey(layer, INDEX_ROW), 0][0][0].numpy()
        for name, found in zip(("key", "gate"), np.split(rows, 2, 1), strict=True):
            wanted = arrays[f"idx_{name}_{layer}"]
            atol = 3e-5 + 2e-6 * float(np.abs(wanted).max())
            np.testing.assert_allclose(found[-len(wanted) :], wanted, rtol=0, atol=atol)


RINGS = {"comp": ("csa ring", "hca ring"), "idx": ("lid ring",)}


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("deepseek4")])
def test_rings_and_rows_of_blocks_after_the_prompt(name, golden, reference):
    arrays, model = reference(name), golden(name)
    memory, n = NaiveMemory.for_model(model.config), int(arrays["n_prompt"])
    model.forward(ubatch_of(arrays["tokens"][:n].tolist(), outputs=[]), memory)
    n_seen = 0
    for key, ring in memory.recurrent.states.items():
        state, _ = key
        (part,) = model.config.blocks[state.layer].mixers
        assert isinstance(part, CompressedAttentionPart)
        kind = next(kind for kind, names in RINGS.items() if state.name in names)
        found = list(ring[0].chunk(2, -1))
        rows = StateKey(state.layer, INDEX_ROW) if kind == "idx" else state.layer
        found.append(memory.attention.cells[rows, 0][0][-1][part.ratio - 1 :: part.ratio])
        for field, got in zip(("kv", "score", "rows"), found, strict=True):
            wanted = arrays[f"{kind}_{field}_{state.layer}"]
            atol = 3e-5 + 2e-6 * float(np.abs(wanted).max())
            np.testing.assert_allclose(got[-len(wanted) :].numpy(), wanted, rtol=0, atol=atol)
            n_seen += 1
    assert n_seen == sum(key.startswith(("comp_", "idx_")) for key in arrays)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(8)
def test_greedy_continuation(name, golden, reference):
    arrays, model = reference(name), golden(name)
    memory = NaiveMemory.for_model(model.config)
    tokens = arrays["tokens"][: int(arrays["n_prompt"])].tolist()
    pos, pending, emitted = 0, tokens, []
    while len(emitted) < 40:
        step = model.forward(ubatch_of(pending, pos, outputs=[len(pending) - 1]), memory)
        pos += len(pending)
        pending = [int(step.logits[0].argmax())]
        emitted += pending
    assert emitted == arrays["greedy"].tolist()
