"""Columns of numbers read all at once are what Python reads one by one."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.csv_fields import (
    FieldBlock,
    NotANumberError,
    read_blocks,
    real_numbers,
    whole_numbers,
)

FIELDS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(0, 10**16).map(str),
    st.floats(width=32).map(lambda x: f"{x:.9g}"),
    st.floats().map(lambda x: f"{x:.9g}"),
    st.floats().map(repr),
    st.decimals(0, 10**9, places=5).map(str),
    st.text("0123456789+-.eE _nainf", max_size=6),
    st.just(""),
)


def block_of(values: list[str]) -> FieldBlock:
    text = "".join(f"{value},x\n" for value in values)
    (block,) = read_blocks(io.BytesIO(text.encode()), "n.csv", 2)
    return block


def python(values: list[str], kind: type, missing: float) -> list[float] | int:
    """The numbers, or the row of the first that is none."""
    found = []
    for row, value in enumerate(values):
        try:
            if "_" in value:
                return row
            number = kind(value.encode()) if value else missing
            if kind is int and not -(2**63) <= number < 2**63:
                return row
        except ValueError:
            return row
        found.append(number)
    return found


@given(st.lists(FIELDS, min_size=1, max_size=12))
def test_whole_numbers(values: list[str]) -> None:
    wanted = python(values, int, -7)
    if isinstance(wanted, int):
        with pytest.raises(NotANumberError) as caught:
            whole_numbers(block_of(values), 0, -7)
        assert caught.value.args[0] == wanted
    else:
        found = whole_numbers(block_of(values), 0, -7)
        assert found.dtype == np.int64
        assert found.tolist() == wanted


@given(st.lists(FIELDS, min_size=1, max_size=12))
def test_real_numbers(values: list[str]) -> None:
    wanted = python(values, float, np.nan)
    if isinstance(wanted, int):
        with pytest.raises(NotANumberError) as caught:
            real_numbers(block_of(values), 0)
        assert caught.value.args[0] == wanted
    else:
        np.testing.assert_array_equal(real_numbers(block_of(values), 0), np.array(wanted))


def test_every_length_of_digits() -> None:
    values = ["12345678901234567890"[:n] for n in range(1, 20)]
    assert whole_numbers(block_of(values), 0, 0).tolist() == [int(v) for v in values]
    reals = [f"{v[:n]}.{v[n:]}" for v in values for n in range(1, len(v))]
    assert real_numbers(block_of(reals), 0).tolist() == [float(v) for v in reals]


@pytest.mark.parametrize("field", ["1 ", "/", ":", "1:", "0x10", "1e5", "\u0661"])
def test_neighbours_of_digits_are_none(field: str) -> None:
    wanted = python([field], int, 0)
    if wanted == 0:
        with pytest.raises(NotANumberError):
            whole_numbers(block_of([field]), 0, 0)
    else:  # Python takes a space next to a number
        assert whole_numbers(block_of([field]), 0, 0).tolist() == wanted
