"""Placement of sequences in cells: swaps, idle cells in the range, copies, new sequences."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.cells import NONE, RecurrentCells, UBatchCells


def assert_consistent(cells: RecurrentCells) -> None:
    """Every cell that a tail names holds that sequence; no sequence is in two cells."""
    for seq in range(cells.n_cells):
        held = [cell for cell, owners in enumerate(cells.owners) if seq in owners]
        assert held == ([] if cells.tail[seq] == NONE else [cells.tail[seq]])
    for cell, owners in enumerate(cells.owners):
        assert cells.src[cell] == (cell if owners else NONE)


def placed(cells: RecurrentCells, *seqs: int) -> UBatchCells:
    slot = cells.find_slot(seqs)
    assert slot is not None
    assert_consistent(cells)
    return slot


def test_a_new_sequence_reads_a_zeroed_row():
    cells = RecurrentCells(4)
    assert placed(cells, 2) == UBatchCells(0, (0,), range(1, 1), zero=0)
    assert placed(cells, 2) == UBatchCells(0, (0,), range(1, 1), zero=NONE)


def test_new_and_old_sequences_side_by_side():
    cells = RecurrentCells(4)
    placed(cells, 0)
    assert placed(cells, 0, 1, 2) == UBatchCells(0, (0, 1, 1), range(3, 3), zero=1)
    assert cells.tail == [0, 1, 2, NONE]


def test_the_rows_of_a_ubatch_become_neighbours_and_idle_cells_give_way():
    """The active-gap case of llama.cpp #25004: what moves is the idle sequence between."""
    cells = RecurrentCells(4)
    for seq in (1, 3, 2, 0):
        placed(cells, seq)
    assert cells.tail == [3, 0, 2, 1]
    slot = placed(cells, 1, 2)
    assert slot == UBatchCells(0, (0, 2), range(2, 3), zero=NONE)
    assert cells.tail == [3, 0, 1, 2]
    assert (cells.src0[2], cells.src[2]) == (1, 2)


def test_the_order_of_the_rows_is_the_order_of_the_cells():
    cells = RecurrentCells(3)
    placed(cells, 0, 1, 2)
    assert placed(cells, 2, 0, 1) == UBatchCells(0, (2, 0, 1), range(3, 3), zero=NONE)
    assert cells.tail == [1, 2, 0]


def test_a_shared_cell_is_left_by_the_one_that_decodes():
    cells = RecurrentCells(3)
    placed(cells, 0)
    cells.seq_cp(0, 2)
    assert cells.shared(0) and cells.shared(2)
    assert placed(cells, 0) == UBatchCells(1, (0,), range(2, 2), zero=NONE)
    assert cells.tail == [1, NONE, 0]
    assert not cells.shared(0) and not cells.shared(2)


def test_both_owners_of_a_cell_in_one_ubatch_read_the_same_row():
    cells = RecurrentCells(2)
    placed(cells, 1)
    cells.seq_cp(1, 0)
    assert placed(cells, 0, 1).sources == (0, 0)


def test_a_full_table_still_places_every_sequence():
    cells = RecurrentCells(3)
    placed(cells, 0)
    cells.seq_cp(0, 1)
    cells.seq_cp(0, 2)
    for seq in (2, 1, 0):
        placed(cells, seq)
    assert cells.used() == 3


def test_a_copy_is_independent():
    cells = RecurrentCells(4)
    placed(cells, 3, 1)
    before, other = copy.deepcopy(vars(cells)), cells.copy()
    assert vars(other) == before
    placed(other, 1, 2)
    other.seq_cp(1, 0)
    other.release(3)
    assert vars(cells) == before


def test_released_cells_are_used_again():
    cells = RecurrentCells(2)
    placed(cells, 0, 1)
    cells.release(0)
    assert cells.tail[0] == NONE and cells.used() == 1
    assert placed(cells, 0) == UBatchCells(0, (0,), range(1, 1), zero=0)


@pytest.mark.parametrize(("n_before", "first"), [(3, 2), (4, 0)])
def test_the_search_starts_over_when_it_has_left_enough_room_behind(n_before, first):
    """At 2 cells per row beyond those in use."""
    cells = RecurrentCells(6)
    for seq in range(n_before):
        placed(cells, seq)
    for seq in range(n_before):
        cells.release(seq)
    assert placed(cells, 5).first == first


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_operations_follow_a_model_of_the_rows(data):
    """rows[cell]: what a forward pass would have left in storage; sequences must find their own."""
    n = data.draw(st.integers(1, 5))
    cells, rows, texts = RecurrentCells(n), ["?"] * n, [""] * n
    seqs = st.integers(0, n - 1)
    for step in range(data.draw(st.integers(1, 15))):
        operation, seq = data.draw(st.sampled_from("ddddcrp")), data.draw(seqs)
        if operation == "d":
            active = data.draw(st.lists(seqs, min_size=1, unique=True))
            slot = placed(cells, *active)
            if slot.zero != NONE:
                rows[slot.zero] = ""
            read = [rows[source] for source in slot.sources]
            idle = [(c, rows[cells.src0[c]]) for c in slot.idle if cells.owners[c]]
            for cell, text in idle:
                rows[cell] = text
            for cell, one, text in zip(range(slot.first, n), active, read, strict=False):
                rows[cell], texts[one] = text + f"{step} ", texts[one] + f"{step} "
        elif operation == "c":
            other = data.draw(seqs)
            cells.seq_cp(other, seq)
            texts[seq] = texts[other]
        elif operation == "r":
            cells.release(seq)
            texts[seq] = ""
        else:
            cells.release(seq)
            rows[cells.claim(seq)] = texts[seq] = f"put{step} "
        assert_consistent(cells)
        for one, text in enumerate(texts):
            assert (cells.tail[one] == NONE) == (text == "")
            assert not text or rows[cells.tail[one]] == text
