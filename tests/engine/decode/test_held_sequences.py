"""What a slot can give to a new prompt, and which slot gives most."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Span
from engine.decode.held_sequences import HeldSequences
from engine.memory.hybrid import HybridMemory
from engine.options import ROLLBACK_POLICIES, CacheOptions, Prompt
from engine.trace.prompt_reuse import n_common
from tests.support.golden_runs import session

MODEL = "qwen35-a-f32"


@pytest.fixture(params=ROLLBACK_POLICIES)
def held(request) -> HeldSequences:
    """Two sequences of 12 and 20 tokens, decoded in parts of four, with a checkpoint after 8."""
    model = session(MODEL).model
    n_rs_seq = 0 if request.param == "checkpoint" else 2
    memory = HybridMemory.for_model(
        model.config, 3, 64, torch.device("cpu"), policy=request.param, n_rs_seq=n_rs_seq
    )
    memory.poison(float("nan"))
    held = HeldSequences(memory, CacheOptions(), 8, None)
    for seq, n in ((0, 12), (1, 20)):
        prompt = Prompt(tuple(range(seq, n + seq)))
        for pos in range(0, n, 4):
            if pos == 8:
                assert held.checkpoint(seq, prompt, pos) == memory.recurrent.layout.n_bytes
            tokens = prompt.tokens[pos : pos + 4]
            for ubatch in memory.split([Span(seq, pos, tokens, [])], 8, "equal"):
                model.forward(ubatch, memory)
            held.observe(seq, tokens)
    return held


def test_the_way_back(held):
    text, has_snapshots = list(range(12)), held.memory.recurrent.n_rs_seq > 0
    for tokens, expected in (
        ([*text, 99], 12),
        (text, 11 if has_snapshots else 8),
        ([*text[:10], 99], 10 if has_snapshots else 8),
        ([*text[:9], 99, 98], 8),
        ([*text[:8], 99], 8),
        (text[:8], 0),
        ([99, 98], 0),
        ([0], 0),
    ):
        assert held.reuse(0, tokens)[0] == expected
    assert held.tokens[0] == text  # asking changes nothing
    assert held.resume(0, [*text[:9], 99, 98])[0] == 8
    memory = held.memory
    assert memory.seq_pos_max(0) == memory.attention.seq_pos_max(0) == 7
    assert held.tokens[0] == text[:8] and held.checkpoints[0].lengths == [8]
    assert held.resume(0, [*text[:5], 99])[0] == 0
    assert memory.seq_pos_max(0) == memory.attention.seq_pos_max(0) == -1
    assert held.tokens[0] == held.checkpoints[0].lengths == []
    assert memory.seq_pos_max(1) == 19  # the neighbour is as it was


def test_the_slot_that_spares_most(held):
    assert held.best([0, 1, 2], [*range(12), 99]) == 0
    assert held.best([0, 1, 2], [*range(1, 21), 99]) == 1
    assert held.best([0, 2], [*range(1, 21), 99]) == 0  # of equal ones the first
    assert held.best([2, 0], [50, 51]) == 2


def test_parts_end_where_checkpoints_are_made(held):
    prompt = Prompt(tuple(range(40)), message_starts=(10,))
    assert [held.part_end(prompt, n) for n in (0, 10, 28, 36)] == [10, 28, 36, 40]
    none = HeldSequences(held.memory, CacheOptions(ctx_checkpoints=0), 8, None)
    assert none.part_end(prompt, 0) == 40
    assert none.checkpoint(0, prompt, 36) == 0


@given(*[st.lists(st.integers(0, 2), max_size=6)] * 2)
def test_common_prefix(a, b):
    n = n_common(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
