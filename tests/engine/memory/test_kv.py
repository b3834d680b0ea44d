"""Attention cells: found by position, freed by range, counted when double."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ContextFullError
from engine.memory.batch import Piece, Span, make_ubatch
from engine.memory.kv import AttentionKV

CPU = torch.device("cpu")


def ubatch_of(*spans: Span):
    n = len(spans[0].tokens)
    piece = Piece(tuple(range(len(spans))), (0,) * len(spans), n, "")
    return make_ubatch(list(spans), piece, CPU)


def write(kv: AttentionKV, seq: int, pos0: int, n: int):
    """Write keys that carry their position, values that carry its negative."""
    kv.begin(ubatch_of(Span(seq, pos0, [0] * n, [])))
    k = torch.arange(pos0, pos0 + n, dtype=torch.float32).view(1, n, 1, 1).expand(1, n, 2, 4)
    return kv.update(0, k, -k)


def seen(view, row: int = 0, query: int = -1) -> list[int]:
    return sorted(view.k[row, 0, view.mask[row, query], 0].int().tolist())


def test_a_query_sees_what_came_before_it():
    kv = AttentionKV([0], 2, 2, 4, 64, CPU)
    view = write(kv, 1, 0, 3)
    assert [seen(view, query=i) for i in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert seen(write(kv, 1, 3, 1)) == [0, 1, 2, 3]
    assert kv.used(0) == 0 and kv.seq_pos_max(0) == -1 and kv.seq_pos_max(1) == 3


def test_removed_cells_are_used_again_and_never_seen():
    kv = AttentionKV([0], 1, 2, 4, 8, CPU)
    write(kv, 0, 0, 8)
    kv.seq_rm(0, 5)
    view = write(kv, 0, 5, 1)
    assert seen(view) == [0, 1, 2, 3, 4, 5]
    assert kv.used(0) == 6
    kv.seq_rm(0, 2, 4)
    assert seen(write(kv, 0, 6, 2)) == [0, 1, 4, 5, 6, 7]


def test_growth_keeps_the_cells():
    kv = AttentionKV([0], 1, 2, 4, 5000, CPU)
    write(kv, 0, 0, 200)
    small = kv.n_bytes()
    assert seen(write(kv, 0, 200, 700)) == list(range(900))
    assert kv.n_bytes() > small


def test_full_context_is_an_error_that_changes_nothing():
    kv = AttentionKV([0], 1, 2, 4, 8, CPU)
    write(kv, 0, 0, 6)
    with pytest.raises(ContextFullError, match="context of 8 is full"):
        write(kv, 0, 6, 3)
    assert kv.used(0) == 6
    assert seen(write(kv, 0, 6, 2)) == list(range(8))


def test_duplicates_are_counted():
    kv = AttentionKV([0], 1, 2, 4, 32, CPU)
    write(kv, 0, 0, 6)
    assert kv.duplicates(0) == 0
    write(kv, 0, 4, 3)
    assert kv.duplicates(0) == 2
    assert kv.used(0) == 9


def test_sequences_of_unequal_length_side_by_side():
    kv = AttentionKV([0], 3, 2, 4, 64, CPU)
    write(kv, 0, 0, 5)
    write(kv, 2, 0, 2)
    kv.begin(ubatch_of(Span(0, 5, [0], []), Span(2, 2, [0], [])))
    k = torch.tensor([5.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 2, 4)
    view = kv.update(0, k, -k)
    assert seen(view, 0) == [0, 1, 2, 3, 4, 5]
    assert seen(view, 1) == [0, 1, 2]
    assert torch.isfinite(view.k).all()
