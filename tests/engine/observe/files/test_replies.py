"""Replies as people keep them: in one piece, parts of them, streams as objects, with what lies
around them when they are copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import TraceFileError
from engine.observe.files.importing import import_file
from engine.observe.files.records import fill
from engine.observe.rescoring.triage import DRAWN, SAME, UNKNOWN, triage
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.engine.observe.files.reply_forms import (
    CURL,
    FORMS,
    HEAD,
    KEPT,
    MEMBER,
    REPLIES,
    STEPS,
    STREAMS,
    TIMINGS,
    chat,
    clock,
    completion,
    counted,
    filled,
    lines,
    openai,
    rules,
    sse,
    tokens,
    vllm,
)

CASES = Path(__file__).parents[4].parent / "shared" / "cases"


# -- counters alone ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"timings": TIMINGS}),
        json.dumps({"result": TIMINGS}, indent=2),
        json.dumps(TIMINGS),
        json.dumps([TIMINGS]),
        MEMBER,
        f"{MEMBER},\n",
        f"{MEMBER}\n}}\n",
        MEMBER.partition("{")[2],  # the first line was not copied
        json.dumps({"timings": TIMINGS, "content": "def f():"}),
        json.dumps({"prompt": "a", "name": "code_python", "wall_s": 3.2, "timings": TIMINGS}),
        json.dumps({"results": [{"name": "a", "response": {"content": "x", "timings": TIMINGS}}]}),
        f"```json\n{json.dumps(TIMINGS, indent=2)}\n```\n",
        f"$ curl -s localhost:8080/completion | jq .timings\n{json.dumps(TIMINGS, indent=2)}\n",
        "> " + json.dumps({"timings": TIMINGS}, indent=2).replace("\n", "\n> ") + "\n",
        HEAD + json.dumps({"content": "x", "timings": TIMINGS}),
        CURL + json.dumps({"timings": TIMINGS}) + "\n* Connection #0 left intact\n",
        "\ufeff" + json.dumps({"timings": TIMINGS}, indent=2).replace("\n", "\r\n"),
    ],
)
def test_counters_alone_are_a_run_of_sums(text: str) -> None:
    store = filled(text)
    figures = summary(store, 0)
    told = {name: figures[name] for name in TIMINGS}
    assert told == pytest.approx(TIMINGS)
    assert len(store.rounds) == 0 and figures["num_spec_steps"] is None
    assert not rules(store)


def test_several_counters_are_several_requests() -> None:
    others = [TIMINGS, TIMINGS | {"prompt_ms": 99.5, "predicted_n": 7, "predicted_ms": 55.5}]
    for text in (
        json.dumps(others),
        lines(*others),
        "\n".join(json.dumps(o, indent=1) for o in others),
    ):
        store = filled(text)
        assert len(store.runs[0]["requests"]) == 2
        assert summary(store, 0)["predicted_n"] == 407
        assert summary(store, 0)["draft_n"] == 2 * 374


def test_without_speculation_nothing_is_said_of_it() -> None:
    plain = {name: value for name, value in TIMINGS.items() if "draft" not in name}
    figures = summary(filled({"timings": plain}), 0)
    assert figures["predicted_n"] == 400
    assert figures.get("draft_n") is None and figures.get("draft_acceptance_rate") is None
    nothing = dict.fromkeys(("draft_n", "draft_n_accepted"))
    assert summary(filled({"timings": plain | nothing}), 0) == figures


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"predicted_n": -1}, "predicted_n = -1"),
        ({"predicted_ms": "1 s"}, "predicted_ms"),
        ({"draft_n_accepted": 10**30}, "draft_n_accepted"),
    ],
)
def test_a_number_that_cannot_be_is_named(change: dict[str, Any], said: str) -> None:
    store = filled({"timings": TIMINGS | change})
    (finding,) = recorded(store)
    assert finding.rule == "stream-unreadable" and said in finding.message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", KEPT)
def test_a_stream_kept_as_objects_is_the_stream(kept: str, form: str) -> None:
    store = filled(KEPT[kept](FORMS[form]()))
    figures = summary(store, 0)
    assert len(store.runs[0]["requests"]) == 1
    assert [figures[n] for n in ("predicted_n", "draft_n", "draft_n_accepted")] == [5, 6, 2]
    drafted = store.rounds.column("num_draft_tokens").tolist()
    assert [one for one in drafted if one > 0] == [3, 3]
    assert rules(store) == (["log-unread"] if kept == "a cut last line" else [])
    if form == "completion":
        assert [one for (one,) in tokens(store, "token_id")] == [101, 102, 103, 104, 105]
        assert store.runs[0]["requests"][0]["prompt"] == "def f("


@pytest.mark.parametrize("kept", ["lines", "list", "events"])
def test_several_streams_in_one_file(kept: str) -> None:
    both = [chat("a") + chat("b"), completion() + completion(31.5)]
    mixed = [one for pair in zip(chat("a"), chat("b"), strict=True) for one in pair]
    for chunks in (*both, mixed):
        store = filled(KEPT[kept](chunks))
        assert len(store.runs[0]["requests"]) == 2 and not rules(store)
        assert summary(store, 0)["predicted_n"] == 10
        assert summary(store, 0, 1)["draft_n_accepted"] == 2


def test_answers_of_one_stream_are_sequences() -> None:
    other = [json.loads(json.dumps(one)) for one in chat()]
    for one in other:
        one["choices"][0]["index"] = 1
    store = filled(lines(*(one for pair in zip(chat(), other, strict=True) for one in pair)))
    assert [one["index"] for one in store.runs[0]["requests"]] == [0, 1]
    assert summary(store, 0)["predicted_n"] == 10


def _many(kind: str, name: str) -> list[dict[str, Any]]:
    """Events of a stream of 60 tokens, in rounds of one to four that were drafted to three."""
    found, rounds = [], [1 + (7 * i) % 4 for i in range(40)]
    ends = [sum(rounds[:i]) for i in range(1, 41)]
    for n in range(1, 61):
        text = "\\" if n == 20 else (" the", '"', "\n", " é", '"')[n % 5]
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        event = {"choices": [choice], "id": name, "model": "m"}
        i = next(i for i, end in enumerate(ends) if n - 1 <= end) + 1 if n > 1 else 0
        told = {"predicted_n": n - 5 * (kind == "falls" and n == 35), "predicted_ms": 10.5 * i}
        told |= {"draft_n": 3 * i, "draft_n_accepted": sum(rounds[:i]) - i}
        if kind == "ids":
            choice["token_ids"] = [n, n + 1]
        else:
            event["timings"] = TIMINGS | told
        found.append(event)
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "id": name}
    return [*found, end] if kind != "cut" else found


def _list(*events: Any) -> str:
    return json.dumps(events, indent=1)


@pytest.mark.parametrize("form", [lines, sse, _list])
@pytest.mark.parametrize("kind", ["rounds", "ids", "falls", "cut"])
def test_events_that_only_add_text_say_what_others_do(kind: str, form: Callable[..., str]) -> None:
    """With a key more they are read one by one."""
    events = [*_many(kind, "a"), *_many(kind, "b")]
    found, wanted = filled(form(*events)), filled(form(*({**one, "more": 1} for one in events)))
    assert len(found.tokens) > (30 if kind == "falls" else 100)
    for table in ("tokens", "rounds"):
        one, other = found.tables[table], wanted.tables[table]
        assert len(one) == len(other)
        rows = range(len(one))
        assert [repr(one.row(i)) for i in rows] == [repr(other.row(i)) for i in rows]
    facts, others = found.runs[0], wanted.runs[0]
    assert (facts.stops, facts.told) == (others.stops, others.told)
    assert rules(found) == rules(wanted)


@pytest.mark.parametrize(
    ("key", "instead"), [("model", '"model": "m", "model": "m"'), ("index", '"index": 0')]
)
@pytest.mark.parametrize("form", ["{}", "[{}]", "data: {}\n\n"])
def test_a_key_twice_within_a_stream_is_named(form: str, key: str, instead: str) -> None:
    """Also where another one is missing for it."""
    kept = [json.dumps(one) for one in _many("ids", "a")]
    before = '"model": "m"' if key == "model" else '"finish_reason": null'
    kept[30] = kept[30].replace(before, instead)
    joined = {"{}": "\n", "[{}]": ",", "data: {}\n\n": "\n\ndata: "}[form].join(kept)
    with pytest.raises(TraceFileError, match=f"the key '{key}' is twice"):
        filled(form.format(joined))


def test_a_stream_that_ends_early_is_a_cut_one() -> None:
    store = filled(lines(*chat()[:-2]))
    assert rules(store) == ["stream-cut"]
    assert summary(store, 0)["predicted_n"] == 4


def test_counters_of_every_chunk_are_one_stream() -> None:
    store = filled(lines(*(clock(*step) for step in STEPS)))
    assert summary(store, 0)["draft_n"] == 6 and len(store.runs[0]["requests"]) == 1
    assert [one for one in store.rounds.column("num_draft_tokens").tolist() if one > 0] == [3, 3]


@pytest.mark.parametrize("name", REPLIES)
def test_ids_of_a_reply_are_its_tokens(name: str, tmp_path: Path) -> None:
    make, engine, has_prompt = REPLIES[name]
    store = filled(make([10, 11, 12, 13]))
    found = tokens(store, "pos", "kind", "token_id")
    prompt = [(i, "prompt", i + 1) for i in range(3)] if has_prompt else []
    n = 12 if name == "llama-server with verbose" else 3
    assert found == prompt + [(n + i, "unknown", 10 + i) for i in range(4)]
    assert store.runs[0]["source"]["engine"] == engine
    assert summary(store, 0)["predicted_n"] == 4 and len(store.rounds) == 0
    assert summary(store, 0).get("draft_n") == (12 if "speculation" in name else None)
    assert not rules(store)
    export_csv(store, tmp_path / "trace")
    assert tokens(open_trace(tmp_path / "trace"), "pos", "kind", "token_id") == found


@pytest.mark.parametrize("name", REPLIES)
def test_triage_names_the_first_token_that_differs(name: str) -> None:
    make, _, _ = REPLIES[name]
    plain, other = filled(make([10, 11, 12, 13])), filled(make([10, 11, 99, 13]))
    again = triage(RunRef(plain, 0), RunRef(filled(make([10, 11, 12, 13])), 0))
    assert again.verdict == SAME
    (pair,) = triage(RunRef(plain, 0), RunRef(other, 0)).pairs
    assert pair.n_same == 2 and pair.a is not None and pair.b is not None
    assert (pair.a.token_id, pair.b.token_id, pair.a.round) == (12, 99, None)


@pytest.mark.parametrize("kept", ["lines", "list", "events"])
@pytest.mark.parametrize("name", STREAMS)
def test_ids_of_a_stream_without_rounds(name: str, kept: str) -> None:
    store = filled(KEPT[kept](STREAMS[name]))
    emitted = [one for one in tokens(store, "kind", "pos", "token_id") if one[0] == "unknown"]
    assert emitted == [("unknown", 3 + i, 10 + i) for i in range(4)]
    assert "".join(text for (text,) in tokens(store, "text")) == "abcd"
    assert summary(store, 0)["predicted_n"] == 4 and not rules(store)


# -- only a text -------------------------------------------------------------------------------

OLLAMA = {"model": "qwen3", "created_at": "2026-11-27T00:00:00Z"}
OLLAMA_END = {
    "done": True,
    "done_reason": "stop",
    "prompt_eval_count": 3,
    "prompt_eval_duration": 20_500_000,
    "eval_count": 4,
    "eval_duration": 80_000_000,
}


def test_ollama_counts_and_times() -> None:
    parts = [{**OLLAMA, "response": one, "done": False} for one in "abcd"]
    store = filled(lines(*parts, {**OLLAMA, "response": "", **OLLAMA_END}))
    figures = summary(store, 0)
    assert (figures["predicted_n"], figures["prompt_n"]) == (4, None)
    assert figures["predicted_ms"] == 80.0 and figures["prompt_ms"] == 20.5
    assert figures["predicted_per_second"] == 50.0
    assert tokens(store, "token_id", "text") == [(None, one) for one in "abcd"]
    whole = {**OLLAMA, "message": {"role": "assistant", "content": "abcd"}, **OLLAMA_END}
    store = filled(whole)
    assert summary(store, 0)["predicted_n"] == 4 and not len(store.tokens)
    assert store.runs[0]["requests"][0]["text"] == "abcd"
    assert store.runs[0]["source"]["engine"] == "ollama"


def test_lm_studio_says_how_fast() -> None:
    stats = {"tokens_per_second": 50.0, "time_to_first_token": 0.1, "generation_time": 0.08}
    store = filled(openai("abcd", stats=stats, model_info={"arch": "qwen3"}))
    figures = summary(store, 0)
    assert figures["predicted_per_second"] == 50.0 and figures["predicted_ms"] == 80.0
    assert figures["predicted_n"] == 4 and figures.get("draft_n") is None
    assert store.runs[0]["source"]["engine"] == "lm-studio"


def test_texts_are_compared_where_no_tokens_are_known() -> None:
    runs = [RunRef(filled(openai(text)), 0) for text in ("abcd", "abcd", "abxd")]
    assert triage(runs[0], runs[1]).verdict == SAME
    found = triage(runs[0], runs[2])
    assert found.verdict == UNKNOWN and "After 2 equal characters" in found.pairs[0].reason
    asked = {"request": {"messages": [{"role": "user", "content": "x"}], "temperature": 0.8}}
    drawn = [RunRef(filled({**asked, "reply": openai(text)}), 0) for text in ("abcd", "abxd")]
    assert triage(*drawn).verdict == DRAWN
    assert drawn[0].facts.requests[0].messages == [{"role": "user", "content": "x"}]


def test_pieces_of_probabilities_are_tokens_where_they_are_all_of_the_text() -> None:
    content = [{"token": one, "logprob": -0.5, "top_logprobs": []} for one in ("ab", "c", "d", "e")]
    body = openai("abcde")
    body["choices"][0]["logprobs"] = {"content": content}
    assert [text for (text,) in tokens(filled(body), "text")] == ["ab", "c", "d", "e"]
    body["choices"][0]["logprobs"] = {"content": content[1:]}  # of some tokens only
    assert not len(filled(body).tokens)


def test_several_answers_have_the_prompt_and_no_sum_in_common() -> None:
    body = vllm([10, 11])
    second = {"index": 1, "text": "xyz", "finish_reason": "stop", "token_ids": [20, 21, 22]}
    body["choices"].append(second)
    body["usage"]["completion_tokens"] = 5
    store = filled(body)
    assert [one["told"]["predicted_n"] for one in store.runs[0]["requests"]] == [2, 3]
    assert store.runs[0]["stops"] == ["limit", "stop"]
    body["choices"] = [dict(one, token_ids=None) for one in body["choices"]]
    assert summary(filled(body), 0)["predicted_n"] is None


def test_replies_with_and_without_speculation_in_one_file() -> None:
    spec = vllm([10, 11], metrics={"speculative_decoding": counted(6)}) | {"id": "other"}
    store = filled(lines(vllm([10, 11]), spec))
    assert [one["told"]["num_draft_tokens"] for one in store.runs[0]["requests"]] == [None, 12]
    assert summary(store, 0)["draft_n"] is None if "draft_n" in summary(store, 0) else True


@pytest.mark.parametrize(
    "data", ['{"choices": [', '{"object": "list", "data": []}', "[]", '{"error": {"message": "x"}}']
)
def test_what_is_no_reply_is_refused(data: str) -> None:
    with pytest.raises(TraceFileError) as raised:
        fill(TraceStore(), data.encode(), "file")
    assert raised.value.remedy and raised.value.message.startswith("file")


def test_an_error_in_place_of_the_end_is_told() -> None:
    store = filled(sse(*chat()[:-1], {"error": {"code": 500, "message": "out of memory"}}))
    (finding,) = recorded(store)
    assert finding.rule == "stream-cut" and "out of memory" in finding.message


# -- cases that were reported ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("06-timings-alone/timings.json", (400, 374, 339, 0)),
        ("06-timings-alone/pasted.txt", (400, 374, 339, 0)),
        ("08-replies-in-one-piece/llama-plain-reply.json", (32, None, None, 32)),
        ("08-replies-in-one-piece/llama-mtp-reply.json", (40, 63, 17, 40)),
        ("08-replies-in-one-piece/vllm-plain.json", (4, None, None, 8)),
        ("08-replies-in-one-piece/vllm-spec.json", (4, 129, 10, 8)),
        ("08-replies-in-one-piece/sglang-plain.json", (64, None, None, 3)),
        ("08-replies-in-one-piece/sglang-spec.json", (64, 69, 41, 3)),
        ("18-chunks-as-json-lines/same.sse", (18, 17, 11, 18)),
        ("18-chunks-as-json-lines/chunks.jsonl", (18, 17, 11, 18)),
        ("18-chunks-as-json-lines/chunks.json", (18, 17, 11, 18)),
    ],
)
def test_reported_files(path: str, told: tuple[int | None, ...]) -> None:
    file = CASES / path
    if not file.is_file():
        pytest.skip("the cases are not here")
    store = TraceStore()
    assert import_file(store, file) == [0]
    figures = summary(store, 0)
    names = ("predicted_n", "draft_n", "draft_n_accepted")
    assert (*(figures.get(name) for name in names), len(store.tokens)) == told
    assert not rules(store)
    assert bool(len(store.rounds)) == path.startswith("18")


def test_replies_in_the_log_of_lm_studio(tmp_path: Path) -> None:
    """Each begins at the end of a line with a time."""
    reply = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a [b] {c}"}}],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 30,
            "total_tokens": 36,
            "total_draft_tokens_count": 20,
            "accepted_draft_tokens_count": 12,
            "rejected_draft_tokens_count": 8,
        },
    }
    said = f"[2026-09-10 00:35:56][INFO][q] Generated prediction: {json.dumps(reply, indent=2)}\n"
    path = tmp_path / "server.log"
    path.write_text(f"[2026-09-10 00:35:50][INFO][q] Running on 2 messages.\n{said}{said}")
    store = TraceStore()
    (run,) = import_file(store, path)
    facts = store.runs[run]
    told = [(one.told.get("draft_n"), one.told["draft_n_accepted"]) for one in facts.requests or ()]
    assert told == [(20, 12)] * 2
    assert "1 line was left out" in (facts.observed_findings or [])[0].evidence


def test_the_average_of_sglangs_server_info(tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    path.write_text(json.dumps({"internal_states": [{"avg_spec_accept_length": 3.17}]}))
    store = TraceStore()
    (run,) = import_file(store, path)
    (one,) = store.runs[run].requests or ()
    assert one.told["mean_acceptance_length"] == 3.17


@pytest.mark.parametrize(
    "usage",
    [
        {
            "completion_tokens_details": {
                "accepted_prediction_tokens": 80,
                "rejected_prediction_tokens": 40,
            }
        },
        {"speculative_decoding": {"proposed_tokens": 120, "accepted_tokens": 80}},
    ],
    ids=["predicted", "proposed"],
)
def test_usage_may_count_drafted_tokens(tmp_path: Path, usage: dict[str, Any]) -> None:
    usage |= {"prompt_tokens": 100, "completion_tokens": 120, "total_tokens": 220}
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": "ok"}}
    path = tmp_path / "reply.json"
    path.write_text(json.dumps({"model": "q", "choices": [choice], "usage": usage}))
    store = TraceStore()
    import_file(store, path)
    told = store.runs[0]["requests"][0]["told"]
    assert (told["draft_n_accepted"], told["draft_n"], told["predicted_n"]) == (80, 120, 120)
    assert told["num_spec_steps"] is None and not recorded(store)
    timings = {"predicted_n": 120, "predicted_ms": 960.0, "draft_n": 120, "draft_n_accepted": 80}
    counts = {"num_spec_steps": 40, "num_draft_tokens": 120, "num_accepted_draft_tokens": 80}
    for more in ({"timings": timings}, {"metrics": {"speculative_decoding": counts}}):
        path.write_text(json.dumps({"choices": [choice], "usage": usage} | more))
        (run,) = import_file(store, path)  # the same counts twice
        told = store.runs[run]["requests"][0]["told"]
        assert (told["draft_n_accepted"], told["draft_n"], told["predicted_n"]) == (80, 120, 120)


def test_counts_of_replies_with_and_without_timings_are_added_up() -> None:
    def reply(name: str, n: int, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": "stop", "message": {"content": "x"}}
        usage = {"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n}
        usage |= more.pop("usage", {})
        return {"id": name, "object": "chat.completion", "choices": [choice], "usage": usage} | more

    details = {"accepted_prediction_tokens": 60, "rejected_prediction_tokens": 40}
    of_usage = reply("a", 100, usage={"completion_tokens_details": details})
    timings = {"prompt_n": 10, "prompt_ms": 1.0, "predicted_n": 50, "predicted_ms": 900.0}
    of_timings = reply("b", 50, timings=timings | {"draft_n": 40, "draft_n_accepted": 30})
    told = filled(lines(of_usage, of_timings)).runs[0]["told"]
    assert [told[name] for name in ("predicted_n", "draft_n", "draft_n_accepted")] == [150, 140, 90]
    assert told["draft_acceptance_rate"] == 90 / 140
    told = filled(lines(of_timings, reply("c", 70))).runs[0]["told"]  # which says nothing of drafts
    assert [told[name] for name in ("predicted_n", "draft_n", "draft_n_accepted")] == [120, 40, 30]
