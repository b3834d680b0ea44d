"""Snapshot planes against states recomputed from scratch."""

from __future__ import annotations

import math

import pytest
import torch

from engine.memory.planes import PlanesMemory
from engine.memory.policies import POLICIES
from tests.support.recurrent_texts import CPU, LAYOUT, assert_state, copies, decode, same, ubatch_of


def memory_of(n_rs_seq: int, n_seqs: int = 3, faults: tuple[str, ...] = ()) -> PlanesMemory:
    memory = PlanesMemory(LAYOUT, n_seqs, n_rs_seq, CPU, faults)
    memory.poison(math.nan)
    return memory


def states(memory: PlanesMemory, seq: int) -> str:
    return " ".join(slot.state for slot in memory.slots(seq))


def ages(memory: PlanesMemory, seq: int) -> list[int | None]:
    return [slot.age for slot in memory.slots(seq)]


def test_worked_example():
    memory = memory_of(3)
    prompt = list(range(10))
    decode(memory, {0: prompt})
    decode(memory, {0: [20, 21, 22, 23]})
    assert memory.seq_rm(0, 12)
    assert (memory.pending(0), memory.seq_pos_max(0)) == (2, 11)
    assert states(memory, 0) == "fresh fresh pending fresh"
    assert_state(memory, 0, [*prompt, 20, 21])
    decode(memory, {0: [30]})
    assert memory.pending(0) == 0
    assert_state(memory, 0, [*prompt, 20, 21, 30])
    # plane 1 held a rejected token; 2 and 3 hold true states, but not where they would be read
    assert (states(memory, 0), ages(memory, 0)) == ("live stale stale stale", [0, None, 1, 2])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stale_plane_is_refused(depth):
    """A single-token step makes one plane fresh: no rollback is truthful (llama.cpp #29117)."""
    memory = memory_of(3)
    decode(memory, {0: list(range(9))})
    decode(memory, {0: [50]})
    before = [t.clone() for t in memory._storage]
    assert memory.valid_depth(0) == 0
    assert not memory.seq_rm(0, 10 - depth)
    assert memory.seq_pos_max(0) == 9
    for got, want in zip(memory._storage, before, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert (states(memory, 0), ages(memory, 0)) == ("live stale stale stale", [0, 2, 3, 4])


def test_a_pending_rollback_is_used_once():
    memory = memory_of(4)
    decode(memory, {0: list(range(6))})
    assert memory.seq_rm(0, 5)
    assert not memory.seq_rm(0, 4)
    assert_state(memory, 0, list(range(5)))


def test_removals_that_touch_nothing():
    memory = memory_of(2)
    decode(memory, {0: [1, 2, 3]})
    assert memory.seq_rm(0, 3) and memory.seq_rm(0, 0, 2) and memory.seq_rm(1, 0)
    assert_state(memory, 0, [1, 2, 3])
    assert not memory.seq_rm(3, 0) and not memory.seq_rm(-1, 1)


@pytest.mark.parametrize("p1", [-1, 2, 9])
def test_full_removal_forgets_a_pending_rollback(p1):
    """Upstream keeps the pending index when the range has an end, and reads a wrong plane next."""
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4]})
    assert memory.seq_rm(0, 2)
    assert memory.seq_rm(0, 0, p1)
    assert (memory.pending(0), memory.valid_depth(0)) == (0, 0)
    assert states(memory, 0) == "free free free free"
    decode(memory, {0: [5]})
    assert_state(memory, 0, [5])


def test_restore_clears_what_was_pending():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3]})
    memory.seq_rm(0, 2)
    saved = memory.save(0)  # the logical state, one token back
    decode(memory, {1: [7, 8, 9, 10]})
    memory.seq_rm(1, 2)
    memory.restore(1, saved)
    assert (memory.pending(1), memory.valid_depth(1)) == (0, 0)
    assert not memory.seq_rm(1, 1)
    assert states(memory, 1) == "live free free free"
    assert_state(memory, 1, [1, 2])
    assert saved.n_bytes == LAYOUT.n_bytes


def test_an_idle_sequence_in_between_moves_and_loses_its_planes():
    memory = memory_of(3)
    texts = {seq: [10 * seq + i for i in range(4)] for seq in range(3)}
    decode(memory, texts)
    assert memory.seq_rm(1, 2)
    copied = memory.traffic.copied
    decode(memory, {0: [50], 2: [52]})
    assert memory.cells.tail == [0, 2, 1]
    assert memory.traffic.copied - copied == LAYOUT.n_bytes
    assert (memory.pending(1), memory.valid_depth(1)) == (0, 0)
    assert states(memory, 1) == "live stale stale stale"
    assert not memory.seq_rm(1, 1)
    for seq, text in enumerate([[*texts[0], 50], [10, 11], [*texts[2], 52]]):
        assert_state(memory, seq, text)


@pytest.mark.parametrize("back", [0, 2])
def test_an_idle_sequence_that_keeps_its_cell_moves_only_out_of_a_pending_plane(back):
    memory = memory_of(3, n_seqs=4)
    decode(memory, {seq: [10 * seq + i for i in range(4)] for seq in range(4)})
    assert memory.seq_rm(2, 4 - back)
    decode(memory, {0: [40], 3: [43]})
    assert memory.cells.tail == [0, 3, 2, 1]
    assert memory.pending(2) == 0
    assert memory.valid_depth(2) == (0 if back else 3)
    assert memory.traffic.copied == (2 if back else 1) * LAYOUT.n_bytes
    assert_state(memory, 2, [20, 21, 22, 23][: 4 - back])


def test_a_shared_cell_refuses_partial_rollbacks_until_it_is_left():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4]})
    memory.seq_cp(0, 2)
    assert memory.valid_depth(0) == memory.valid_depth(2) == 0
    assert not memory.seq_rm(0, 3) and not memory.seq_rm(2, 3)
    copied = memory.traffic.copied
    decode(memory, {2: [5]})  # copy-on-write by reading there and writing here
    assert memory.traffic.copied == copied
    assert_state(memory, 2, [1, 2, 3, 4, 5])
    assert states(memory, 2) == "live stale stale stale"
    assert memory.seq_rm(0, 2)
    assert_state(memory, 0, [1, 2])


def test_a_copy_of_a_rolled_back_sequence_starts_there():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4]})
    memory.seq_rm(0, 2)
    memory.seq_cp(0, 1)
    assert memory.pending(1) == 2
    decode(memory, {1: [7]})
    assert_state(memory, 1, [1, 2, 7])
    assert memory.pending(0) == 2
    decode(memory, {0: [8]})
    assert_state(memory, 0, [1, 2, 8])


def test_a_shared_idle_cell_moves_for_all_its_owners():
    memory = memory_of(3, n_seqs=4)
    for seq in range(3):
        decode(memory, {seq: [10 * seq + i for i in range(4)]})
    assert memory.seq_rm(1, 2)
    memory.seq_cp(1, 3)
    decode(memory, {0: [40], 2: [42]})
    assert memory.cells.tail == [0, 2, 1, 2]
    assert memory.pending(1) == memory.pending(3) == 0
    assert_state(memory, 1, [10, 11])
    assert_state(memory, 3, [10, 11])
    memory.seq_rm(1, 0)
    assert memory.valid_depth(3) == 0 and not memory.seq_rm(3, 1)


def test_a_removed_copy_leaves_the_original_its_planes():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4]})
    memory.seq_cp(0, 1)
    memory.seq_keep(0)
    assert memory.seq_pos_max(1) == -1
    assert memory.seq_rm(0, 1)
    assert_state(memory, 0, [1])


def test_shifting_moves_the_position_only():
    memory = memory_of(3)
    decode(memory, {0: [1, 2, 3, 4]})
    before = copies(memory, 0)
    memory.seq_add(0, 2, -1, -2)
    assert memory.seq_pos_max(0) == 1
    assert same(copies(memory, 0), before)
    decode(memory, {0: [5]})
    assert memory.seq_pos_max(0) == 2


@pytest.mark.parametrize("seqs", [(1, 1), (0, 3)])
def test_coupled_and_unknown_sequences_are_refused_before_anything_changes(seqs):
    memory = memory_of(2)
    decode(memory, {0: [1, 2, 3]})
    ubatch = ubatch_of({0: [1], 1: [2]}, memory)
    bad = type(ubatch)(ubatch.tokens, ubatch.positions, seqs, ubatch.outputs)
    before = copies(memory, 0)
    assert not memory.prepare([ubatch, bad])
    with pytest.raises(ValueError, match="distinct"):
        memory.begin(bad)
    assert same(copies(memory, 0), before)
    assert memory.seq_rm(0, 1) and memory.cells.tail == [0, -1, -1]


def test_a_pass_that_is_not_finished_changes_no_bookkeeping():
    memory = memory_of(2)
    decode(memory, {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8, 9]})
    memory.begin(ubatch_of({2: [1], 0: [2]}, memory))
    assert memory.cells.tail == [0, 1, 2]
    assert [memory.seq_pos_max(seq) for seq in range(3)] == [2, 2, 2]
    decode(memory, {1: [5]})
    assert_state(memory, 2, [7, 8, 9])


def test_a_pass_writes_as_many_planes_as_it_has_tokens():
    memory = memory_of(3)
    decode(memory, {0: list(range(9)), 1: list(range(9))})
    assert memory.traffic.written == 2 * 4 * LAYOUT.n_bytes
    decode(memory, {1: [1, 2]})
    assert memory.traffic.written == (2 * 4 + 2) * LAYOUT.n_bytes
    assert memory.traffic.copied == 0
    assert memory.n_bytes() == 3 * 4 * LAYOUT.n_bytes


def test_guaranteed_depth_counts_the_last_pass_only():
    memory = memory_of(3)
    decode(memory, {0: list(range(9))})
    assert [memory.guaranteed_depth(0, n) for n in (1, 2, 4, 9)] == [0, 1, 3, 3]


def test_the_fault_stale_plane_reads_a_wrong_state():
    memory = memory_of(3, faults=("stale-plane",))
    decode(memory, {0: list(range(9))})
    decode(memory, {0: [50]})
    assert memory.valid_depth(0) == 3
    assert memory.seq_rm(0, 8)
    with pytest.raises(AssertionError):
        assert_state(memory, 0, list(range(8)))


def test_checkpoint_keeps_one_state_and_refuses_every_partial_rollback():
    memory = POLICIES["checkpoint"](LAYOUT, 2, 5, CPU)
    decode(memory, {0: list(range(9))})
    assert memory.n_rs_seq == memory.valid_depth(0) == memory.guaranteed_depth(0, 9) == 0
    assert not memory.seq_rm(0, 8)
    assert states(memory, 0) == "live"
    assert memory.n_bytes() == 2 * LAYOUT.n_bytes
    saved = memory.save(0)
    decode(memory, {0: [50]})
    memory.restore(0, saved)
    assert_state(memory, 0, list(range(9)))
    assert memory.traffic.saved == memory.traffic.restored == LAYOUT.n_bytes
