"""Any two values of different parameters meet, in few of all mixes."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.support.all_pairs import all_pairs, rows_of_all_pairs

COLUMNS = ((4, 5, 4, 2), (11, 5, 4, 2, 2), (20, 6, 3), (2, 2, 2), (2,) * 7, (3, 1, 4))


def pairs(row):
    return set(combinations(enumerate(row), 2))


@pytest.mark.parametrize("sizes", COLUMNS, ids=str)
def test_every_pair_is_there(sizes):
    columns = [[f"{i}{j}" for j in range(n)] for i, n in enumerate(sizes)]
    rows = all_pairs(*columns)
    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, product(*columns)))
    least = prod(sorted(sizes)[-2:])
    assert len(set(rows)) == len(rows) <= 2.5 * least
    assert rows == all_pairs(*columns)


def test_of_given_rows_those_that_miss_nothing():
    rows = [row for row in product(range(3), range(3), range(4)) if sum(row) != 4]
    chosen = [rows[place] for place in rows_of_all_pairs(rows)]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, rows))
    assert len(chosen) < len(rows)


SEEN = set()


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4), (5, 6)])
@pytest.mark.parametrize("c", [[], {}, None])
@pytest.mark.parametrize("d", "xyz")
def test_cases_of_three_parameters(a, b, c, d):
    SEEN.add(((a, b), str(c), d))


def test_they_were_those_of_all_pairs(request):
    assert set().union(*map(pairs, SEEN)) == set().union(
        *map(pairs, product([(1, 2), (3, 4), (5, 6)], ["[]", "{}", "None"], "xyz"))
    )
    assert len(SEEN) == 27 if request.config.getoption("all") else 9 <= len(SEEN) < 18


BOARD, THIN, AGAIN = set(), set(), set()


@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", [[], {}, None])
def test_cases_of_two_parameters(a, b):
    BOARD.add((a, str(b)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("a", "b"), [(0, "x"), (1, "x"), (2, "y"), (3, "y"), (4, "y"), (5, "z"), (6, "w"), (7, "z")]
)
def test_cases_of_a_thinned_test(a, b):
    THIN.add((a, b))


@pytest.mark.repeats("test_cases_of_a_thinned_test")
def test_what_another_test_shows():
    AGAIN.add(1)


def test_which_of_them_were_played(request):
    """Each value of a board with every second one of the other parameter; one of three, and the
    first of a value that several cases share (z) where that one has none of it."""
    if request.config.getoption("all"):
        assert (len(BOARD), len(THIN), len(AGAIN)) == (12, 8, 1)
        return
    assert len(BOARD) == 6
    assert {a for a, _ in BOARD} == set(range(4))
    assert {b for _, b in BOARD} == {"[]", "{}", "None"}
    assert sorted(THIN) == [(0, "x"), (3, "y"), (5, "z"), (6, "w")]
    assert not AGAIN
