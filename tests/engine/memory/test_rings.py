"""Rollbacks of rings, which go by position: how deep they are right, and that they are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from engine.options import ROLLBACK_POLICIES
from tests.support.golden_files import golden_file
from tests.support.naive_memory import ubatch_of

NAME = "deepseek4-a-mtp-f32"
TEXT = np.random.default_rng(5).integers(3, 370, 200).tolist()
OTHER = np.random.default_rng(6).integers(3, 370, 200).tolist()
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not golden_file(f"{NAME}.gguf").exists(), reason="golden models are not there"
)


@cache
def model() -> HybridModel:
    with GgufFile.open(golden_file(f"{NAME}.gguf")) as file:
        return load_model(file)


@cache
def plain(n: int) -> torch.Tensor:
    """Logits of the token after the first n of the text."""
    return decode(memory("checkpoint", 0), [TEXT[:n]])


def memory(policy: str, n_rs_seq: int) -> HybridMemory:
    return HybridMemory.for_model(model().config, 2, 256, CPU, policy=policy, n_rs_seq=n_rs_seq)


def decode(memory: HybridMemory, batches: list[list[int]]) -> torch.Tensor:
    for tokens in batches:
        first = memory.seq_pos_max(0) + 1
        logits = model().forward(ubatch_of(tokens, first, outputs=[len(tokens) - 1]), memory).logits
    return logits


def deepest(length: int, n_batch: int, n_rs_seq: int) -> int:
    """By llama.cpp's planes: the last batch, and beyond it while 4 floor(n/4) - 4 >= length - 8."""
    beyond = 0
    while 4 * ((length - beyond - 1) // 4) - 4 >= length - 8:
        beyond += 1
    return min(n_rs_seq, n_batch + beyond)


@pytest.mark.parametrize("policy", ["planes", "replay"])
@pytest.mark.parametrize("length", [40, 41, 42, 43, 128, 129])
@pytest.mark.thinned(6)
def test_what_is_accepted_beyond_the_last_batch_is_right(policy, length):
    n_batch, n_rs_seq = 3, 8
    reach = deepest(length, n_batch, n_rs_seq)
    for depth in range(1, n_rs_seq + 1):
        held = memory(policy, n_rs_seq)
        decode(held, [TEXT[:length], OTHER[:n_batch]])
        assert held.recurrent.valid_depth(0) == reach
        n = length + n_batch - depth
        assert held.seq_rm(0, n) == (depth <= reach)
        if depth <= reach:
            # across the ends of two blocks
            kept = [*TEXT[:length], *OTHER[:n_batch]][:n]
            rest = TEXT[n : n + 9]
            fresh = decode(memory("checkpoint", 0), [[*kept, *rest]])
            torch.testing.assert_close(decode(held, [rest]), fresh, rtol=0, atol=2e-4)


@pytest.mark.parametrize("policy", ["planes", "replay"])
def test_a_later_text_is_undone_as_deep_as_a_first_one(policy):
    held = memory(policy, 8)
    decode(held, [TEXT[:129], OTHER[:3]])
    assert held.renew()
    decode(held, [TEXT[:40], OTHER[:3]])
    assert held.recurrent.valid_depth(0) == deepest(40, 3, 8) > 3


@pytest.mark.parametrize("policy", [name for name in ROLLBACK_POLICIES if name != "checkpoint"])
@pytest.mark.thinned(4)
def test_rounds_one_after_the_other_stay_right(policy):
    """Drafts that are wrong, undone as deep as a policy allows, again and again."""
    rng = np.random.default_rng(len(policy))
    held, n = memory(policy, 6), 30
    decode(held, [TEXT[:n]])
    while n < 120:
        n_right, n_wrong = (int(x) for x in rng.integers(0, 4, 2))
        batch = [*TEXT[n : n + 1 + n_right], *OTHER[:n_wrong]]
        decode(held, [batch])
        n += 1 + n_right
        # and some of the right ones
        most = held.recurrent.valid_depth(0) - n_wrong
        assert most >= 0
        deeper = int(rng.integers(0, min(most, 5) + 1))
        if n_wrong + deeper:
            assert held.seq_rm(0, n - deeper)
        n -= deeper
        logits = decode(held, [TEXT[n : n + 1]])
        n += 1
        torch.testing.assert_close(logits, plain(n), rtol=0, atol=2e-4)


def test_positions_are_not_shifted():
    held = memory("planes", 2)
    decode(held, [TEXT[:10]])
    with pytest.raises(OptionError, match="cannot be rotated"):
        held.seq_add(0, 5, -1, 4)
    assert held.seq_pos_max(0) == 9
