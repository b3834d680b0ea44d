"""The rolling carry: depth bookkeeping, accumulating rollback, what is copied."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.planes import CarryMemory
from tests.support.closeness import nmse
from tests.support.recurrent_texts import CPU, LAYOUT, LIMIT, assert_state, decode, truth


def memory_of(n_rs_seq: int, n_seqs: int = 3) -> CarryMemory:
    memory = CarryMemory(LAYOUT, n_seqs, n_rs_seq, CPU)
    memory.poison(math.nan)
    return memory


def states(memory: CarryMemory, seq: int) -> str:
    return " ".join(slot.state for slot in memory.slots(seq))


def ages(memory: CarryMemory, seq: int) -> list[int | None]:
    return [slot.age for slot in memory.slots(seq)]


def test_older_states_move_to_deeper_planes():
    memory = memory_of(3)
    decode(memory, {0: [1, 2]})
    decode(memory, {0: [3]})
    decode(memory, {0: [4]})
    assert (states(memory, 0), ages(memory, 0)) == ("live carried carried carried", [0, 1, 2, 3])
    assert memory.valid_depth(0) == 3
    assert memory.seq_rm(0, 1)
    assert states(memory, 0) == "fresh carried carried pending"
    assert_state(memory, 0, [1])


def test_rollbacks_add_up_until_the_next_pass():
    memory = memory_of(4)
    decode(memory, {0: list(range(8))})
    assert memory.seq_rm(0, 7) and memory.seq_rm(0, 6)
    assert (memory.pending(0), memory.valid_depth(0)) == (2, 2)
    assert_state(memory, 0, list(range(6)))
    assert memory.seq_rm(0, 4) and not memory.seq_rm(0, 3)
    decode(memory, {0: [20]})
    assert (memory.pending(0), memory.valid_depth(0)) == (0, 1)
    assert_state(memory, 0, [0, 1, 2, 3, 20])


def test_depth_bookkeeping_of_the_scenario():
    """I-8: a dry run that is not undone would leave R - 2 in place of R - 1."""
    bound, text = 4, [3, 1, 4, 1, 5, 9]
    for depth, possible in ((bound - 1, True), (bound, False)):
        memory = memory_of(bound)
        decode(memory, {0: text})
        assert memory.valid_depth(0) == bound and memory.seq_pos_max(0) == bound + 1
        assert memory.seq_rm(0, bound) and memory.seq_pos_max(0) == bound - 1
        decode(memory, {0: [2]})
        assert memory.valid_depth(0) == bound - 1
        assert memory.seq_rm(0, bound + 1 - depth) == possible


def test_sequences_of_different_history_in_one_pass():
    memory = memory_of(4)
    decode(memory, {0: [1, 2, 3, 4, 5, 6]})
    decode(memory, {1: [7]})
    memory.seq_rm(0, 4)
    decode(memory, {0: [10], 1: [11], 2: [12]})
    assert [memory.valid_depth(seq) for seq in range(3)] == [3, 2, 1]
    assert states(memory, 1) == "live carried carried free free"
    # plane 4 still holds the state after token 2, now three tokens ago: one place too deep
    assert (states(memory, 0), ages(memory, 0)[4]) == ("live carried carried carried stale", 3)
    for seq, text in enumerate([[1, 2, 3, 4, 10], [7, 11], [12]]):
        assert_state(memory, seq, text)
        for plane in range(memory.valid_depth(seq) + 1):
            assert_plane(memory, seq, plane, text)


def test_the_carry_is_what_is_copied():
    memory = memory_of(3)
    decode(memory, {0: list(range(9)), 1: list(range(9))})
    assert memory.traffic.copied == 0
    decode(memory, {0: [1]})
    assert memory.traffic.copied == 3 * LAYOUT.n_bytes
    decode(memory, {0: [1, 2], 1: [1, 2]})
    assert memory.traffic.copied == (3 + 2 * 2) * LAYOUT.n_bytes
    decode(memory, {0: [1, 2, 3, 4]})
    assert memory.traffic.copied == (3 + 2 * 2) * LAYOUT.n_bytes
    assert memory.traffic.written == (2 * 4 + 1 + 2 * 2 + 4) * LAYOUT.n_bytes


def test_relocation_and_restore_end_the_history():
    memory = memory_of(3)
    decode(memory, {seq: [10 * seq + i for i in range(4)] for seq in range(3)})
    memory.seq_rm(1, 3)
    decode(memory, {0: [50], 2: [52]})
    assert (memory.pending(1), memory.valid_depth(1)) == (0, 0)
    assert not memory.seq_rm(1, 2)
    assert states(memory, 1) == "live stale stale stale"
    decode(memory, {1: [60]})
    assert memory.valid_depth(1) == 1
    assert memory.seq_rm(1, 3)
    assert_state(memory, 1, [10, 11, 12])
    memory.restore(2, memory.save(1))
    assert memory.valid_depth(2) == 0 and not memory.seq_rm(2, 1)
    assert_state(memory, 2, [10, 11, 12])


def test_a_copy_shares_history_and_takes_it_along():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4, 5]})
    memory.seq_rm(0, 4)
    memory.seq_cp(0, 1)
    assert memory.pending(1) == 1
    assert memory.valid_depth(0) == memory.valid_depth(1) == 0
    assert not memory.seq_rm(1, 3)
    decode(memory, {1: [6]})
    assert memory.valid_depth(1) == 3 and memory.valid_depth(0) == 2
    assert memory.seq_rm(1, 2) and memory.seq_rm(0, 3)
    assert_state(memory, 1, [1, 2])
    assert_state(memory, 0, [1, 2, 3])
    memory.seq_cp(2, 1)  # of an empty sequence
    assert (memory.seq_pos_max(1), memory.pending(1), memory.valid_depth(1)) == (-1, 0, 0)


def test_clear_and_keep_reset_the_depth():
    memory = memory_of(3)
    decode(memory, {seq: [1, 2, 3, 4] for seq in range(3)})
    for seq in range(3):
        memory.seq_rm(seq, 3)
    memory.seq_rm(0, 0)
    memory.seq_keep(1)
    assert [memory.pending(seq) for seq in range(3)] == [0, 1, 0]
    assert [memory.valid_depth(seq) for seq in range(3)] == [0, 2, 0]


def test_a_finer_split_leaves_the_same_planes():
    """One text, cut into passes of every size: planes 0 .. R are those of a single pass."""
    text = list(range(11))
    for cut in range(1, 9):
        memory = memory_of(5)
        for start in range(0, len(text), cut):
            decode(memory, {0: text[start : start + cut]})
        assert memory.valid_depth(0) == 5
        for plane in range(6):
            assert_plane(memory, 0, plane, text)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), bound=st.sampled_from([1, 2, 3, 8]))
def test_every_plane_down_to_the_depth_is_true(data, bound):
    """INV1 and INV5, with the depth formula of llama.cpp #25004 kept next to."""
    memory = memory_of(bound, 2)
    texts: list[list[int]] = [[], []]
    depths, pending = [0, 0], [0, 0]
    for _ in range(data.draw(st.integers(1, 12))):
        seq = data.draw(st.integers(0, 1))
        if not texts[seq] or data.draw(st.booleans()):
            n = data.draw(st.integers(1, 9))
            seqs = [seq] if data.draw(st.booleans()) else [seq, 1 - seq]
            new = {s: data.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n)) for s in seqs}
            decode(memory, new)
            for s in seqs:
                texts[s] = texts[s] + new[s]
                depths[s] = min(bound, max(0, depths[s] - pending[s]) + n)
                pending[s] = 0
        else:
            back = data.draw(st.integers(1, len(texts[seq])))
            possible = pending[seq] + back <= depths[seq] or back == len(texts[seq])
            assert memory.seq_rm(seq, len(texts[seq]) - back) == possible
            if possible:
                texts[seq] = texts[seq][:-back]
                pending[seq] += back
            if not texts[seq]:
                depths[seq] = pending[seq] = 0
        for s in range(2):
            assert memory.pending(s) == pending[s] <= depths[s] <= bound
            assert memory.valid_depth(s) == depths[s] - pending[s]
            for plane in range(pending[s], min(depths[s], pending[s] + len(texts[s]) - 1) + 1):
                assert_plane(memory, s, plane, texts[s])


def assert_plane(memory: CarryMemory, seq: int, plane: int, text: list[int]) -> None:
    """Plane r holds the state and the window after all but the last r - pending tokens."""
    back = plane - memory.pending(seq)
    wanted = tuple(text[: len(text) - back])
    row = plane, memory.cells.tail[seq]
    for key, tensor in zip(LAYOUT.states, memory._storage, strict=True):
        assert nmse(tensor[row], truth(LAYOUT, key, wanted)[0]) <= LIMIT if wanted else True
