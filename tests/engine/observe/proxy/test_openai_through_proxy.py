"""The `openai` package through the proxy: what it gets is what it gets without, byte for byte.

Against a script for the whole suite; marked `peer` against the llama-server of a build.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.analysis.findings.check import recorded
from engine.observe.proxy.exchange_queue import ExchangeQueue
from engine.observe.proxy.proxy import Proxy
from engine.observe.proxy.proxy_run import ProxyRun
from engine.observe.rounds.counters import counted, movement, read_counters
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.server.client import ServerClient
from engine.trace.store import TraceStore
from resources import DEMO_TARGET
from tests.support.llama_server import llama_server, logged_rounds
from tests.support.openai_reader import PROMPT, Reader, told_apart_from_time
from tests.support.scripted_replies import CAPTURES, Hold, Reply, json_reply
from tests.support.scripted_server import ScriptedServer


def test_two_streams_and_a_plain_request() -> None:
    """Two concurrent streams and a plain request, as the package sent them to a real server."""
    path = CAPTURES / "proxy-openai-client.json.gz"
    if not path.exists():
        pytest.skip("the captures are not here")
    records = json.loads(gzip.decompress(path.read_bytes()))["records"]
    empty = {"requests": [], "props": {}, "models": {}, "slots": [], "extra": {}}
    hold = Hold()
    queue = ExchangeQueue()
    with ScriptedServer(empty) as server:
        for record in records:
            if "events" in record:
                pieces = [f"{lines}\n\n".encode() for _, lines in record["events"]]
                server.script(record["path"], Reply([pieces[0], hold, *pieces[1:]]))
        proxy = Proxy(server.url, queue)
        proxy.start()
        reader = Reader(proxy.url)
        texts: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda: texts.update(chat=reader.chat(40))),
            threading.Thread(target=lambda: texts.update(complete=reader.complete(60))),
        ]
        for thread in threads:
            thread.start()
        while len(server.received) < 2:
            time.sleep(0.005)
        server.script("/v1/completions", json_reply(json.loads(records[2]["text"])))
        texts["plain"] = reader.plain(16)
        hold.release()
        for thread in threads:
            thread.join(60)
        reader.client.close()
        notes = queue.take()
        while sum(note.kind in ("done", "broke") for note in notes) < 3:
            time.sleep(0.005)  # a client may have all before the proxy has seen the end
            notes += queue.take()
        proxy.stop()
    assert texts["plain"] == json.loads(records[2]["text"])["choices"][0]["text"]
    for record, name in zip(records, ("complete", "chat"), strict=False):
        events = [json.loads(lines[6:]) for _, lines in record["events"] if "[DONE]" not in lines]
        choices = [choice for event in events for choice in event["choices"]]
        told = [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
        assert texts[name] == "".join(told)
        asked = next(one.json for one in server.of(record["path"]) if one.json.get("stream"))
        assert asked["timings_per_token"] is True
        assert asked.get("verbose", False) is (name == "complete")
    kept = {note.request: note.path for note in notes if note.kind == "request"}
    ends = [note.kind for note in notes if note.kind in ("done", "broke")]
    assert sorted(kept.values()) == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert ends == ["done"] * 3
    for number, its_path in kept.items():
        reply = b"".join(n.data for n in notes if n.request == number and n.kind == "data")
        sent = b"".join(
            f"{lines}\n\n".encode()
            for record in records[:2]
            if record["path"] == its_path
            for _, lines in record["events"]
        )
        assert reply == sent or reply.startswith(b"{")
    assert "secret" not in repr(notes)


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address and the log of a llama-server that drafts, with four slots."""
    log = tmp_path_factory.mktemp("server") / "log"
    words = ("-m", DEMO_TARGET, "-np", 4, "-c", 4096, "--spec-type", "draft-mtp")
    with llama_server(log, *words, "--spec-draft-n-max", 3) as url:
        yield url, log


@pytest.fixture
def real_url(real_server: tuple[str, Path]) -> str:
    return real_server[0]


@pytest.mark.peer
def test_a_real_server_says_the_same_with_and_without(real_url: str) -> None:
    proxy = Proxy(real_url, ExchangeQueue())
    proxy.start()
    straight, through = Reader(real_url), Reader(proxy.url)
    # the drafter is warm from the second request on, and the text of the cache is not reused
    same = {"cache_prompt": False, "id_slot": 0}
    for ask in ("chat", "complete", "plain"):
        texts = [
            getattr(reader, ask)(48, **same) for reader in (straight, straight, through, straight)
        ]
        assert len(set(texts)) == 1 and texts[0]
        replies = []
        for reader in (straight, through):
            getattr(reader, ask)(48, **same)
            replies += [told_apart_from_time(next(iter(reader.bytes.values())))]
            reader.bytes.clear()
        assert replies[0] == replies[1]
        assert (b'"timings"' in replies[0]) and replies[0].count(b'"timings"') == 1
    for reader in (straight, through):
        reader.client.close()
    proxy.stop()


STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": PROMPT, "n_predict": 40}),
    ("/completion", {"prompt": PROMPT, "n_predict": 9, "return_progress": True, "n_probs": 3}),
    (
        "/completion",
        {
            "prompt": PROMPT,
            "n_predict": 9,
            "response_fields": ["content", "generation_settings/timings_per_token"],
        },
    ),
    ("/completions", {"prompt": [PROMPT, PROMPT], "n_predict": 9}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "logprobs": 3}),
    ("/v1/responses", {"input": PROMPT, "max_output_tokens": 24}),
    ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24}),
    ("/completion", {"prompt": PROMPT, "n_predict": -5, "temperature": "cold"}),
]


@pytest.mark.peer
@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_every_endpoint_of_a_real_server(real_url: str, path: str, body: dict[str, Any]) -> None:
    body = {"temperature": 0, "stream": True, "cache_prompt": False, "id_slot": 0} | body
    if isinstance(body.get("prompt"), list):
        del body["id_slot"]
    proxy = Proxy(real_url, ExchangeQueue())
    proxy.start()
    replies = []
    for url in (real_url, real_url, proxy.url):
        reply = httpx.post(f"{url}{path}", json=body, timeout=60, trust_env=False)
        # the events of two prompts come in any order
        events = reply.content.split(b"\n\n")
        replies.append((reply.status_code, sorted(map(told_apart_from_time, events))))
    proxy.stop()
    assert replies[2] == replies[1]


@pytest.mark.peer
def test_only_timings_differ_where_a_stop_string_ends_the_text(real_url: str) -> None:
    """A server adds timings to the event that completes a stop string, and only it knows which."""
    body = {"prompt": PROMPT, "temperature": 0, "stream": True, "stop": ["return"]}
    body |= {"n_predict": 60, "cache_prompt": False, "id_slot": 0}
    proxy = Proxy(real_url, ExchangeQueue())
    proxy.start()
    replies = []
    for url in (real_url, real_url, proxy.url):
        reply = httpx.post(f"{url}/completion", json=body, timeout=60, trust_env=False)
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]
        replies.append([{k: v for k, v in event.items() if k != "timings"} for event in events])
    proxy.stop()
    assert replies[2] == replies[1] and replies[1][-1]["stop_type"] == "word"


@pytest.mark.peer
def test_rounds_of_four_clients_at_once_are_those_of_the_log(real_server: tuple[str, Path]) -> None:
    url, log = real_server
    begun = len(log.read_text(errors="replace"))
    with ServerClient(url) as client:
        before = client.metrics()
        run = ProxyRun(client.facts(), TraceStore())
        readers = [Reader(run.url) for _ in range(4)]
        asked = [
            lambda: readers[0].chat(64),
            lambda: readers[1].chat(50, temperature=0.8),
            lambda: readers[2].complete(64, temperature=0.8),
            lambda: readers[3].complete(40),
        ]
        threads = [threading.Thread(target=ask) for ask in asked]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or run._open:
            run.advance()
        for reader in readers:
            reader.client.close()
        run.stop()
        after = client.metrics()
    assert before is not None and after is not None
    moved = movement(read_counters(before[0]), read_counters(after[0])).moved
    for name, count in counted(run.trace, run.run_id).items():
        assert moved[name] == count > 20
    rounds = run.trace.rounds
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for i in range(len(rounds)):
        row = rounds.row(i)
        if row["num_draft_tokens"]:
            counts = row["num_accepted_draft_tokens"], row["num_draft_tokens"]
            is_restore = row["rollback_path"].startswith("restore")
            found.setdefault(row["seq_id"], []).append((*counts, is_restore))
    told = logged_rounds(log.read_text(errors="replace")[begun:])
    assert sorted(found.values()) == sorted(told)


@pytest.mark.peer
def test_the_log_is_joined_to_streams_without_ids(tmp_path: Path) -> None:
    """Also where the log tells of another request with a prompt as long, just before."""
    log = tmp_path / "full"
    words = ("-m", DEMO_TARGET, "-np", 1, "-c", 1024, "--spec-type", "draft-mtp", "-lv", 5)
    with llama_server(tmp_path / "log", *words, "--log-file", log) as url:
        run = ProxyRun(ServerFacts(url), TraceStore(), log=log)
        asked: list[tuple[str, dict[str, Any]]] = [
            ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("responses", {"input": "Hello", "stream": True}),
        ] * 3
        for path, body in asked:
            body = {"temperature": 0.8, "n_predict": 30, "ignore_eos": True} | body
            httpx.post(f"{run.url}/v1/{path}", json=body, timeout=60, trust_env=False)
            run.advance()
        while run._open:
            run.advance()
        run.stop()
    rounds = run.trace.rounds
    assert recorded(run.trace) == []
    later = rounds.column("num_draft_tokens") > 0
    assert later.sum() > 20 and set(rounds.column("seq_id")[later].tolist()) == {1, 3, 5}
    assert (rounds.column("verify_ms")[later] > 0).all()
