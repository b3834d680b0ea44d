"""Shares of the right parts of an output or a state, named as a quantity of the pass."""

from __future__ import annotations

import pytest
import torch

from engine.conform import fits
from engine.conform.cases import Shape, Source
from engine.conform.reference import correction, play, step, terms, token
from engine.conform.shares import Quantities, channels, shares

SHAPE = Shape("gdn", 4, 2, 16, 16, 3, 2)


@pytest.fixture(scope="module")
def rows():
    source = Source(SHAPE, 3)
    drawn = source.rows([0, 1], [3, 3])
    batch = [terms(SHAPE, token(drawn, i)) for i in range(6)]
    return source.state().double(), batch


def found(rows, seen, last=False, sought=()):
    """What is said of row 4, the second of sequence 1."""
    state, batch = rows
    first = step(SHAPE, state, batch[3])[1]
    whole = batch[3]["decay"] * state
    known = Quantities(SHAPE, batch, 3, 3, 4)
    kept = [("the state before the pass", whole, 3, False)]
    kept.append(("what row 3 wrote", first - whole, 4, True))
    parts = kept if last else [("the state before", first, 4, False)]
    return shares(SHAPE, parts, batch[4], seen, 1e-6, last, known, sought)


def made(rows, at, **others):
    state, batch = rows
    return step(SHAPE, step(SHAPE, state, batch[3])[1], batch[at] | others)


def test_what_is_right_has_no_other_shares(rows):
    assert found(rows, made(rows, 4)[0]) is None


def test_outputs_times_one_constant_have_a_wrong_scale(rows):
    right = made(rows, 4)[0]
    assert found(rows, 3 * right)[0] == "wrong-scale"
    each = torch.tensor([3.0, 2.0, 3.0, 1.5])[:, None]
    assert found(rows, each * right)[0] == "wrong-norm"


@pytest.mark.parametrize(
    ("name", "row", "cause", "words"),
    [
        ("decay", 5, "gate-of-other-row", "the decay is taken with the decay of row 5"),
        ("decay", 1, "other-sequence", "the decay is taken with the decay of row 1"),
        ("beta", 2, "other-sequence", "the row writes (beta) is taken with the beta of row 2"),
    ],
)
def test_a_quantity_of_another_row_is_found_by_its_value(rows, name, row, cause, words):
    said = found(rows, made(rows, 4, **{name: rows[1][row][name]})[0])
    assert (said[0], words in said[1]) == (cause, True), said


def test_corrections_that_see_another_decay_are_told_from_the_state(rows):
    state, batch = rows
    before, row = step(SHAPE, state, batch[3])[1], batch[4]
    value = correction(SHAPE, batch[0]["decay"] * before, row)
    after = row["decay"] * before + row["key"][:, :, None] * value[:, None, :]
    cause, words = found(rows, (row["read"][:, :, None] * after).sum(1))
    assert cause == "other-sequence"
    assert words.startswith("the state before, as it is taken off v is taken with the decay of row")


def test_a_row_that_a_state_lacks_is_lost(rows):
    state, batch = rows
    right = made(rows, 4)[1]
    wrote = batch[4]["decay"] * (play(SHAPE, state, batch[3:4])[1][0] - batch[3]["decay"] * state)
    assert found(rows, right - wrote, last=True) == ("lost-fold", "what row 3 wrote is lost")
    off = found(rows, right - 0.25 * wrote, last=True)
    assert " is 0.75 times what it should be" in off[1]


def test_a_cause_that_is_sought_is_named_in_place_of_another(rows):
    state, batch = rows
    before = step(SHAPE, state, batch[3])[1]
    lost = step(SHAPE, 0 * before, batch[4])[0]
    scaled = 3 * made(rows, 4)[0]
    assert (found(rows, lost)[0], found(rows, scaled)[0]) == ("lost-fold", "wrong-scale")
    sought = "wrong-gate", "wrong-norm"
    assert (found(rows, lost, sought=sought)[0], found(rows, scaled, sought=sought)[0]) == sought
    ways = [("stale-column", "", lost), ("wrong-gate", "near", lost + 1e-6)]
    assert fits.closest(lost[None], ways, 1e-4, scaled[None], False, sought) == (
        "wrong-gate",
        "near",
    )


@pytest.mark.parametrize(
    ("factor", "cause", "words"),
    [
        (lambda d: d * d, "wrong-gate", "the decay is taken with its decay twice"),
        (lambda d: 1 + 0 * d, "gate-order", "the decay is taken without its decay"),
        (lambda d: torch.cat([d[:, :4], 1 + 0 * d[:, 4:]], 1), "gate-order", "channels 4 to 15 of"),
        (lambda d: d[:, torch.arange(16) ^ 1], "wrong-tile", "the other channel of a pair"),
        (lambda d: d, None, ""),
    ],
)
def test_a_decay_of_each_channel_is_solved_for_with_what_is_written(factor, cause, words):
    shape = Shape("kda", 2, 2, 16, 16, 1, 1)
    source = Source(shape, 3)
    row = terms(shape, token(source.rows([0], [1]), 0))
    state, known = source.state().double(), Quantities(shape, [row], 0, 1, 0)
    after = step(shape, state, row | {"decay": factor(row["decay"])})[1]
    said = channels(shape, state, row, after, 1e-6, known)
    assert (said is None) if cause is None else (said[0] == cause and words in said[1]), said


def test_one_value_is_not_looked_up_among_those_of_many_rows():
    shape = Shape("gdn", 1, 1, 16, 16, 20, 1)
    drawn = Source(shape, 3).rows([0], [20])
    known = Quantities(shape, [token(drawn, i) for i in range(20)], 0, 20, 4)
    said = {words for _, words, _ in known.of(4) if "the beta of row" in words}
    assert said == {f"with the beta of row {i} of the pass, not 4" for i in (0, 3, 4, 5)}
