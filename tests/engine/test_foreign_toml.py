"""TOML from anyone: what is read, and keys that would take its parser minutes."""

from __future__ import annotations

import pytest

from engine.foreign import MOST_PARTS, parse_toml


def test_tables_and_texts_with_points_are_read() -> None:
    text = 'a.b = 1\n[c]\nd = "e.f. g. h... i"\n"j.k" = [1.5]\n'
    assert parse_toml(text) == {"a": {"b": 1}, "c": {"d": "e.f. g. h... i", "j.k": [1.5]}}
    assert parse_toml("a." * (MOST_PARTS - 1) + "b = 1\n")


@pytest.mark.parametrize("part", ["b", '"b"', "'b c'"])
@pytest.mark.parametrize("form", ["{} = 1\n", "x = {{ {} = 1 }}\n", "[{}]\n"])
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(form: str, part: str) -> None:
    text = "a = 1\n" + form.format(" . ".join([part] * 200_000))
    with pytest.raises(ValueError, match=r"more than 64 words joined by points \(at line 2\)"):
        parse_toml(text)


def test_long_words_take_no_time() -> None:
    assert parse_toml(f'a = "{"b" * 10**6} {"c-" * 10**6}"\n')


def test_what_is_not_toml_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_toml("a = = 1")
