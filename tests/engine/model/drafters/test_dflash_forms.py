"""Forms of the DFlash family that no golden file has, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import UBatch
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.loading import load_drafter
from tests.support.golden_drafters import TARGETS, drafter_file, drafters, golden_drafter
from tests.support.golden_runs import session
from tests.support.naive_dflash import block
from tests.support.rewrite_gguf import DROP, rewrite

WINDOWED, SHARED = "dflash-b-swa-d2t", "dflash-a-mrope"
pytestmark = pytest.mark.skipif(WINDOWED not in drafters("dflash"), reason="no golden drafters")
FACTORS = np.linspace(1, 3, 8, dtype=np.float32)


def _without_values(tensors):
    for layer in range(3):
        del tensors[f"blk.{layer}.attn_v.weight"]


def _own_table(tensors):
    tensors["token_embd.weight"] = np.random.default_rng(1).normal(size=(384, 64)).astype("f4")


def _factors(tensors):
    tensors["rope_freqs.weight"] = FACTORS


def _as_gemma(tensors):
    rng = np.random.default_rng(2)
    for layer in range(3):
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 2, 64).astype("f4")
    tensors["blk.1.layer_output_scale.weight"] = np.array([0.3], "f4")


PLAIN_ROPE = {"dflash.rope.dimension_sections": DROP}


@pytest.mark.parametrize(
    ("base", "keys", "edit"),
    [
        (WINDOWED, {}, None),
        (WINDOWED, {}, _without_values),
        (WINDOWED, {"dflash.attention.causal": True}, None),
        (WINDOWED, {"dflash.attention.sliding_window": np.uint32(3)}, None),
        (
            WINDOWED,
            {"dflash.attention.causal": True, "dflash.attention.sliding_window": np.uint32(2)},
            None,
        ),
        (WINDOWED, {"dflash.attention.scale": 0.3, "dflash.attention.value_scale": 0.5}, None),
        (WINDOWED, {"dflash.embedding_scale": 2.5}, None),
        (WINDOWED, {"dflash.rope.dimension_count": np.uint32(20)}, None),
        (WINDOWED, {"dflash.hidden_activation": "gelu"}, None),
        (WINDOWED, {"dflash.hidden_activation": "gelu_pytorch_tanh"}, _as_gemma),
        (WINDOWED, {}, _as_gemma),
        (SHARED, {}, _own_table),
        (SHARED, {}, _factors),
        (SHARED, PLAIN_ROPE, _factors),
    ],
)
def test_blocks_are_those_of_the_definition(tmp_path, base, keys, edit):
    path = rewrite(drafter_file(f"{base}.gguf"), tmp_path / "x.gguf", keys, edit)
    target, golden, n = session(TARGETS[base]).model, golden_drafter(base), 23
    with GgufFile.open(path) as file:
        loaded = load_drafter(file, target)
        tensors = {
            name: torch.from_numpy(file.raw(name).view(np.float32).copy()).double().view(info.shape)
            for name, info in file.tensors.items()
            if info.type.name == "F32"
        }
        meta = {k.removeprefix("dflash."): v for k, v in file.metadata.items()}
    model, config = loaded.model, loaded.config
    rows = torch.from_numpy(golden["features"][:n]).flatten(1)
    tokens = [int(golden["tokens"][n]), *[config.mask_token] * 4]
    memory = HybridMemory.for_layers(
        config.cells(), 1, 64, torch.device("cpu"), ahead=not config.causal
    )
    none = np.zeros(0, np.int64)
    model.inject(
        UBatch(np.zeros((1, n), np.int64), np.arange(n)[None], (0,), none), rows[None], memory
    )
    there = UBatch(np.array([tokens]), n + np.arange(5)[None], (0,), none)
    found = model.block(there, memory)
    table = tensors.get("token_embd.weight")
    if table is None:
        table = target.embedding(torch.arange(384)[None])[0].double()
    law = block(tensors, meta, rows.double(), tokens, table)
    torch.testing.assert_close(found.hidden[0].double(), law, rtol=0, atol=2e-4)
    head = tensors.get("output.weight", table if edit is _own_table else None)
    if head is not None:
        torch.testing.assert_close(found.logits[0].double(), law @ head.T, rtol=0, atol=1e-3)


def test_a_selector_scales_and_caps(tmp_path):
    keys = {"dflash.logit_scale": 0.5, "dflash.final_logit_softcapping": 3.0}
    path = rewrite(drafter_file("dflash2-a.gguf"), tmp_path / "x.gguf", keys)
    with GgufFile.open(path) as file:
        selector = load_drafter(file, session(TARGETS["dflash2-a"]).model).model.selector
    logits = 10 * torch.randn(1, 3, 384)
    wanted = 3 * torch.tanh(0.5 * logits / 3)
    torch.testing.assert_close(selector.base(logits), wanted)
    last, hidden = torch.tensor([7]), torch.zeros(1, 3, 64)
    found, scores = selector.lattice(logits, hidden, last, invariant=False)
    best, ids = wanted[0, 1:].topk(4)
    assert [set(row) for row in found[0].tolist()] == [set(row) for row in ids.tolist()]
    # nothing of the hidden state, nothing but the candidates' own scores
    torch.testing.assert_close(scores[0, 0].sort(-1, descending=True).values, best[0].expand(4, -1))
