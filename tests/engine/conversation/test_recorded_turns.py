"""Recorded conversations: every form of file, branches of a log of requests, hostile files."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.conversation.turns import read_recorded
from engine.errors import OptionError
from resources import CONVERSATIONS


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "1"}
HISTORY = [SYSTEM, user("a"), answer("A"), user("b"), CALL, RESULT, answer("B"), user("c")]


def shape(path) -> list[tuple[int | None, list[str], str | None]]:
    return [
        (parent, [m["content"] for m in messages], answer and answer["content"])
        for parent, messages, answer in read_recorded(path)[0]
    ]


WANTED = [(None, ["Be brief.", "a"], "A"), (0, ["b"], ""), (1, ["42"], "B"), (2, ["c"], None)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(HISTORY),
        json.dumps({"model": "x", "messages": HISTORY}, indent=1),
        "\n".join(map(json.dumps, HISTORY)) + "\n",
        "\n".join(json.dumps({"messages": HISTORY[:n]}) for n in (2, 4, 6, 8)),
    ],
)
def test_forms_of_one_conversation(tmp_path, text):
    path = tmp_path / "turns.json"
    path.write_text(text, "utf-8")
    assert shape(path) == WANTED and read_recorded(path)[1]


def test_an_edited_history_is_a_branch(tmp_path):
    path = tmp_path / "log.jsonl"
    edited = [SYSTEM, user("a"), answer("A"), user("other")]
    lines = [{"messages": HISTORY, "tools": [{"type": "function"}]}, {"messages": edited}]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    assert shape(path) == [*WANTED, (0, ["other"], None)]
    assert read_recorded(path)[2] == [{"type": "function"}]


def test_texts_and_the_bundled_conversation(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text('["one", "two"]', "utf-8")
    assert shape(path) == [(None, ["one"], None), (0, ["two"], None)]
    assert not read_recorded(path)[1]
    assert len(read_recorded(CONVERSATIONS["python"])[0]) == 4


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "holds no message"),
        ("[]", "holds no message"),
        ('[\n{"role": "user",\n]', "line 3 is not valid JSON"),
        ('{"role": "user", "content": "a"}\n{"role"', "line 2 is not valid JSON"),
        ('{"role": "user", "content": "a"}\n7', "line 2 is neither a text nor a message"),
        ('[{"content": "a"}]', "message 1 has no role"),
        ('[{"role": "user", "content": 7}]', "message 1 has a content that is not text"),
        (
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            "message 1 has a part of type 'image_url'",
        ),
        ('{"messages": 3}', "line 1 has no list of messages"),
        ('{"messages": [{"role": "user"}], "tools": 1}', "has tools that are no list"),
        ("[" * 100_000, "line 1 is not valid JSON"),
        ('[{"role": "assistant", "content": "alone"}]', "holds no message"),
    ],
)
def test_hostile_files_are_named_with_their_place(tmp_path, text, place):
    path = tmp_path / "turns.json"
    path.write_text(text, "utf-8")
    with pytest.raises(OptionError) as caught:
        read_recorded(path)
    assert caught.value.message.startswith(str(path)) and place in caught.value.message
    assert caught.value.remedy


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_value_is_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps([{"role": value, "content": value}, value]), "utf-8")
    with suppress(OptionError):
        read_recorded(path)
