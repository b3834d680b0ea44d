"""The cyclic buffer of states against states computed from scratch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import UBatch
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.ring import RingMemory
from tests.support.recurrent_texts import (
    CPU,
    HEAD_GATES,
    LAYOUT,
    assert_outputs,
    assert_state,
    close,
    copies,
    decode,
    same,
    truth,
    ubatch_of,
    walk,
)


def make(n_seqs: int, n_rs_seq: int, faults: tuple[str, ...] = ()) -> RingMemory:
    memory = RingMemory(LAYOUT, n_seqs, n_rs_seq, CPU, faults)
    memory.poison(math.nan)
    return memory


def states(memory: SnapshotPolicy, seq: int) -> str:
    return " ".join(slot.state for slot in memory.slots(seq))


def ages(memory: SnapshotPolicy, seq: int) -> list[int | None]:
    return [slot.age for slot in memory.slots(seq)]


def test_the_ring_turns():
    memory = make(2, 4)
    decode(memory, {0: [1]})
    assert states(memory, 0) == "live free free free free"
    decode(memory, {0: [2, 3]})
    assert states(memory, 0) == "carried fresh live free free"
    decode(memory, {0: [4, 5, 6]})
    # the token that has no lane left overwrites the oldest
    assert states(memory, 0) == "live carried carried fresh fresh"
    assert ages(memory, 0) == [0, 4, 3, 2, 1]
    decode(memory, {0: [7]})
    assert states(memory, 0) == "carried live carried carried carried"
    assert memory.valid_depth(0) == 4
    assert states(memory, 1) == "free free free free free"


def test_a_rollback_moves_the_cursor_back():
    memory = make(1, 4)
    text = [1, 2, 3, 4, 5, 6, 7]
    decode(memory, {0: text})
    assert memory.seq_rm(0, 6) and memory.seq_rm(0, 4)
    assert (memory.pending(0), memory.valid_depth(0), memory.seq_pos_max(0)) == (3, 1, 3)
    assert states(memory, 0) == "fresh pending stale stale stale"
    assert ages(memory, 0) == [4, 3, 2, 1, 0]
    assert_state(memory, 0, text[:4])
    assert not memory.seq_rm(0, 2)
    out = decode(memory, {0: [9]})
    assert states(memory, 0) == "carried carried live stale stale"
    assert ages(memory, 0) == [2, 1, 0, None, None]
    assert_outputs(out, 0, [*text[:4], 9], 1)
    assert memory.seq_rm(0, 3)
    assert_state(memory, 0, text[:3])


def test_no_state_is_ever_copied():
    memory = make(3, 3)
    decode(memory, {0: [1, 2, 3, 4, 5]})
    memory.seq_rm(0, 3)
    memory.seq_cp(0, 1)
    memory.seq_cp(1, 2)
    decode(memory, {0: [6], 2: [7]})
    decode(memory, {1: [8, 9, 10, 11]})
    memory.seq_rm(2, 3)
    decode(memory, {2: [12, 13], 0: [14, 15], 1: [16, 17]})
    for seq, text in enumerate(
        ([1, 2, 3, 6, 14, 15], [1, 2, 3, 8, 9, 10, 11, 16, 17], [1, 2, 3, 12, 13])
    ):
        assert_state(memory, seq, text)
    assert memory.traffic.copied == 0


def test_written_bytes_are_those_of_the_new_states():
    memory = make(2, 3)
    decode(memory, {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]})
    assert memory.traffic.written == 2 * 4 * LAYOUT.n_bytes
    memory.seq_rm(0, 4)
    decode(memory, {0: [7]})
    assert memory.traffic.written == 9 * LAYOUT.n_bytes
    assert memory.n_bytes() == 2 * 4 * LAYOUT.n_bytes


def test_single_tokens_are_written_in_place():
    """One sequence's kernel writes into the pool itself: no new storage, old states untouched."""
    memory = make(1, 2)
    decode(memory, {0: [1]})
    held, before = memory.live(0), copies(memory, 0)
    decode(memory, {0: [2]})
    assert same(list(held.values()), before)
    places = {t.data_ptr() for t in memory._storage}
    decode(memory, {0: [3, 4, 5, 6]})
    assert {t.data_ptr() for t in memory._storage} == places


def test_copies_share_slots_until_they_part():
    memory = make(2, 2)
    decode(memory, {0: [1, 2, 3]})
    memory.seq_cp(0, 1)
    assert memory.valid_depth(1) == 2
    assert all(
        torch.equal(a, b) and a.data_ptr() == b.data_ptr()
        for a, b in zip(memory.live(0).values(), memory.live(1).values(), strict=True)
    )
    assert memory.seq_rm(1, 1)
    decode(memory, {1: [5]})
    assert_state(memory, 0, [1, 2, 3])
    assert_state(memory, 1, [1, 5])
    memory.seq_rm(0, 0)
    assert_state(memory, 1, [1, 5])


def test_both_owners_of_one_state_decode_at_once():
    """Without spare depth each lets its input go, and one of them takes that slot over."""
    for order in ((0, 1), (1, 0)):
        memory = make(2, 0)
        decode(memory, {0: [1, 2]})
        memory.seq_cp(0, 1)
        out = decode(memory, {seq: [10 + seq] for seq in order})
        for row, seq in enumerate(order):
            assert_outputs(out, row, [1, 2, 10 + seq], 1)
            assert_state(memory, seq, [1, 2, 10 + seq])


def test_coupled_and_unknown_sequences_are_refused():
    memory = make(2, 2)
    decode(memory, {0: [1], 1: [2]})
    before = copies(memory, 0) + copies(memory, 1)
    good = ubatch_of({0: [3], 1: [4]}, memory)
    for seq_ids in ((0, 0), (0, 2), (-1, 0), (0,), (0, 1, 0)):
        bad = UBatch(good.tokens, good.positions, seq_ids, good.outputs)
        assert not memory.prepare([good, bad])
        with pytest.raises(ValueError, match="distinct"):
            memory.begin(bad)
    assert memory.prepare([good, good])
    assert same(copies(memory, 0) + copies(memory, 1), before)


def test_positions_shift_and_ranges_that_touch_nothing():
    memory = make(1, 3)
    decode(memory, {0: [1, 2, 3]})
    assert memory.seq_rm(0, 3) and memory.seq_rm(0, 0, 2) and not memory.seq_rm(1, 0)
    memory.seq_add(0, 3, -1, 5)
    memory.seq_add(0, 0, 2, 5)
    assert_state(memory, 0, [1, 2, 3])
    memory.seq_add(0, -1, -1, 10)
    assert memory.seq_pos_max(0) == 12
    assert memory.seq_rm(0, 11)
    assert memory.seq_pos_max(0) == 10
    memory.seq_add(0, 0, -1, -10)
    assert_state(memory, 0, [1])
    assert memory.seq_rm(0, -1, 7)
    assert_state(memory, 0, [])


def test_restore_forgets_what_was_kept():
    memory = make(2, 3)
    decode(memory, {0: [1, 2, 3]})
    memory.seq_rm(0, 2)
    saved, nothing = memory.save(0), memory.save(1)
    decode(memory, {1: [7, 8, 9]})
    memory.seq_rm(1, 2)
    memory.restore(1, saved)
    assert (memory.pending(1), memory.valid_depth(1)) == (0, 0)
    assert not memory.seq_rm(1, 1)
    assert_state(memory, 1, [1, 2])
    assert saved.n_bytes == LAYOUT.n_bytes
    memory.restore(1, nothing)
    assert_state(memory, 1, [])
    assert states(memory, 1) == "free free free free"


@pytest.mark.parametrize("others", [{}, {1: [5]}], ids=["alone", "together"])
def test_a_window_that_is_not_rolled_back_shows(others):
    for fault in (False, True):
        memory = make(2, 3, ("no-conv-rollback",) if fault else ())
        assert_outputs(decode(memory, {0: [1, 2, 3, 4]}), 0, [1, 2, 3, 4], 4)
        assert_outputs(decode(memory, {0: [5]}), 0, [1, 2, 3, 4, 5], 1)
        memory.seq_rm(0, 4)
        out = decode(memory, {0: [9], **others})
        for row, text in enumerate([[1, 2, 3, 4, 9], [5]][: len(out[0])]):
            y, o = out[0][row, -1], out[1][row, -1]
            right, unaffected = (truth(LAYOUT, key, tuple(text))[1] for key in HEAD_GATES.keys[:2])
            assert close(y, right) != (fault and row == 0)
            assert close(o, unaffected)  # these tests' states do not depend on the convolution


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_operations_agree_with_decoding_from_scratch(data):
    walk(data, make, lambda cursor, n, bound: min(bound, (-1 if cursor is None else cursor) + n))
