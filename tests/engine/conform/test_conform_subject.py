"""Memory of kernels under test, commits of two layers, and track slots."""

from __future__ import annotations

import pytest
import torch

from engine.conform.adapters.fla import LastState
from engine.conform.adapters.sglang_snapshots import Tracks
from engine.conform.cases import Shape
from engine.conform.passes import shapes
from engine.conform.subject import Kernel, Layers, Memory

EXTRAS = ("layers", "track slots", "z", "lower bound")


def test_what_a_part_holds_in_place_of_the_right_is_said():
    memory = Memory("cpu")
    part = memory.zeros(4)
    memory.keep("a-cause", "the part", part, torch.ones(4), {"twos": torch.full((4,), 2.0)})
    assert list(memory.changed()) == [("a-cause", "the part holds other values")]
    part.fill_(2.0)
    assert list(memory.changed()) == [("a-cause", "the part holds twos")]
    part.fill_(1.0)
    assert not list(memory.changed())
    part.fill_(3.0)
    memory.keep("another", "the part", part)  # in place of what was wanted, whatever the cause
    assert not list(memory.changed())
    part.fill_(4.0)
    assert list(memory.changed()) == [("another", "the part")]
    memory.forget(part)
    assert not list(memory.changed())


def test_the_second_far_slot_is_where_32_bits_do_not_count_to():
    pool = Memory("cpu", far=True).pool(2, 3, 4, 5, dtype=torch.bfloat16)
    assert pool.shape == (2, 3, 4, 5)
    assert 2 * pool.stride(1) >= 2**31 > pool.stride(1)
    assert pool.isnan().all()
    pool[1, 2] = 1.0
    assert pool.isnan().sum() == 5 * 4 * 5
    assert Memory("cpu").pool(2, 3, 4, 5).is_contiguous()
    assert Memory("meta", far=True).pool(2, 3, 4, 5).is_meta


def test_slots_are_near_where_the_system_does_not_map_as_much(monkeypatch):
    monkeypatch.setattr(Memory, "FAR", 2**70)
    assert Memory("cpu", far=True).pool(1, 3, 4).is_contiguous()


@pytest.mark.parametrize(("groups", "turn"), [(2, 2), (1, 1)])
def test_the_first_layer_has_the_second_with_its_heads_turned(groups, turn):
    memory = Memory("cpu")
    layers = Layers(Shape("gdn", 4, groups, 16, 16, 3, 2, extras=("layers",)), memory)
    states = torch.randn(layers.n, 3, 4, 2)
    layers.fill(states, 2)
    assert torch.equal(states[0], states[1].roll(turn, 1))
    layers.check(states, 2)
    assert not list(memory.changed())
    states[0, 1, 2] += 1
    assert [cause for cause, _ in memory.changed()] == ["other-layer"]


def test_one_layer_is_left_as_it_is():
    memory = Memory("cpu")
    layers = Layers(Shape("gdn", 4, 2, 16, 16, 3, 2), memory)
    states = torch.randn(layers.n, 3, 4, 2)
    layers.fill(states, 2)
    layers.check(states + 1, 2)
    assert (layers.n, list(memory.changed())) == (1, [])


def test_a_track_slot_keeps_the_state_after_its_step_and_others_stay():
    shape, memory = Shape("gdn", 1, 1, 4, 4, 4, 2, extras=("track slots",)), Memory("cpu")
    tracks, pool = Tracks(shape, memory), torch.zeros(5, 1, 4, 4)
    seen = set()
    for _ in range(4):
        slots, steps = tracks.of([0, 1], [3, 2], pool)
        assert slots.tolist() == [3, 4]
        for sequence, step in enumerate(steps.tolist()):
            assert (tracks.state(sequence, pool) or (0,))[0] == step + 1
            seen.add((sequence, step))
        pool[[3 + s for s, step in enumerate(steps.tolist()) if step < 0]] += 1
        assert len(list(memory.changed())) == int((steps < 0).any())
    assert seen == {(0, step) for step in range(-1, 3)} | {(1, step) for step in range(-1, 2)}


def test_every_other_shape_has_what_is_about_its_recurrence():
    kernel = Kernel("kernel", ("gdn", "kda"), None, extras=EXTRAS)
    made = {r: [shape.extras for shape in shapes(kernel, r, "cpu")] for r in ("gdn", "kda")}
    assert made["gdn"][:2] == [(), ("layers", "track slots")]
    assert made["kda"][:2] == [(), ("layers", "track slots", "lower bound")]
    assert made["kda"][2::2] == [(), ()]


@pytest.mark.parametrize(("extras", "sizes"), [((), (2, 8, 4)), (("v first",), (2, 4, 8))])
def test_states_with_values_first_are_turned_back(extras, sizes):
    shape = Shape("gdn", 2, 2, 8, 4, 3, 2, extras=extras)
    subject = LastState(shape, Memory("cpu"), None)
    state = torch.randn(shape.state)
    subject.load(1, state)
    assert subject.states.shape[1:] == sizes
    assert torch.equal(subject.state(1), state)


def test_a_copy_of_memory_that_was_never_written_is_seen():
    memory = Memory("cpu")
    before = [t.as_strided((8,), (1,), t.storage_offset() - 8) for t in map(memory.empty, (4, 4))]
    before[0].copy_(before[0].clone())
    assert not list(memory.changed())
    before[0].copy_(before[1])
    assert list(memory.changed()) == [("padding-written", "before a tensor of [4]")]
