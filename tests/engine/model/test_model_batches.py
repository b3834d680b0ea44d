"""Several sequences side by side, and which rows a forward pass returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import UBatch
from tests.support.naive_memory import NaiveMemory, ubatch_of

MODELS = ["qwen35-b-v2x-tied-f32", "qwen35moe-d-v2x-mtp-f32", "qwen3next-e-v2x-f32", "qwen3-f-f32"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 4])
def test_sequences_do_not_touch_each_other(name, width, golden):
    """Two sequences of different length continue together as each does alone."""
    model = golden(name)
    prefixes = {3: [5, 9, 200, 31, 7, 7, 120], 0: [64, 2]}
    following = {seq: [seq + 40 + i for i in range(width)] for seq in prefixes}
    alone = []
    shared = NaiveMemory.for_model(model.config)
    for seq, prefix in prefixes.items():
        memory = NaiveMemory.for_model(model.config)
        model.forward(ubatch_of(prefix), memory)
        alone.append(model.forward(ubatch_of(following[seq], len(prefix)), memory))
        model.forward(ubatch_of(prefix, seq=seq, outputs=[]), shared)
    starts = [len(prefix) for prefix in prefixes.values()]
    together = model.forward(
        UBatch(
            tokens=np.array(list(following.values())),
            positions=np.array([[start + i for i in range(width)] for start in starts]),
            seq_ids=tuple(prefixes),
            outputs=np.arange(2 * width),
        ),
        shared,
    )
    expected = torch.cat([step.logits for step in alone])
    torch.testing.assert_close(together.logits, expected, rtol=0, atol=2e-4)
    hidden = torch.cat([step.hidden for step in alone])
    torch.testing.assert_close(together.hidden, hidden, rtol=0, atol=2e-4)


@pytest.mark.parametrize("outputs", [[], [2], [4, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("mode", ["trunk", "head"])
def test_logits_only_where_wanted(outputs, mode, golden):
    model = golden("qwen35-c-v2x-mtp-f32")
    tokens = [7, 3, 300, 12, 55]

    def run(rows):
        ubatch = ubatch_of(tokens, outputs=rows)
        if mode == "trunk":
            memory = NaiveMemory.for_model(model.config)
            return model.forward(ubatch, memory), memory
        memory = NaiveMemory()
        hidden = torch.ones(1, 5, model.config.n_embd)
        return model.head.forward(ubatch, hidden, memory), memory

    every, _ = run(None)
    step, memory = run(outputs)
    assert step.logits.shape == (len(outputs), 384)
    assert step.hidden.shape == (1, 5, 64)
    assert step.logits.dtype == step.hidden.dtype == torch.float32
    assert memory.n_commits == 1
    torch.testing.assert_close(step.logits, every.logits[outputs], rtol=0, atol=1e-5)
    assert torch.equal(step.hidden, every.hidden)
