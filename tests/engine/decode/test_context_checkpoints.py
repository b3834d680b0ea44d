"""Where context checkpoints are made, which one is found, and which one has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode.held_sequences import ContextCheckpoints, cuts
from engine.errors import OptionError
from engine.memory.state_file import SequenceCheckpoint
from engine.options import CacheOptions


def checkpoints(n_max: int = 32, min_step: int = 100, *lengths: int) -> ContextCheckpoints:
    kept = ContextCheckpoints(CacheOptions(n_max, min_step))
    for length in lengths:
        kept.add(SequenceCheckpoint(length - 1, None))
    return kept


@pytest.mark.parametrize("name", ["ctx_checkpoints", "checkpoint_min_step"])
def test_fewer_than_none_are_refused(name):
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}"):
        CacheOptions(**{name: -1})


def test_cuts_near_the_end_and_where_messages_start():
    assert cuts(1000, 512) == [484, 996]
    assert cuts(1000, 512, (30, 700)) == [30, 484, 700, 996]
    assert cuts(300, 512) == [296]
    assert cuts(4, 2) == cuts(1, 2) == []
    assert cuts(6, 2, (0, 2, 6)) == [2]


def test_places_that_are_worth_a_checkpoint():
    kept = checkpoints()
    assert not kept.wants(0, 1000, 64, ())
    assert not kept.wants(1000, 1000, 64, ())
    assert kept.wants(996, 1000, 64, ())
    assert kept.wants(932, 1000, 64, ())
    assert kept.wants(50, 1000, 64, (20, 50))  # the last message
    assert not kept.wants(20, 1000, 64, (20, 50))
    assert kept.wants(101, 1000, 64, ()) and not kept.wants(100, 1000, 64, ())
    kept = checkpoints(32, 100, 200)
    assert not kept.wants(300, 1000, 64, ()) and kept.wants(301, 1000, 64, ())
    assert not kept.wants(200, 202, 64, ())  # there is one
    assert not checkpoints(0).wants(996, 1000, 64, ())


def test_the_newest_that_fits():
    kept = checkpoints(32, 100, 40, 10, 25)
    found = [kept.newest(n) for n in (9, 10, 39, 99)]
    assert [one and one.pos_max + 1 for one in found] == [None, 10, 25, 40]
    kept.begin(25)
    assert kept.lengths == [10, 25]
    kept.begin(24)
    assert kept.lengths == [10]


def test_a_full_list_drops_what_lies_close_behind_another_then_the_oldest():
    kept = checkpoints(4, 100, 150, 300, 340, 500)
    kept.add(SequenceCheckpoint(599, None))  # all of one prompt: the oldest goes
    assert kept.lengths == [300, 340, 500, 600]
    kept.begin(600)
    kept.add(SequenceCheckpoint(609, None))
    assert kept.lengths == [300, 500, 600, 610]
    kept.add(
        SequenceCheckpoint(614, None)
    )  # 610 is close too, but of this prompt; 600 is not close
    assert kept.lengths == [500, 600, 610, 615]
    kept.add(SequenceCheckpoint(499, None))  # the same place: nothing goes
    assert kept.lengths == [500, 600, 610, 615]


@given(
    n_max=st.integers(1, 4),
    min_step=st.integers(0, 50),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=20),
)
def test_never_more_than_allowed_and_the_newest_stays(n_max, min_step, steps):
    kept = checkpoints(n_max, min_step)
    for is_prompt, length in steps:
        if is_prompt:
            kept.begin(length)
            assert all(one <= length for one in kept.lengths)
        else:
            kept.add(SequenceCheckpoint(length - 1, None))
            assert length in kept.lengths
        assert len(kept.lengths) <= n_max
