"""Fields added for clients that did not ask, and taken out again byte for byte."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.observe.proxy import added_fields
from engine.observe.proxy.added_fields import FieldRemover, Reply, add_fields

TIMINGS = {"cache_n": 0, "predicted_n": 3, "draft_n": 2}


def line(value: Any) -> bytes:
    """An event as llama-server writes it."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def choice(reason: str | None) -> dict[str, Any]:
    return {"choices": [{"text": 'a"},\\', "index": 0, "finish_reason": reason}], "created": 1}


CASES: list[tuple[Reply, dict[str, Any], dict[str, Any]]] = [
    # what comes when timings (and verbose) are asked for, what comes when they are not
    (
        "completion",
        {"index": 0, "content": "ä{", "stop": False, "timings": TIMINGS, "prompt_progress": {}},
        {"index": 0, "content": "ä{", "stop": False, "prompt_progress": {}},
    ),
    (
        "completion",
        {
            "stop": True,
            "generation_settings": {"n": 1, "timings_per_token": True, "lora": []},
            "timings": TIMINGS,
        },
        {
            "stop": True,
            "generation_settings": {"n": 1, "timings_per_token": False, "lora": []},
            "timings": TIMINGS,
        },
    ),
    (
        "completion",
        {"content": "", "generation_settings/timings_per_token": True},
        {"content": "", "generation_settings/timings_per_token": False},
    ),
    (
        "text",
        choice(None) | {"__verbose": {"tokens": [1], "timings": TIMINGS}, "timings": TIMINGS},
        choice(None),
    ),
    (
        "text",
        choice("length") | {"__verbose": {"stop": True}, "timings": TIMINGS},
        choice("length") | {"timings": TIMINGS},
    ),
    ("chat", choice(None) | {"timings": TIMINGS}, choice(None)),
    ("chat", {"choices": [], "timings": TIMINGS}, {"choices": [], "timings": TIMINGS}),
    ("chat", choice("stop") | {"timings": TIMINGS}, choice("stop") | {"timings": TIMINGS}),
    (
        "responses",
        {"type": "response.output_text.delta", "delta": "x", "timings": TIMINGS},
        {"type": "response.output_text.delta", "delta": "x"},
    ),
    (
        "responses",
        {"type": "response.completed", "response": {}, "timings": TIMINGS},
        {"type": "response.completed", "response": {}, "timings": TIMINGS},
    ),
]


@pytest.mark.parametrize(("form", "asked", "unasked"), CASES)
def test_a_reply_is_what_it_would_have_been(
    form: Reply, asked: dict[str, Any], unasked: dict[str, Any]
) -> None:
    _, added = add_fields(form, b'{"stream": true}')
    assert FieldRemover(form, added).feed(line(asked)) == line(unasked)


@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
@settings(max_examples=60, deadline=None)
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    asked = b"".join(line(asked) + b"\n" for form, asked, _ in CASES if form == "text")
    unasked = b"".join(line(unasked) + b"\n" for form, _, unasked in CASES if form == "text")
    asked, unasked = (each + b": ping\n\ndata: [DONE]\n\nend" for each in (asked, unasked))
    marks = [0, *sorted(cut for cut in cuts if cut < len(asked)), len(asked)]
    remover = FieldRemover("text", ("timings_per_token", "verbose"))
    passed = [remover.feed(asked[a:b]) for a, b in itertools.pairwise(marks)]
    assert b"".join(passed) + remover.rest() == unasked


def test_a_client_that_asked_for_itself_keeps_what_it_asked_for() -> None:
    body = b'{"stream":true,"timings_per_token":true}'
    assert add_fields("chat", body) == (body, ())
    with_verbose, added = add_fields("text", body)
    assert json.loads(with_verbose)["verbose"] is True and added == ("verbose",)
    both = choice(None) | {"__verbose": {}, "timings": TIMINGS}
    passed = FieldRemover("text", added).feed(line(both))
    assert passed == line(choice(None) | {"timings": TIMINGS})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"stream":true}', b'{"stream":true,"timings_per_token":true}'),
        (
            b' { "stream" : true , "x" : "\xc3\xa4\\"}" }\n',
            b' { "stream" : true , "x" : "\xc3\xa4\\"}","timings_per_token":true }\n',
        ),
        (b'{"timings_per_token":false,"stream":true}', b'{"timings_per_token":true,"stream":true}'),
        (b'{"stream":true,"timings_per_token":null}', b'{"stream":true,"timings_per_token":true}'),
    ],
)
def test_the_rest_of_a_request_stays_as_it_is(body: bytes, expected: bytes) -> None:
    assert add_fields("completion", body)[0] == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"stream":false}',
        b'{"stream":1}',
        b'{"stream":true',
        b'{"stream":true}}',
        b'{"stream":true,}',
        b'{"stream":true,"stream":true}',
        b'{"stream":true,"x":"\xff\x00"}',
        b'{"stream":true,"x":' + b"[" * 100_000,
        b'{"stream":true,"x":' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_streamed_request_passes_as_it_is(body: bytes) -> None:
    assert add_fields("text", body) == (body, ())


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"timings":{},"stop":false}\n',  # never the first member
        b'data: {"stop":false,"timings":{},"timings":{}}\n',
        b'data: {"stop":false,"timings":{}\n',
        b'data: {"stop":0,"timings":{}}\n',
        b'data: ["timings"]\n',
        b'data: {"a":1,"choices":5,"timings":{}}\n',
        b'event: {"stop":false,"timings":{}}\n',
        b'data: {"stop":false,"timings":' + b"[" * 100_000 + b"\n",
    ],
)
def test_lines_of_unknown_form_pass_as_they_are(odd: bytes) -> None:
    for form in ("completion", "text"):
        assert FieldRemover(form, ("timings_per_token", "verbose")).feed(odd) == odd


def test_a_line_without_an_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_fields, "MAX_LINE", 1000)
    remover = FieldRemover("completion", ("timings_per_token",))
    assert remover.feed(b'data: {"x":"' + b"y" * 900) == b""
    assert remover.feed(b"z" * 200) == b'data: {"x":"' + b"y" * 900 + b"z" * 200
    end = b'","stop":false,"timings":{}}\n'
    assert remover.feed(end + line(CASES[0][1])) == end + line(CASES[0][2])
