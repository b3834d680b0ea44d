"""A base state and a log against states computed from scratch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import UBatch
from engine.memory.planes import PlanesMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.model.recurrence import ConvWindow, RecurrentLayout
from engine.model.recurrent_states import DeltaState
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


def make(n_seqs: int, n_rs_seq: int, faults: tuple[str, ...] = ()) -> ReplayMemory:
    memory = ReplayMemory(LAYOUT, n_seqs, n_rs_seq, CPU, faults)
    memory.poison(math.nan)
    return memory


def states(memory: SnapshotPolicy, seq: int) -> str:
    return " ".join(slot.state for slot in memory.slots(seq))


def test_slots_are_the_base_and_the_logged_tokens():
    memory = make(2, 3)
    decode(memory, {0: [1, 2]})
    assert states(memory, 0) == "carried fresh live free free"
    assert states(memory, 1) == "free free free free free"
    decode(memory, {0: [3, 4, 5, 6, 7, 8]})
    assert states(memory, 0) == "carried fresh fresh fresh live"
    assert memory.seq_rm(0, 7) and memory.seq_rm(0, 6)
    assert states(memory, 0) == "carried fresh pending stale stale"
    assert [slot.age for slot in memory.slots(0)] == [4, 3, 2, 1, 0]
    memory.restore(1, memory.save(0))
    assert states(memory, 1) == "live free free free free"


def test_a_rollback_moves_the_cursor_back():
    memory = make(1, 4)
    text = [1, 2, 3, 4, 5, 6, 7]
    decode(memory, {0: text})
    assert memory.seq_rm(0, 6) and memory.seq_rm(0, 4)
    # the log reaches further back, but all rollbacks together stay within R
    assert (memory.pending(0), memory.valid_depth(0), memory.seq_pos_max(0)) == (3, 1, 3)
    assert_state(memory, 0, text[:4])
    before = copies(memory, 0)
    assert not memory.seq_rm(0, 2)
    assert same(copies(memory, 0), before)
    assert memory.seq_rm(0, 3)
    out = decode(memory, {0: [9]})
    assert_outputs(out, 0, [1, 2, 3, 9], 1)
    assert_state(memory, 0, [1, 2, 3, 9])
    # the base was moved on to token 3: nothing before it can be reached
    assert memory.valid_depth(0) == 1


def test_a_whole_batch_is_rolled_back_and_more_is_not():
    memory = make(1, 4)
    decode(memory, {0: [1, 2, 3]})
    decode(memory, {0: [4, 5, 6, 7]})
    assert memory.seq_rm(0, 3)
    assert (memory.pending(0), memory.valid_depth(0)) == (4, 0)
    assert_state(memory, 0, [1, 2, 3])
    assert not memory.seq_rm(0, 2)
    decode(memory, {0: [8]})
    assert_state(memory, 0, [1, 2, 3, 8])


@pytest.mark.parametrize("n_draft", [16, 64])
def test_long_drafts(n_draft):
    memory = make(1, n_draft)
    prompt = list(range(100))
    decode(memory, {0: prompt})
    assert memory.valid_depth(0) == n_draft
    draft = list(range(100, 101 + n_draft))
    out = decode(memory, {0: draft})
    assert_outputs(out, 0, prompt + draft, len(draft))
    for n_accepted in (n_draft, n_draft // 2, 1):
        assert memory.seq_rm(0, 100 + n_accepted)
        assert_state(memory, 0, prompt + draft[:n_accepted])
    assert memory.valid_depth(0) == 0


def test_nothing_is_copied_by_a_rollback():
    memory = make(2, 3)
    decode(memory, {0: [1, 2, 3], 1: [4, 5, 6]})
    for _ in range(3):
        memory.seq_rm(0, memory.seq_pos_max(0))
        memory.seq_rm(1, memory.seq_pos_max(1) - 1)
        decode(memory, {0: [7, 8], 1: [9, 10]})
    assert memory.traffic.copied == 0


def test_only_an_unchanged_state_that_moves_counts_as_copied():
    memory = make(2, 3)
    decode(memory, {0: [1, 2, 3]})
    memory.seq_cp(0, 1)
    decode(memory, {1: [4]})  # folded into a row of its own
    assert memory.traffic.copied == 0
    memory.restore(0, memory.save(1))
    memory.seq_cp(0, 1)
    decode(memory, {1: [5]})  # nothing to fold
    assert memory.traffic.copied == LAYOUT.n_bytes
    assert_state(memory, 0, [1, 2, 3, 4])
    assert_state(memory, 1, [1, 2, 3, 4, 5])


def test_written_bytes_are_log_entries_and_folded_states():
    memory = make(1, 3)
    state, token = LAYOUT.n_bytes, 4 * 2 * (2 * 8 + 4 * 8 + 4 + 64)
    decode(memory, {0: [1, 2]})
    written = 2 * token
    assert memory.traffic.written == written
    decode(memory, {0: [3, 4, 5]})
    written += state + 3 * token
    assert memory.traffic.written == written
    memory.seq_rm(0, 2)
    decode(memory, {0: [6, 7, 8, 9, 10]})  # nothing to fold, but one token too many for the log
    assert memory.traffic.written == written + state + 4 * token


def test_a_draft_of_16_needs_a_twentieth_of_what_planes_need():
    """16 heads of 128 x 128 and 6144 channels: storage of one sequence beyond the live state."""
    state, window = DeltaState(16, 16, 128, grouped=False), ConvWindow(4, 6144)
    layout = RecurrentLayout.alike((0,), state=state, window=window)
    n_draft = 16
    ours, planes = (
        sum(t.numel() * t.element_size() for t in policy(layout, 1, n_draft, CPU)._storage)
        - layout.n_bytes
        for policy in (ReplayMemory, PlanesMemory)
    )
    assert planes == n_draft * layout.n_bytes
    assert 0 < ours <= planes / 20
    # a row of log and a column for each token: no d_state * d_state in it
    assert ours == (n_draft + 1) * 4 * (16 * 128 + 16 * 128 + 16 + 6144)


def test_without_rollback_it_holds_one_state_and_one_token():
    memory = make(1, 0)
    assert memory.n_bytes() - LAYOUT.n_bytes == 4 * 2 * (2 * 8 + 4 * 8 + 4 + 64)
    decode(memory, {0: [1, 2, 3]})
    decode(memory, {0: [4]})
    assert_state(memory, 0, [1, 2, 3, 4])
    assert memory.valid_depth(0) == 0 and not memory.seq_rm(0, 3)


def test_the_base_is_folded_where_it_lies():
    memory = make(1, 4)
    decode(memory, {0: [1, 2, 3]})
    places = {t.data_ptr() for t in memory._storage}
    decode(memory, {0: [4, 5]})
    assert {t.data_ptr() for t in memory._storage} == places
    # what is stored is the state before the logged tokens
    memory.seq_rm(0, 3)
    assert_state(memory, 0, [1, 2, 3])


def test_copies_share_a_row_and_differ_in_their_cursors():
    memory = make(3, 3)
    decode(memory, {0: [1, 2, 3, 4]})
    memory.seq_cp(0, 1)
    memory.seq_cp(1, 2)
    assert memory.seq_rm(1, 2) and memory.seq_rm(2, 3)
    for seq, text in enumerate(([1, 2, 3, 4], [1, 2], [1, 2, 3])):
        assert_state(memory, seq, text)
    out = decode(memory, {2: [5, 6], 0: [7, 8], 1: [9, 10]})
    for row, (seq, text) in enumerate(
        [(2, [1, 2, 3, 5, 6]), (0, [1, 2, 3, 4, 7, 8]), (1, [1, 2, 9, 10])]
    ):
        assert_outputs(out, row, text, 2)
        assert_state(memory, seq, text)


@pytest.mark.parametrize("n_new", [1, 3, 7])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["side by side", "anywhere"])
def test_sequences_with_other_cursors_in_one_batch(order, n_new):
    memory = make(4, 3)
    decode(memory, {seq: [10 * seq + i for i in range(4)] for seq in (0, 1)})
    memory.seq_rm(0, 2)
    memory.seq_rm(1, 3)
    texts = [[0, 1], [10, 11, 12], [], []]
    new = {seq: [40 + seq + i for i in range(n_new)] for seq in order}
    out = decode(memory, new)
    for row, seq in enumerate(order):
        assert_outputs(out, row, texts[seq] + new[seq], n_new)
        assert_state(memory, seq, texts[seq] + new[seq])
    assert_state(memory, 3, [])


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


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random_operations_agree_with_decoding_from_scratch(data):
    walk(data, make, lambda cursor, n, bound: min(n, bound))
