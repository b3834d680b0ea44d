"""`draftscope observe URL --listen`: other programs talk to the server, and are recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.__main__ import main
from engine.observe.proxy.proxy_run import ProxyRun
from engine.trace.reopen import open_trace
from tests.support.scripted_replies import Reply, cut, json_reply, stream
from tests.support.scripted_server import ScriptedServer

ROOT = Path(__file__).parents[3]
SUMS = "96 tokens, "
ACCEPTED = "43 of 152 drafted tokens accepted (0.283)"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as started:
        yield started


def unasked(server: ScriptedServer) -> dict[str, Any]:
    body = server.capture["requests"][0]["body"]
    return {k: v for k, v in body.items() if k != "timings_per_token"}


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[str], None]], None]:
    """What a program does once the proxy listens; after this many requests the watching ends."""

    def begin(n: int, ask: Callable[[str], None]) -> None:
        advance, threads = ProxyRun.advance, []

        def advanced(run: ProxyRun) -> bool:
            if not threads:
                threads.append(threading.Thread(target=ask, args=[run.url]))
                threads[0].start()
            more = advance(run)
            if len(run.requests) == n and not run._open:
                threads[0].join(60)
                return False
            return more

        monkeypatch.setattr(ProxyRun, "advance", advanced)

    return begin


def test_requests_are_told_as_they_end_and_exported(
    server: ScriptedServer,
    asking: Callable[[int, Callable[[str], None]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.script("/completion", Reply(stream(server.capture["requests"][0])))
    server.script("/completion", Reply(cut(stream(server.capture["requests"][0]), 20)))
    body = unasked(server)

    def ask(url: str) -> None:
        httpx.post(f"{url}/completion", json=body, trust_env=False)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/completion", json=body, trust_env=False)

    asking(2, ask)
    folder = tmp_path / "trace"
    assert main(["observe", server.url, "--listen", "0", "--trace", str(folder)]) == 0
    told = capsys.readouterr()
    first, second, *rest = told.out.splitlines()
    assert first.startswith(f"0 /completion: {SUMS}") and ACCEPTED in first
    assert second.endswith(f"; {server.url} broke off its reply.")
    assert any("stream-cut" in line for line in rest)
    assert "{" not in told.out, "an object is for --json"
    assert re.match(
        rf"draftscope: requests to http://127.0.0.1:\d+ are forwarded to {server.url}; ", told.err
    )
    facts = open_trace(folder).runs[0]
    assert facts["attachment"] == "proxy"
    assert [request["complete"] for request in facts["requests"]] == [True, False]


def test_a_reply_without_timings_has_the_figures_of_its_usage(
    server: ScriptedServer,
    asking: Callable[[int, Callable[[str], None]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 20}
    choice = {"index": 0, "text": "a b", "finish_reason": "length"}
    reply = {"choices": [choice], "usage": usage}
    server.script("/v1/completions", json_reply(reply))

    def ask(url: str) -> None:
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False)

    asking(1, ask)
    assert main(["observe", server.url, "--listen", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "0 /v1/completions: 20 tokens"


def test_one_object_and_nothing_added(
    server: ScriptedServer,
    asking: Callable[[int, Callable[[str], None]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = unasked(server)
    asking(1, lambda url: httpx.post(f"{url}/completion", json=body, trust_env=False) and None)
    options = ["--listen", "127.0.0.1:0", "--pass-unchanged", "--json"]
    assert main(["observe", server.url, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert server.of("/completion")[0].json == body
    assert report["requests"][0]["path"] == "/completion"
    assert report["sequences"][0]["totals"]["draft_n"] == 152
    assert report["server"]["address"] == server.url


def test_a_server_that_keeps_its_facts_to_those_with_a_key(
    asking: Callable[[int, Callable[[str], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients have keys of their own, which pass through and are shown nowhere."""
    with ScriptedServer("mtp", key="secret") as server:
        body = unasked(server)
        headers = {"Authorization": "Bearer secret"}
        asking(
            1,
            lambda url: (
                httpx.post(f"{url}/completion", json=body, headers=headers, trust_env=False)
                and None
            ),
        )
        assert main(["observe", server.url, "--listen", "0"]) == 0
    told = capsys.readouterr()
    assert (
        ACCEPTED in told.out and "note: the server names its model only with an API key" in told.err
    )
    assert "secret" not in told.out + told.err


def test_listening_beyond_this_machine_is_warned_of(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProxyRun, "advance", lambda run: False)
    assert main(["observe", server.url, "--listen", "0.0.0.0:0"]) == 0
    assert "warning: other machines can use the server" in capsys.readouterr().err
    assert main(["observe", server.url, "--listen", "0"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--listen", "everywhere"], "is not an address to listen at"),
        (["--listen", "192.0.2.1:0"], "Cannot listen at 192.0.2.1:0"),
        (["--listen", "0", "-p", "a"], "Prompts and --listen cannot be combined."),
    ],
)
def test_wrong_usage(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["observe", server.url, *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals of this kind are POSIX's")
@pytest.mark.parametrize(
    ("number", "status", "before"),
    [
        (signal.SIGINT, 0, signal.SIG_DFL),
        (signal.SIGINT, 0, signal.SIG_IGN),  # of a script's background job
        (signal.SIGTERM, 143, signal.SIG_DFL),
    ],
)
def test_ctrl_c_is_how_it_ends(
    server: ScriptedServer,
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    before: signal.Handlers,
) -> None:
    folder = tmp_path / "trace"
    command = [sys.executable, "-m", "app", "observe", server.url, "--listen", "0"]
    process = subprocess.Popen(
        [*command, "--trace", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, before),
    )
    try:
        assert process.stderr is not None
        url = re.search(r"http://\S+", process.stderr.readline())
        assert url is not None
        httpx.post(f"{url[0]}/completion", json=unasked(server), trust_env=False)
        assert process.stdout is not None
        assert ACCEPTED in process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, err
    assert "43 of 152" in out and len(open_trace(folder).rounds) == 53
