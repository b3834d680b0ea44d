"""Sizes in words."""

from __future__ import annotations

import pytest

from engine.plain_text import counted, size_text, three_digits


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1,000 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1020 * 1024, "1,020 KiB"),
        (1024 * 1024 - 1, "1 MiB"),
        (9_412_000, "8.98 MiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2 TiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_three_digits_and_a_binary_unit(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.0123"), (43.66, "43.7"), (1080.4, "1,080"), (999.7, "1,000")]
)
def test_three_digits_without_an_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_one_of_a_thing_has_no_plural() -> None:
    assert [counted(n, "token") for n in (0, 1, 1000)] == ["0 tokens", "1 token", "1,000 tokens"]
