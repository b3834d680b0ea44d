"""Runs in memory of earlier runs: as if it were new, and no one else's meanwhile."""

from __future__ import annotations

import gc
import weakref
from itertools import cycle
from math import nan
from unittest.mock import patch

import pytest
import torch

import engine.machine.graphs as on_processor
from engine.errors import DraftscopeError
from engine.machine.graphs import VARIABLE
from engine.memory import hybrid as shelf
from engine.memory import kv_storage
from engine.memory.hybrid import HybridMemory, LentMemories
from engine.model.parts import CellSize
from engine.options import Prompt, RunOptions
from engine.session import Session
from kernels.dispatch import uses_llvm
from tests.support.golden_files import golden_file
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, tokens_of
from tests.support.recorded_runs import assert_same

MTP = "qwen35-c-v2x-mtp-f32"
POLICIES = ["planes", "carry", "ring", "replay", "checkpoint"]

pytestmark = pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")


@pytest.fixture
def opened() -> Session:
    return Session.open(golden_file(f"{MTP}.gguf"), compute="f32")


@pytest.fixture
def recordings(monkeypatch) -> list[int]:
    """Grows by one with every pass that is recorded."""
    made, record = list[int](), on_processor.RecordOnProcessor.__call__

    def count(self, compute):
        made.append(1)
        return record(self, compute)

    monkeypatch.setattr(on_processor.RecordOnProcessor, "__call__", count)
    return made


def prompts() -> list[Prompt]:
    tokens = prompt_of(MTP).tokens
    return [Prompt(tokens[:n]) for n in (len(tokens), 5, 9)]


def poison_behind(renew):
    """What an earlier run left is NaN, where it may be anything."""

    def renew_and_poison(self) -> bool:
        renewed = renew(self)
        self.poison(nan)
        return renewed

    return renew_and_poison


@pytest.mark.parametrize(("policy", "kv"), list(zip(POLICIES, cycle(("unified", "per-seq")))))
@pytest.mark.thinned(4)
def test_a_later_run_is_the_first_bit_for_bit(policy, kv, opened):
    options = options_of(60, "draft-mtp", rollback=policy, kv=kv, parallel=2)
    first = decode(opened, prompts(), options)
    decode(opened, [prompts()[2]], options)
    # beyond the cells that are allocated at first
    decode(opened, prompts(), options_of(300, "draft-mtp", rollback=policy, kv=kv, parallel=2))
    decode(opened, prompts()[::-1], options_of(20, rollback=policy, kv=kv, sampler=SAMPLED))
    with patch.object(HybridMemory, "renew", poison_behind(HybridMemory.renew)):
        assert_same(decode(opened, prompts(), options), first)


def test_nothing_is_recorded_twice(opened, recordings):
    options = options_of(300, "draft-mtp", rollback="planes")
    first = decode(opened, [prompt_of(MTP)], options)
    assert len(recordings) > 4
    # what was seen only once, or before positions were as high
    decode(opened, [prompt_of(MTP)], options)
    n = len(recordings)
    assert_same(decode(opened, [prompt_of(MTP)], options), first)
    assert len(recordings) == n


def test_runs_side_by_side_share_nothing(opened):
    options = options_of(40, "draft-mtp", rollback="planes")
    alone = decode(opened, [prompt_of(MTP)], options)
    runs = [opened.start([prompt], options) for prompt in (prompt_of(MTP), prompts()[1])]
    while not all(run.done for run in runs):
        for run in runs:
            run.step()
    assert_same(runs[0], alone)
    assert tokens_of(runs[1]) == tokens_of(decode(opened, [prompts()[1]], options))


def test_a_run_that_failed_gives_nothing_back(opened):
    run = opened.start([prompt_of(MTP)], options_of(20))
    for _ in range(4):
        run.step()
    with (
        patch.object(run._scheduler, "_decode_round", side_effect=DraftscopeError("no", "none")),
        pytest.raises(DraftscopeError),
    ):
        run.step()
    assert len(opened._shelf) == 0


def test_a_stopped_run_leaves_its_memory_to_the_next(opened):
    options = options_of(40)
    first = decode(opened, [prompt_of(MTP)], options)
    run = opened.start([prompts()[2]], options)
    for _ in range(5):
        run.step()
    run.stop()
    assert len(opened._shelf) == 1
    assert_same(decode(opened, [prompt_of(MTP)], options), first)


def test_what_is_not_recorded_or_faulty_is_not_kept(opened, monkeypatch):
    decode(opened, [prompt_of(MTP)], options_of(20, faults=("stale-plane",)))
    monkeypatch.setenv(VARIABLE, "off")
    decode(opened, [prompt_of(MTP)], options_of(20))
    assert len(opened._shelf) == 0


def test_a_shelf_keeps_so_many_and_so_much(opened, monkeypatch):
    for n_ctx in range(100, 100 + shelf.MOST_MEMORIES + 2):
        decode(opened, [prompts()[1]], RunOptions(n_predict=8, n_ctx=n_ctx))
    assert len(opened._shelf) == shelf.MOST_MEMORIES
    monkeypatch.setattr(shelf, "MOST_BYTES", 0)
    decode(opened, [prompts()[1]], options_of(8))
    assert len(opened._shelf) == 0


def test_storage_that_has_grown_too_large_is_made_anew(opened, monkeypatch):
    monkeypatch.setattr(kv_storage, "_KEPT_BYTES", 0)
    options = options_of(300)
    first = decode(opened, [prompt_of(MTP)], options)
    with patch.object(HybridMemory, "for_model", wraps=HybridMemory.for_model) as made:
        assert_same(decode(opened, [prompt_of(MTP)], options), first)
    assert made.call_count == 1


def test_a_session_that_is_gone_holds_no_memory():
    gone = Session.open(golden_file(f"{MTP}.gguf"), compute="f32")
    decode(gone, [prompt_of(MTP)], options_of(20))
    ((_, memory),) = gone._shelf._kept
    left = weakref.ref(memory)
    del gone, memory
    gc.collect()
    assert left() is None


def test_without_a_shelf_memory_is_the_runs_alone():
    made = HybridMemory.for_layers({0: CellSize(1, 4, 4)}, 1, 8, torch.device("cpu"))
    memories = LentMemories()
    assert memories.take("key", lambda: made) is made
    memories.give_back()
    again = memories.take("key", lambda: HybridMemory.for_layers({}, 1, 8, made.attention.device))
    assert again is not made
