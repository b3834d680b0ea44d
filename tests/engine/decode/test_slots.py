"""Who holds a slot: prompts in order, each slot used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.decode.sequences import DecodingSequence, SlotAssignment
from engine.options import Prompt, SamplerOptions
from engine.sampling.sampler import Sampler


def slots(n: int, n_slots: int) -> SlotAssignment:
    sampler = Sampler(SamplerOptions())
    return SlotAssignment(
        [DecodingSequence(i, -1, Prompt((1,)), sampler) for i in range(n)], n_slots
    )


@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_sequence_gets_its_turn_and_no_slot_two_holders(n, n_slots, random) -> None:
    both = slots(n, n_slots)
    admitted: list[int] = []
    while both.is_busy:
        admitted += [slot.seq_id for slot in both.admit()]
        held = [slot.index for slot in both.running]
        assert len(set(held)) == len(held) == min(n_slots, n - len(admitted) + len(held))
        assert {both.holders[s.index] for s in both.running} == {s.seq_id for s in both.running}
        ends = random.choice(both.running)
        index, ends.stop = ends.index, "limit"
        assert both.release() == [index]
        assert ends.index == -1
    assert admitted == list(range(n))


def test_stopping_drops_what_waits() -> None:
    both = slots(3, 2)
    both.admit()
    both.stop()
    assert not both.is_busy
    assert both.admit() == []
    assert [slot.stop for slot in both.sequences] == ["stopped"] * 3
    assert both.release() == [0, 1]
