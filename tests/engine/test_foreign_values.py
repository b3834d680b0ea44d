"""JSON from anyone: what is read, what is refused, and where."""

from __future__ import annotations

import json

import pytest

from engine.foreign import DEEPEST, JsonError, parse_json


def test_good_json_gives_what_json_loads_gives() -> None:
    text = '{"a": [1, -2.5, "\\ud83d\\ude00", null, true, {}], "b": 12345678901234567890}'
    assert parse_json(text) == parse_json(text, unique=True) == json.loads(text)
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": {"a": 2}}',
        '{"a" : 1, "a": 2}',
        '{"a": {"b": "\\u0022"}, "a": "x\\":"}',
        '["\\ud800", "\\ud83d\\ude00", "\\"]", "{{["]',
        "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1),
        "[" * DEEPEST + "]" * DEEPEST,
        f"[{'7' * 41}, -{'7' * 41}, {'7' * 40}]",
        "[1e999]",
        "[-0, -0.0, 1E5, 0.1, 123456789012345678901]",
        "[NaN]",
        '["a\tb"]',
        "[1,]",
    ],
)
def test_many_objects_are_read_as_few_are(text: str) -> None:
    def read(whole: str) -> str:
        try:
            value = parse_json(whole, unique=True, whole_texts=True)
        except JsonError as error:
            return error.what
        return repr(value[0])

    assert read(f"[{text}{', {}' * 300}]") == read(f"[{text}, {{}}]")


def test_a_number_of_too_many_digits_is_a_text() -> None:
    for digits in ("1" * 41, "-" + "9" * 5000):
        assert parse_json(f'{{"id": {digits}}}') == {"id": digits}
    for n in range(5):  # also in a long text, wherever it is
        text, digits = "x" * (5000 + n), "1" * 41
        assert parse_json(f'["{text}", {digits}, {digits[1:]}]') == [text, digits, int(digits[1:])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1, column 1: Expecting value"),
        ('{"a":\n oops}', "line 2, column 2: Expecting value"),
        ("[1,\n 1e999]", "line 2, column 2: 1e999 is beyond the range of numbers"),
        ("[NaN]", "line 1, column 2: NaN is not a number"),
        ("[1, -Infinity]", "line 1, column 5: -Infinity is not a number"),
        ("[" * 100_000, "nested more than 64 times"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "nested more than 64 times"),
        (
            '{"b": {"a": "}"},\n "c": {"a": 1,\n  "a": 2}, "a": 0}',
            "line 3, column 9: the key 'a' is twice in the object that ends here",
        ),
    ],
)
def test_what_is_refused_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(JsonError) as refused:
        parse_json(text, unique=True)
    assert said in str(refused.value)


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.foreign.MOST_OBJECTS", 3)
    monkeypatch.setattr("engine.foreign.MOST_VALUES", 5)
    assert parse_json("[{}, []]") == [{}, []]
    for text in ("[{}, {}, {}]", "[1, 2, 3, 4, 5, 6, 7]"):
        with pytest.raises(JsonError, match="it has more than"):
            parse_json(text)


def test_halves_of_characters_are_replaced_where_asked() -> None:
    text = '{"\\ud800": ["a\\udfff", "\\ud83d\\ude00"]}'
    assert parse_json(text) == {"\ud800": ["a\udfff", "😀"]}
    assert parse_json(text, whole_texts=True) == {"\ufffd": ["a\ufffd", "😀"]}
