"""Routers, and servers of other engines: what is asked of them, and what their runs have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import ServerError, ServerModelError, ServerTimeoutError
from engine.observe.rounds.counters import read_counters
from engine.observe.server.client import ServerClient
from engine.observe.server.reply import TimeLimits
from engine.observe.server.request_options import RequestOptions, request_for
from engine.observe.server.server_run import ServerRun
from engine.options import RunOptions
from engine.sampling.options import SamplerOptions
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.support.scripted_replies import (
    LOADING,
    Hold,
    Raw,
    Reply,
    error_reply,
    events,
    json_reply,
    stream,
)
from tests.support.scripted_server import ScriptedServer

OPTIONS = RunOptions(n_predict=5, sampler=SamplerOptions(temp=0.0))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as found:
        yield found


def models(owner: str, *names: str) -> Reply:
    return json_reply({"object": "list", "data": [{"id": n, "owned_by": owner} for n in names]})


def metrics(text: str) -> Reply:
    return Reply(text.encode(), 200, {"Content-Type": "text/plain; version=0.0.4"})


def vllm_metrics(n: int) -> Reply:
    name = "vllm:spec_decode_num"
    return metrics(
        f"# TYPE {name}_drafts_total counter\n"
        f'{name}_drafts_total{{engine="0",model_name="m"}} {10 * n}\n'
        f'{name}_drafts_total{{engine="1",model_name="m"}} {2 * n}\n'
        f'{name}_draft_tokens_total{{engine="0",model_name="m"}} {36 * n}\n'
        f'{name}_accepted_tokens_total{{engine="0",model_name="m"}} {18 * n}\n'
        f'{name}_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {11 * n}\n'
        f'{name}_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {7 * n}\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {4 * n}\n'
        f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {3 * n}\n'
        f'vllm:num_requests_running{{engine="0",model_name="m"}} 0\n'
    )


def sglang_metrics(n: int) -> Reply:
    return metrics(
        f'sglang:prompt_tokens_total{{model_name="m"}} {3 * n}\n'
        f'sglang:generation_tokens_total{{model_name="m"}} {4 * n}\n'
        'sglang:num_running_reqs{model_name="m"} 0\n'
        'sglang:spec_accept_length{model_name="m"} 2.5\n'
    )


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def text_stream(*last: dict[str, Any], with_ids: bool = False) -> Reply:
    """Four tokens of /v1/completions and what follows them."""
    chunks = []
    for i, text in enumerate("abcd"):
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        if with_ids:
            choice["token_ids"] = [10 + i]
            choice["prompt_token_ids"] = [1, 2, 3] if not i else None
        if i == 3:
            choice["finish_reason"] = "length"
        chunks.append({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
    base = {"id": "cmpl-1", "object": "text_completion", "choices": []}
    body = events(*chunks, *({**base, **one} for one in last))
    return Reply([*body, b"data: [DONE]\n\n"])


def run_of(server: ScriptedServer, more: RequestOptions | None = None, **chat: Any) -> ServerRun:
    with ServerClient(server.url) as client:
        facts = client.facts()
        request = request_for(client, facts, "hello", OPTIONS, more, **chat)
        run = ServerRun(client, facts, [request], TraceStore())
        while run.advance():
            pass
    return run


def rows(run: ServerRun, *names: str) -> list[tuple[Any, ...]]:
    table = run.trace.tokens
    return [tuple(table.row(i)[name] for name in names) for i in range(len(table))]


def test_vllm_gives_ids_usage_and_how_far_its_counters_moved(server: ScriptedServer) -> None:
    server.script("/v1/models", models("vllm", "m"))
    server.script("/version", json_reply({"version": "0.14.0"}))
    server.script("/metrics", vllm_metrics(1), vllm_metrics(2))
    server.script("/v1/completions", text_stream({"usage": USAGE}, with_ids=True))
    run = run_of(server, RequestOptions(stop=("x",)))
    facts = run.trace.runs[0]
    assert facts["source"] == {"engine": "vllm", "version": "0.14.0"}
    assert facts["model"]["name"] == "m" and facts["stops"] == ["limit"]
    assert rows(run, "kind", "token_id") == [
        *(("prompt", one) for one in (1, 2, 3)),
        *(("unknown", one) for one in (10, 11, 12, 13)),
    ]
    figures = summary(run.trace, 0)
    assert (figures["predicted_n"], figures["num_spec_steps"]) == (4, 12)
    assert (figures["draft_n"], figures["draft_n_accepted"]) == (36, 18)
    assert figures["num_accepted_tokens_per_pos"] == [11, 7]
    assert not run.uncounted and run.counted.moved["tokens_predicted_total"] == 4
    assert not recorded(run.trace)
    assert {one.path for one in server.received} == {
        "/health", "/v1/models", "/version", "/metrics", "/v1/completions",
    }  # fmt: skip
    (sent,) = server.of("/v1/completions")
    assert sent.json == {
        "model": "m",
        "prompt": "hello",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": OPTIONS.sampler.top_p,
        "top_k": OPTIONS.sampler.top_k or -1,
        "min_p": OPTIONS.sampler.min_p,
        "repetition_penalty": OPTIONS.sampler.repeat_penalty,
        "ignore_eos": False,
        "return_token_ids": True,
        "stop": ["x"],
        **({"seed": OPTIONS.sampler.seed} if OPTIONS.sampler.seed >= 0 else {}),
    }
    assert "x-conversation-id" not in sent.headers


def test_what_a_request_says_of_speculation_goes_before_the_counters(
    server: ScriptedServer,
) -> None:
    said = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 1}
    said |= {"mean_acceptance_length": 1.5, "acceptance_histogram": [1, 1]}
    server.script("/v1/models", models("vllm", "m"))
    server.script("/version", error_reply(404, "no"))
    server.script("/metrics", vllm_metrics(1), vllm_metrics(2))
    last = {"usage": USAGE, "metrics": {"speculative_decoding": said}}
    server.script("/v1/completions", text_stream(last))
    run = run_of(server)
    figures = summary(run.trace, 0)
    assert (figures["draft_n"], figures["draft_n_accepted"]) == (6, 1)
    assert figures["acceptance_histogram"] == [1, 1]
    assert rows(run, "token_id", "text") == [(None, one) for one in "abcd"]
    said["acceptance_histogram"] = [1, 5]
    server.script("/v1/models", models("vllm", "m"))
    server.script("/v1/completions", text_stream(last))
    assert [one.rule for one in recorded(run_of(server).trace)] == ["counters-contradict"]


def test_sglang_gives_its_counts_after_the_answer(server: ScriptedServer) -> None:
    details = {"spec_verify_ct": 2, "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 6}
    server.script("/v1/models", models("sglang", "m"))
    server.script("/get_server_info", json_reply({"version": "0.5.13"}))
    server.script("/metrics", sglang_metrics(1), sglang_metrics(2))
    last = {"sglext": {"spec_tokens_details": details}}
    server.script("/v1/completions", text_stream({"usage": USAGE}, last))
    run = run_of(server)
    figures = summary(run.trace, 0)
    assert (figures["num_spec_steps"], figures["draft_n_accepted"]) == (2, 2)
    assert run.counted.moved == {"prompt_tokens_total": 3, "tokens_predicted_total": 4}
    assert run.trace.runs[0]["source"] == {"engine": "sglang", "version": "0.5.13"}


@pytest.mark.parametrize(
    ("owner", "engine"),
    [("library", "ollama"), ("organization_owner", "lm-studio"), ("someone", "openai")],
)
def test_without_counters_what_was_not_observed_is_empty(
    server: ScriptedServer, owner: str, engine: str
) -> None:
    server.script("/v1/models", models(owner, "m"))
    server.script("/api/version", json_reply({"version": "0.13.1"}))
    server.script("/metrics", json_reply({"error": "Unexpected endpoint"}))
    chat = [
        {"id": "c", "choices": [{"index": 0, "delta": {"content": one}, "finish_reason": None}]}
        for one in ("ab", "cd")
    ]
    end = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"id": "c", "choices": [], "usage": USAGE}
    server.script("/v1/chat/completions", Reply(events(*chat, end, usage)))
    run = run_of(server, chat={})
    figures = summary(run.trace, 0)
    assert run.trace.runs[0]["source"]["engine"] == engine
    assert figures["predicted_n"] == 4 and not len(run.trace.tokens)
    for name in ("draft_n", "draft_acceptance_rate", "num_spec_steps", "mean_acceptance_length"):
        assert figures.get(name) is None
    assert run.trace.runs[0]["requests"][0]["text"] == "abcd" == "".join(run.first_texts)
    assert not run.counted.moved and not recorded(run.trace)
    (sent,) = server.of("/v1/chat/completions")
    assert sent.json["messages"] == [{"role": "user", "content": "hello"}]
    assert not server.of("/props") and not server.of("/slots")


def test_a_server_that_has_neither_props_nor_a_list_is_asked_for_the_model_that_is_named(
    server: ScriptedServer,
) -> None:
    for path in ("/v1/models", "/props"):
        server.script(path, *2 * [error_reply(404, "Not Found")])
    with ServerClient(server.url) as client, pytest.raises(ServerError, match="has no /props"):
        client.facts()
    with ServerClient(server.url, model="m") as client:
        facts = client.facts()
    assert (facts.engine, facts.model) == ("openai", "m")


def test_an_error_that_comes_as_a_good_reply_is_no_llama_server(server: ScriptedServer) -> None:
    server.script("/v1/models", json_reply({"data": [{"id": "m"}]}))
    server.script("/props", json_reply({"error": "Unexpected endpoint or method. (GET /props)"}))
    with ServerClient(server.url) as client:
        assert client.facts().engine == "openai"


def test_a_reply_in_one_piece_is_read_though_a_stream_was_asked_for(server: ScriptedServer) -> None:
    answer = {"index": 0, "text": "ab", "finish_reason": "stop"}
    server.script("/v1/models", *2 * [models("vllm", "m")])
    server.script("/metrics", *4 * [error_reply(404, "Not Found")])
    whole, error = {"choices": [answer], "usage": USAGE}, {"error": "out of memory."}
    server.script("/v1/completions", json_reply(whole), json_reply(error))
    assert summary(run_of(server).trace, 0)["predicted_n"] == 4
    with pytest.raises(ServerError, match="The server reported: out of memory"):
        run_of(server)


def test_an_answer_without_usage_has_no_zeros(server: ScriptedServer) -> None:
    server.script("/v1/models", models("vllm", "m"))
    server.script("/metrics", error_reply(404, "Not Found"))
    server.script("/v1/completions", text_stream())
    found = summary(run_of(server).trace, 0, 0)
    assert {found[name] for name in ("prompt_n", "predicted_n", "num_spec_steps")} == {None}


def test_an_answer_that_stops_coming_is_ended_at_once(server: ScriptedServer) -> None:
    hold = Hold()
    server.script("/v1/models", models("vllm", "m"))
    server.script("/version", error_reply(404, "no"))
    server.script("/metrics", error_reply(404, "no"))
    begin = {"id": "c", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    server.script("/v1/completions", Reply([*events(begin), hold]))
    with ServerClient(server.url) as client:
        facts = client.facts()
        run = ServerRun(client, facts, [request_for(client, facts, "x", OPTIONS)], TraceStore())
        while not run.first_texts:
            run.advance()
        run.stop()
        assert run.trace.runs[0]["stops"] == ["stopped"] and "".join(run.first_texts) == "a"
        assert server.of("/v1/completions")[0].left.wait(30)
    hold.release()


# -- routers -----------------------------------------------------------------------------------

ROUTER = {"role": "router", "models_autoload": True, "model_path": "none", "build_info": "b1-c"}


def listed(**states: str) -> Reply:
    data = [
        {"id": name, "owned_by": "llamacpp", "status": {"value": state}}
        for name, state in states.items()
    ]
    return json_reply({"object": "list", "data": data})


def test_the_one_loaded_model_of_a_router_is_taken(server: ScriptedServer) -> None:
    server.script("/v1/models", listed(qwen="loaded", gemma="unloaded"))
    server.script("/props", json_reply(ROUTER))
    server.script("/completion", Reply(stream(server.capture["requests"][0])))
    with ServerClient(server.url) as client:
        facts = client.facts()
        assert facts.model == "qwen" and "qwen" in facts.about and facts.is_llama_server
        assert facts.props == server.capture["props"]
        request = request_for(client, facts, "hi", OPTIONS, chat=None)
        run = ServerRun(client, facts, [request], TraceStore())
        while run.advance():
            pass
        server.script("/apply-template", json_reply({"prompt": "<hi>"}))
        assert request_for(client, facts, "hi", OPTIONS, chat={}).body["prompt"] == "<hi>"
        assert server.of("/apply-template")[0].json["model"] == "qwen"
    assert {one.query.get("model") for one in server.of("/metrics")} == {"qwen"}
    assert {one.query.get("model") for one in server.of("/slots")} == {"qwen"}
    assert [one.query.get("model") for one in server.of("/props")] == [None, "qwen"]
    assert server.of("/completion")[0].json["model"] == "qwen"
    assert len(run.trace.rounds) > 5 and not recorded(run.trace)
    assert run.trace.runs[0]["requests"][0]["model"] == "qwen"


def test_a_model_is_named_where_several_could_be_meant(server: ScriptedServer) -> None:
    for names in ({"a": "loaded", "b": "loaded"}, {"a": "unloaded", "b": "unloaded"}):
        server.script("/v1/models", listed(**names))
        server.script("/props", json_reply(ROUTER))
        with ServerClient(server.url) as client, pytest.raises(ServerModelError) as raised:
            client.facts()
        assert f"a ({names['a']}), b ({names['b']})" in raised.value.message
        assert "--model-name" in raised.value.remedy
    server.script("/v1/models", listed(a="loaded", b="loaded"))
    server.script("/props", json_reply(ROUTER))
    with ServerClient(server.url, model="b") as client:
        assert client.facts().model == "b"
    server.script("/v1/models", listed(a="loaded"))
    server.script("/props", json_reply(ROUTER))
    with (
        ServerClient(server.url, model="c") as client,
        pytest.raises(ServerError, match="no model c"),
    ):
        client.facts()


def test_a_model_that_is_loaded_on_request_is_waited_for(server: ScriptedServer) -> None:
    server.script("/v1/models", listed(a="unloaded"))
    server.script("/props", json_reply(ROUTER), LOADING, LOADING)
    with ServerClient(server.url, model="a") as client:
        assert client.facts().model == "a"
    assert [one.query.get("model") for one in server.of("/props")] == [None, "a", "a", "a"]
    hold = Hold()
    for slow in (Raw(lambda: [hold]), Reply([hold])):  # no head, and a head without a body
        server.script("/v1/models", listed(a="unloaded"))
        server.script("/props", json_reply(ROUTER), slow)
        limits = TimeLimits(connect_timeout=0.3, timeout=0.3)
        with (
            ServerClient(server.url, None, limits, model="a") as client,
            pytest.raises(ServerTimeoutError, match=r"more than 0\.3 s"),
        ):
            client.facts()
    hold.release()


def test_a_router_that_loads_nothing_by_itself_says_so(server: ScriptedServer) -> None:
    server.script("/v1/models", listed(a="unloaded"))
    server.script("/props", json_reply(ROUTER | {"models_autoload": False}))
    with ServerClient(server.url, model="a") as client, pytest.raises(ServerError) as raised:
        client.facts()
    assert "does not load the model a on request" in raised.value.message


def test_the_key_goes_to_a_router_too() -> None:
    with (
        ScriptedServer("mtp", key="sesame") as server,
        ServerClient(server.url, "sesame") as client,
    ):
        server.script("/v1/models", listed(a="loaded"))
        server.script("/props", json_reply(ROUTER))
        assert client.facts().model == "a"


# -- counters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "-1", "1e300", "+Inf"])
def test_a_counter_that_cannot_be_is_none(value: str) -> None:
    text = f'vllm:prompt_tokens_total{{engine="0"}} {value}\nvllm:generation_tokens_total 4\n'
    assert read_counters(text).values == {"tokens_predicted_total": 4.0}
