"""Numbers from anyone become numbers in one place, or are refused."""

from __future__ import annotations

import pytest

from engine.foreign import (
    COUNT,
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    OutOfRangeError,
    are_whole,
    is_real,
    is_whole,
    real,
    whole,
)


def test_good_numbers_are_read() -> None:
    assert (whole("0"), whole("00012"), whole(str(COUNT))) == (0, 12, COUNT)
    assert (real("0"), real("12."), real("1.336")) == (0.0, 12.0, 1.336)
    assert is_whole(0) and is_whole(7, 7) and is_real(0.5) and is_real(3)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1_0", "٣", "x", str(2**31), "9" * 5000])
def test_what_is_no_whole_number_in_range_is_refused(text: str) -> None:
    with pytest.raises(OutOfRangeError) as error:
        whole(text)
    assert len(str(error.value)) < 100


@pytest.mark.parametrize("text", ["", ".", "1.2.3", "1e9", "-1", "nan", "٣", "9" * 12, "9" * 5000])
def test_what_is_no_number_in_range_is_refused(text: str) -> None:
    with pytest.raises(OutOfRangeError):
        real(text)


@pytest.mark.parametrize("value", [-1, True, None, "1", float("nan"), float("inf"), 10**400])
def test_values_of_json_are_judged_without_being_converted(value: object) -> None:
    assert not is_whole(value)
    assert not is_real(value)


def test_a_position_fits_the_columns_of_a_trace() -> None:
    assert 2 * MOST_PROMPT_TOKENS + MOST_TOKENS <= COUNT


def test_several_are_whole_only_if_each_is() -> None:
    assert are_whole([]) and are_whole((0, COUNT))
    for wrong in ([1, True], [1, 2.0], [-1, 2], [COUNT + 1, 1], [1, "2"], [[1]], [None]):
        assert not are_whole(wrong) and not are_whole([*[1] * 99, *wrong]), wrong
    assert are_whole([COUNT] * 99)
