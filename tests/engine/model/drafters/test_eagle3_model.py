"""EAGLE-3's mathematics and files: golden features, logits, drafts; files that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.errors import DraftscopeError
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV
from engine.model.drafters.config import describe_draft, drafter_of
from engine.model.drafters.loading import LoadedDrafter, load_drafter
from tests.support.golden_drafters import TARGETS, drafter_file, drafters, golden_drafter, spread
from tests.support.golden_files import golden_file
from tests.support.golden_runs import session
from tests.support.rewrite_gguf import rewrite

EAGLE3 = drafters("eagle3")
OWN = "eagle3-b-d2t-norms"


def loaded(name: str) -> LoadedDrafter:
    with GgufFile.open(drafter_file(f"{name}.gguf")) as file:
        return load_drafter(file, session(TARGETS[name]).model)


@pytest.mark.parametrize("name", EAGLE3)
def test_feature_rows_logits_and_drafts_are_golden(name):
    golden, drafter = golden_drafter(name), loaded(name)
    features = drafter.model.fused(torch.from_numpy(golden["features"]).flatten(1))
    torch.testing.assert_close(features, torch.from_numpy(golden["g"]), rtol=0, atol=1e-4)
    n_steps = golden["draft_ids"].shape[1]
    for s, start in enumerate(golden["starts"].tolist()):
        cells = AttentionKV(drafter.config.cells(), 1, 512, features.device)
        memory = HybridMemory(cells, None)
        tokens, pos, rows = golden["tokens"][1 : start + 1].tolist(), 0, features[None, :start]
        for step in range(n_steps):
            (ubatch,) = memory.split([Span(0, pos, tokens, [len(tokens) - 1])], 512, "seq")
            out = drafter.model.forward(ubatch, rows, memory)
            pos, rows = pos + len(tokens), out.hidden[:, -1:]
            before_norm = torch.from_numpy(golden["draft_prenorm"][s, step])
            torch.testing.assert_close(rows[0, 0], before_norm, rtol=0, atol=2e-4)
            logits = spread(drafter.vocabulary, out.logits)[0]
            expected = torch.from_numpy(golden["draft_logits"][s, step])
            assert torch.equal(torch.isinf(logits), torch.isinf(expected))
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
            tokens = [int(logits.argmax())]
            assert tokens == [golden["draft_ids"][s, step]]


@pytest.mark.skipif(OWN not in EAGLE3, reason="the golden drafters are not there")
@pytest.mark.parametrize("name", EAGLE3)
def test_weights_take_what_was_estimated(name):
    drafter = loaded(name)
    assert drafter.weight_bytes == drafter.info.loaded_bytes["f32"]
    with GgufFile.open(drafter_file(f"{name}.gguf")) as file:
        assert describe_draft(file) == ("draft-eagle3", drafter.info)


def _without(name):
    return lambda tensors: tensors.pop(name)


def _with(name, array):
    return lambda tensors: tensors.update({name: array})


def _ids(first):
    ids = np.arange(200, dtype=np.int64)
    ids[0] = first
    return ids


@pytest.mark.skipif(OWN not in EAGLE3, reason="the golden drafters are not there")
@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"eagle3.target_hidden_size": 128}, None, "reads rows of 128 numbers, and those of"),
        ({"eagle3.block_count": 2}, None, "block_count is 2, and EAGLE-3 drafters have one block"),
        ({"eagle3.target_layers": [1, 2]}, None, "2 layers where 3 are needed"),
        ({"eagle3.target_layers": [0, 2, 9]}, None, "reads the input of layer 9, and"),
        ({"eagle3.norm_before_fc": False}, None, "enc.output_norm.weight is not used by"),
        ({}, _without("fc.weight"), "tensor fc.weight: the tensor is missing"),
        ({}, _without("token_embd.weight"), "has no token_embd.weight, and that of"),
        ({}, _without("d2t"), r"output.weight: shape \[200, 48\] where \[384, 48\]"),
        ({}, _with("d2t", _ids(384)), r"number 0 is 384, outside the target's ids 0..383"),
        ({}, _with("d2t", _ids(-1)), r"number 0 is -1, outside the target's ids"),
        ({}, _with("d2t", _ids(5)), "an id of the target occurs twice"),
        ({}, _with("d2t", np.zeros(200, np.float32)), "F32 of shape"),
        ({}, _with("fc.bias", np.zeros(48, np.float32)), "fc.bias is not used by"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path, keys, tensors, message):
    path = rewrite(drafter_file(f"{OWN}.gguf"), tmp_path / "x.gguf", keys, tensors)
    target = session(TARGETS[OWN]).model
    with GgufFile.open(path) as file, pytest.raises(DraftscopeError, match=message) as refusal:
        load_drafter(file, target)
    assert "x.gguf" in refusal.value.message
    assert refusal.value.message.count(". ") == 0


def test_the_drafter_is_told_from_the_file():
    with GgufFile.open(golden_file("qwen3-f-f32.gguf")) as file:
        assert drafter_of(file) == "draft-simple"
