"""Replies that count tokens and no drafts, and timings of which some were left out."""

from __future__ import annotations

import json

import pytest

from tests.engine.observe.files.reply_forms import TIMINGS, filled, sse

USAGE = {"cache_read_input_tokens": 12, "input_tokens": 31, "output_tokens": 64}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "q", "usage": USAGE}
TEXTS = [{"type": "thinking", "thinking": "Well, "}, {"type": "text", "text": "yes."}]
STARTED = MESSAGE | {"content": [], "usage": USAGE | {"output_tokens": 0}}
EVENTS = [
    {"type": "message_start", "message": STARTED},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Well, "}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "yes."}},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens"},
        "usage": {"output_tokens": 64},
    },
    {"type": "message_stop"},
]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reply_of_messages_has_its_tokens(is_whole: bool) -> None:
    whole = json.dumps(MESSAGE | {"content": TEXTS, "stop_reason": "max_tokens"})
    store = filled(whole if is_whole else sse(*EVENTS))
    (one,) = store.runs[0]["requests"]
    known = {name: value for name, value in one["told"].items() if value is not None}
    assert known == {"cache_n": 12, "prompt_n": 31, "predicted_n": 64}
    assert store.runs[0]["model"] == {"name": "q"}
    assert store.runs[0]["stops"] == ["limit"] and one["text"] == "Well, yes."


def test_a_stream_of_messages_that_was_cut_has_no_count_of_tokens() -> None:
    store = filled(sse(*EVENTS[:3]))
    (one,) = store.runs[0]["requests"]
    assert one["told"].get("predicted_n") is None and one["told"]["prompt_n"] == 31


def test_timings_of_which_some_were_left_out_have_no_others() -> None:
    some = {name: TIMINGS[name] for name in ("predicted_n", "predicted_ms", "draft_n")}
    told = filled(json.dumps(some | {"draft_n_accepted": 3})).runs[0]["requests"][0]["told"]
    assert told["draft_n_accepted"] == 3 and not {"cache_n", "prompt_n", "prompt_ms"} & {
        name for name, value in told.items() if value is not None
    }
