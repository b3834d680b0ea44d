"""Columns of numbers read all at once are what reading them one by one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.reopen import _parse, _parse_digits

DTYPES = [np.dtype(d) for d in (np.int32, np.int64, np.float32, np.float64)]
FIELDS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats(width=32).map(lambda x: f"{x:.9g}"),
    st.floats().map(repr),
    st.text("0123456789+-.eE, _nainf", max_size=6),
    st.just(""),
)


def one_by_one(values: list[str], dtype: np.dtype) -> np.ndarray | None:
    try:
        return _parse(values, dtype)
    except (ValueError, OverflowError, FloatingPointError):
        return None


@given(st.lists(FIELDS, min_size=1, max_size=12), st.sampled_from(DTYPES))
def test_whatever_the_quick_way_takes_the_slow_way_takes_too(
    values: list[str], dtype: np.dtype
) -> None:
    quick = _parse_digits(values, dtype)
    if quick is not None:
        slow = one_by_one(values, dtype)
        assert slow is not None
        assert quick.dtype == slow.dtype == dtype
        np.testing.assert_array_equal(quick, slow)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quick_way_is_taken_for_what_an_export_writes(dtype: np.dtype) -> None:
    values = ["", "1", "-7", "", "", "2147483647", ""]
    if dtype.kind == "f":
        values += ["0.103041783", "1.5e-09", "-2e+10"]
    quick = _parse_digits(values, dtype)
    assert quick is not None
    np.testing.assert_array_equal(quick, _parse(values, dtype))


@pytest.mark.parametrize("values", [["1,2", ""], ["1,", "2"], ["2,", ""], ["9" * 20, "1"]])
def test_fields_never_shift(values: list[str]) -> None:
    assert _parse_digits(values, np.dtype(np.int64)) is None
