"""The client of a llama-server: what it learns, what it does when a server misbehaves."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from time import perf_counter

import pytest

from engine.errors import ApiKeyError, Cancelled, OptionError, ServerError
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.server.client import ServerClient
from engine.observe.server.errors import again_after_s
from engine.observe.server.reply import ExchangeEvent, Inbox
from tests.support.scripted_replies import (
    HTML,
    JSON,
    LOADING,
    NO_METRICS,
    NOT_JSON,
    WEB_PAGE,
    Cut,
    Hold,
    Reply,
    cut,
    error_reply,
    json_reply,
    stream,
)
from tests.support.scripted_server import ScriptedServer

KEY = "sk-a-key-that-must-not-show"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[ServerClient]:
    with ServerClient(server.url) as client:
        yield client


def ask(client: ServerClient, server: ScriptedServer, conversation: str | None = None) -> Inbox:
    """Send the capture's first request."""
    inbox = Inbox()
    body = json.dumps(server.capture["requests"][0]["body"]).encode()
    client.stream(0, "/completion", body, inbox, conversation)
    return inbox


def all_of(inbox: Inbox) -> list[ExchangeEvent]:
    """What arrives until the end of the one request."""
    found: list[ExchangeEvent] = []
    while not found or found[-1].kind not in ("done", "broke"):
        arrival = inbox.take(20)
        assert arrival is not None, [one.kind for one in found]
        found.append(arrival)
    return found


def body_of(found: list[ExchangeEvent]) -> bytes:
    return b"".join(one.data for one in found)


def kinds(found: list[ExchangeEvent]) -> list[str]:
    """The kinds, data left out."""
    return [one.kind for one in found if one.kind != "data"]


def test_the_facts_are_the_server_s_own(server: ScriptedServer, client: ServerClient) -> None:
    facts = client.facts()
    assert facts.address == server.url
    assert facts.props == server.capture["props"] and facts.models == server.capture["models"]
    assert client.slots() == server.capture["slots"]
    metrics = client.metrics()
    assert metrics is not None and metrics[1] == "1001"


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (json_reply({"tokens": [7]}), {7: b"<|end|>"}),
        (json_reply({"tokens": [7, 8]}), {}),
        (json_reply([]), {}),
        (error_reply(404, "File Not Found"), {}),
    ],
)
def test_the_end_token_is_asked_for_by_its_text(
    server: ScriptedServer, client: ServerClient, reply: Reply, found: dict[int, bytes]
) -> None:
    server.capture["props"]["eos_token"] = "<|end|>"
    server.script("/tokenize", reply)
    assert client.facts().end_token == found


def test_questions_are_asked_with_and_without_a_body(
    server: ScriptedServer, client: ServerClient
) -> None:
    assert client.ask("/props") == server.capture["props"]
    server.script("/tokenize", json_reply({"tokens": [1, 2]}))
    assert client.ask("/tokenize", {"content": "ä"}) == {"tokens": [1, 2]}
    assert server.received[-1].json == {"content": "ä"}
    with pytest.raises(ServerError, match="has no /nothing"):
        client.ask("/nothing")


def test_what_a_server_does_not_offer_is_none(server: ScriptedServer, client: ServerClient) -> None:
    server.script("/metrics", NO_METRICS)
    server.script("/slots", error_reply(501, "This server does not support slots endpoint"))
    server.script("/v1/models", error_reply(404, "File Not Found"))
    assert client.metrics() is None and client.slots() is None
    assert client.facts().models == {}


def test_a_server_that_loads_is_waited_for() -> None:
    said: list[str] = []
    with ScriptedServer("mtp", loading=2) as server, ServerClient(server.url) as client:
        assert client.facts(said.append).props
        assert said == [f"{server.url} is loading its model."] * 2
        server.script("/completion", LOADING)
        found = all_of(ask(client, server))
        assert kinds(found) == ["head", "done"] and len(server.of("/completion")) == 2


def test_waiting_can_be_cancelled() -> None:
    cancelled = threading.Event()
    with (
        ScriptedServer("mtp", loading=10**9) as server,
        ServerClient(server.url) as client,
        pytest.raises(Cancelled),
    ):
        client.facts(lambda sentence: cancelled.set(), cancelled)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (WEB_PAGE, "answers /props with text/html that llama-server does not send"),
        (NOT_JSON, "answers /props with something that llama-server does not send"),
        (json_reply([1, 2]), "answers /props with something that llama-server does not send"),
        (Reply(b'{"a":' * 100_000, 200, JSON), "that llama-server does not send"),
        (Reply(b"x" * (17 * 2**20), 200, JSON), "that llama-server does not send"),
        (Reply(b"\xff\xfe\x00\x80", 200, JSON), "that llama-server does not send"),
        (error_reply(404, "File Not Found"), "has no /props"),
        (
            Reply(b"", 302, {"Location": "http://elsewhere.invalid/"}),
            "redirects /props to another address",
        ),
        (error_reply(500, "out of\nmemory."), "refuses /props with status 500: out of memory. C"),
        (error_reply(500, "a\x1b[31m\n" * 200), "refuses /props with status 500: a�[31m a�[31m a"),
        (Reply(b"<h1>Bad Gateway", 502, HTML), "refuses /props with status 502. C"),
        (Reply([b'{"half', Cut()], 200), "cannot be reached: the connection fails"),
    ],
)
def test_other_answers_than_a_llama_server_s_are_one_error(
    server: ScriptedServer, client: ServerClient, reply: Reply, said: str
) -> None:
    server.script("/props", reply)
    with pytest.raises(ServerError) as raised:
        client.facts()
    assert said in str(raised.value) and server.url in raised.value.message
    assert raised.value.message.isprintable() and len(raised.value.message) < 400


def test_without_the_key_the_key_is_asked_for() -> None:
    with ScriptedServer("mtp", key=KEY) as server:
        for key in (None, "another"):
            with ServerClient(server.url, key) as client, pytest.raises(ApiKeyError):
                client.facts()
        with ServerClient(server.url, KEY) as client:
            assert client.facts().props
            assert kinds(all_of(ask(client, server))) == ["head", "done"]
            assert KEY not in repr(client) and KEY not in repr(vars(client)["_http"])


@pytest.mark.parametrize("key", ["", "a\nb", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(OptionError) as raised:
        ServerClient("127.0.0.1:1", key)
    assert not key or key not in str(raised.value)


def test_nothing_listens() -> None:
    with ServerClient("127.0.0.1:9") as client:
        with pytest.raises(ServerError, match=r"cannot be reached: connection refused"):
            client.facts()
        inbox = Inbox()
        client.stream(0, "/completion", b"{}", inbox, "name")
        (end,) = all_of(inbox)
        assert end.kind == "broke" and "connection refused" in end.reason


def test_a_stream_arrives_byte_for_byte(server: ScriptedServer, client: ServerClient) -> None:
    found = all_of(ask(client, server))
    assert kinds(found) == ["head", "done"] and found[0].status == 200
    assert body_of(found) == b"".join(stream(server.capture["requests"][0]))
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_a_piece_of_10_mb_arrives_and_the_inbox_bounds_what_waits(
    server: ScriptedServer, client: ServerClient
) -> None:
    big = b"data: " + b"x" * (10 * 2**20) + b"\n\n"
    held = Hold()
    server.script("/completion", Reply([big, big, big, held]))
    inbox = ask(client, server)
    while not inbox.is_full:
        pass
    first = inbox.take(0)
    assert first is not None and first.kind == "head"
    held.release()
    assert len(body_of(all_of(inbox))) == 3 * len(big)
    assert not inbox.is_full


def test_a_stream_that_was_lost_goes_on_where_it_broke(
    server: ScriptedServer, client: ServerClient
) -> None:
    whole = stream(server.capture["requests"][0])
    server.script(
        "/completion", Reply([*cut(whole, 7), b"".join(whole)[len(b"".join(cut(whole, 7)[:-1])) :]])
    )
    found = all_of(ask(client, server, "a-name"))
    assert kinds(found) == ["head", "lost", "resumed", "done"]
    assert body_of(found) == b"".join(whole)
    assert server.of("/completion")[0].headers["x-conversation-id"] == "a-name"


def test_a_stream_without_a_name_breaks(server: ScriptedServer, client: ServerClient) -> None:
    whole = stream(server.capture["requests"][0])
    server.script("/completion", Reply(cut(whole, 7)))
    found = all_of(ask(client, server))
    assert kinds(found) == ["head", "broke"] and found[-1].reason.endswith("broke off its reply.")
    assert body_of(found) == b"".join(whole[:7]) + whole[7][: len(whole[7]) // 2]


def test_a_stream_of_a_router_is_looked_for_with_its_model(server: ScriptedServer) -> None:
    whole = stream(server.capture["requests"][0])
    server.script("/completion", Reply(cut(whole, 7)))
    with ServerClient(server.url) as client:
        client._about = ServerFacts(server.url, props={}, models={}, model="a/b c")
        assert "resumed" in kinds(all_of(ask(client, server, "a-name")))
    asked = [one.query for one in server.received if one.path == "/v1/stream"]
    assert {(one["conv_id"], one["model"]) for one in asked} == {("a-name", "a/b c")}


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_without_room_is_asked_again_when_it_says(
    server: ScriptedServer, client: ServerClient, status: int
) -> None:
    full = error_reply(status, "Too many requests")
    later = Reply(full.steps, status, {**JSON, "Retry-After": "1"})
    server.script("/completion", later, Reply(stream(server.capture["requests"][0])))
    begun = perf_counter()
    assert kinds(all_of(ask(client, server))) == ["head", "done"]
    assert perf_counter() - begun >= 1.0
    server.script("/completion", full)
    assert kinds(all_of(ask(client, server))) == ["head", "broke"]


def test_when_to_ask_again() -> None:
    def s(said: str) -> float:
        return again_after_s(503, b"", {"Retry-After": said})

    assert (s("20"), s("0"), s(""), s("soon")) == (20.0, 0.25, 0.0, 0.0)
    assert 50 < s(format_datetime(datetime.now(UTC) + timedelta(minutes=1))) <= 60
    assert again_after_s(400, b"", {"Retry-After": "20"}) == 0.0


def test_a_server_that_was_started_again_has_lost_the_stream(
    server: ScriptedServer, client: ServerClient
) -> None:
    held = Hold()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:4], held]))
    inbox = ask(client, server, "a-name")
    assert held.reached.wait(60)
    server.restart()
    found = all_of(inbox)
    assert kinds(found) == ["head", "lost", "broke"]


@pytest.mark.parametrize("conversation", [None, "a-name"])
def test_ending_a_request_closes_it_at_the_server(
    server: ScriptedServer, client: ServerClient, conversation: str | None
) -> None:
    held, inbox = Hold(), Inbox()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:4], held]))
    end = client.stream(0, "/completion", b"{}", inbox, conversation)
    begun = inbox.take(10)
    assert begun is not None and begun.kind == "head"
    end()
    assert server.of("/completion")[0].left.wait(60)
    held.release()
    assert kinds(all_of(inbox)) == ["broke"]
    client.close()
    deleted = [one.query for one in server.received if one.method == "DELETE"]
    assert deleted == ([{"conv_id": conversation}] if conversation else [])


def test_closing_leaves_no_thread(server: ScriptedServer) -> None:
    before = set(threading.enumerate())
    client = ServerClient(server.url)
    client.facts()
    held = Hold()
    server.script("/completion", Reply([held]))
    ask(client, server, "a-name")
    assert held.reached.wait(60)
    client.close()
    assert server.of("/completion")[0].left.wait(60)
    held.release()
    assert set(threading.enumerate()) <= before


def test_closing_ends_a_question_of_another_thread(server: ScriptedServer) -> None:
    held, ended = Hold(), []
    server.script("/slots", Reply([held, b"[]"], 200, JSON))
    client = ServerClient(server.url)

    def ask() -> None:
        with pytest.raises(CancelledError):
            client.slots()
        ended.append(True)

    asking = threading.Thread(target=ask)
    asking.start()
    assert held.reached.wait(60)
    client.close()
    asking.join(60)
    assert ended == [True]
    held.release()
    with pytest.raises(CancelledError):
        client.metrics()


def test_an_interrupt_while_the_loop_is_made_leaves_nothing_half_made(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal interrupts the main thread, wherever it is: the loop is made on another."""
    makers, make = [], asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        makers.append(threading.current_thread())
        signal.raise_signal(signal.SIGINT)
        return make()

    client = ServerClient(server.url)
    monkeypatch.setattr(asyncio, "new_event_loop", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            client.facts()
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(asyncio, "new_event_loop", make)
    assert makers and makers[0] is not threading.main_thread()
    assert client.facts().props
    client.close()
    gc.collect()  # a coroutine that no one awaits says so, which fails the test


def test_no_file_left_for_a_loop_is_told_to_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", refused)
    with ServerClient("http://127.0.0.1:1") as client, pytest.raises(OSError, match="Too many"):
        client.facts()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            error_reply(
                400, "too long", "exceed_context_size_error", n_prompt_tokens=1201, n_ctx=256
            ),
            "The prompt has 1201 tokens, but {url} has a context of 256.",
        ),
        (
            error_reply(
                400, "too long", "exceed_context_size_error", n_prompt_tokens="\x1b[2J", n_ctx=[]
            ),
            "The prompt has �[2J tokens, but {url} has a context of [].",
        ),
        (WEB_PAGE, "{url} answers /completion with text/html that llama-server does not send."),
        (error_reply(500, "no slot"), "{url} refuses /completion with status 500: no slot."),
        (Reply(b"\xff\xfe", 400, JSON), "{url} refuses /completion with status 400."),
    ],
)
def test_a_refused_request_is_one_sentence(
    server: ScriptedServer, client: ServerClient, reply: Reply, said: str
) -> None:
    server.script("/completion", reply)
    assert all_of(ask(client, server))[-1].reason == said.format(url=server.url)


def test_a_proxy_of_the_system_is_not_used_for_this_machine(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ServerClient(server.url) as client:
        assert client.facts().props


def test_importing_the_client_loads_no_http_library() -> None:
    code = "import sys, engine.observe.server.client; print(*sys.modules)"
    root = Path(__file__).parents[4]
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert not {"httpx", "torch", "uvicorn", "anyio"} & set(said.stdout.split())
