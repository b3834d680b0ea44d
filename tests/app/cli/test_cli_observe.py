"""observe: prompts sent to a llama-server by the command line, and every way that can go wrong."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import common as waiting
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.observed_texts import CAPTURED_TARGET
from tests.support.scripted_replies import (
    EVENTS,
    WEB_PAGE,
    Hold,
    Raw,
    Reply,
    changed,
    cut,
    dripped,
    error_reply,
    stream,
    token_flood,
)
from tests.support.scripted_server import ScriptedServer

Cli = Callable[..., Outcome]

KEY = "sk-a-key-that-must-not-show"
TEXT = "def quicksort(arr):"
PROMPT = ("-p", TEXT, "-n", 96)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        yield server


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_text_rounds_and_counters_are_shown(
    cli: Cli, server: ScriptedServer, tmp_path: Path
) -> None:
    outcome = cli("observe", server.url, *PROMPT, "--temp", 0.5, "--trace", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith("def quicksort(arr):  # noqa")
    assert "43 of 152 drafted tokens accepted" in outcome.out
    assert "52 rounds, 45 seq_rm, 6 nothing to roll back" in lines
    assert [line.split() for line in lines if line.startswith("accepted")] == [
        ["accepted", "tokens", "43", "43"]
    ]
    sent = server.of("/completion")[0].json
    assert sent["temperature"] == 0.5 and sent["n_predict"] == 96 and sent["timings_per_token"]
    rounds = table(tmp_path / "out" / "rounds.csv")
    assert sum(int(row["num_accepted_draft_tokens"] or 0) for row in rounds) == 43


def test_json_has_sequences_sums_and_counters(cli: Cli, server: ScriptedServer) -> None:
    second = server.capture["requests"][1]["body"]["prompt"]
    words = [*PROMPT, "-p", second, "--parallel", 2, "--json"]
    report = cli("observe", server.url, *words).json
    assert [len(one["tokens"]) for one in report["sequences"]] == [96, 96]
    assert report["totals"]["draft_n"] == 152 + 142
    assert report["counters"]["drafted_tokens"] == {"server": 294, "here": 294}
    assert report["model"]["name"] == "demo-target.gguf" and report["findings"] == []
    assert report["requests"][0]["settings"]["n_predict"] == 96


def test_several_prompts_are_printed_one_behind_the_other(cli: Cli, server: ScriptedServer) -> None:
    second = server.capture["requests"][1]["body"]["prompt"]
    out = cli("observe", server.url, *PROMPT, "-p", second).out
    assert "--- sequence 0\ndef quicksort(arr):  # noqa" in out
    assert "--- sequence 1\nclass Stack:" in out


def test_a_capture_is_the_same_run_once_more(
    cli: Cli, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    monkeypatch.setenv("SOME_KEY", KEY)
    capture, first, second = (tmp_path / name for name in ("a.json.gz", "first", "second"))
    words = ("-p", "def f(", "--api-key-env", "SOME_KEY", "--trace", first, "--capture", capture)
    assert cli("observe", server.url, *PROMPT, *words).status == 0
    assert cli("import", capture, "--trace", second).status == 0
    for name in ("rounds.csv", "tokens.csv", "drafts.csv", "findings.csv"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert KEY.encode() not in gzip.decompress(capture.read_bytes())
    refused = cli("observe", server.url, *PROMPT, "--capture", tmp_path)
    assert refused.status == 2 and "is a folder" in refused.err


def test_token_ids_are_sent_as_such(cli: Cli, server: ScriptedServer) -> None:
    assert cli("observe", server.url, "--tokens", "318,220", "-n", 4).status == 0
    assert server.of("/completion")[0].json["prompt"] == [318, 220]


def test_chat_goes_through_the_template_of_the_server(cli: Cli) -> None:
    with ScriptedServer("jsonl") as server:  # that capture has a reply of /apply-template
        words = ("-p", "hi", "--chat", "--chat-template-kwargs", '{"a": 1}')
        cli("observe", server.url, *words)
        asked = server.of("/apply-template")[0].json
        sent = server.of("/completion")[0].json
    assert asked["messages"] == [{"role": "user", "content": "hi"}]
    assert asked["chat_template_kwargs"] == {"a": 1}
    assert sent["prompt"].startswith("<|im_start|>user\nhi<|im_end|>")


def test_what_only_the_server_decides_is_told(cli: Cli, server: ScriptedServer) -> None:
    words = ("--spec-type", "draft-mtp", "--rollback", "ring", "--batch-invariant")
    outcome = cli("observe", server.url, *PROMPT, *words)
    notes = [line for line in outcome.err.splitlines() if "is not sent" in line]
    assert outcome.status == 0 and len(notes) == 3
    assert notes[0].startswith("draftscope: note: --spec-type is not sent: a request cannot set")


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_server_s_own_model_judges_what_it_emitted(
    cli: Cli, server: ScriptedServer, tmp_path: Path, is_changed: bool
) -> None:
    pieces = stream(server.capture["requests"][0])
    if is_changed:

        def other_token(number: int, event: Any) -> Any:
            return {**event, "tokens": [300]} if number == 40 else event

        server.script("/completion", Reply(changed(pieces, other_token)))
    words = ("--rescore", CAPTURED_TARGET, "--assume-same", "--trace", tmp_path / "out")
    outcome = cli("observe", server.url, *PROMPT, *words)
    assert outcome.status == int(is_changed), outcome.err
    assert "run 0: 96 tokens re-scored, compute f32, " in outcome.out
    assert ("96 of rank 1" in outcome.out) == (not is_changed)
    assert ("first at" in outcome.out) == is_changed
    assert "tokens/s" in outcome.out
    emitted = [
        row
        for row in table(tmp_path / "out" / "tokens.csv")
        if row["kind"] not in ("prompt", "rejected", "ignored")
    ]
    assert all(row["target_p"] for row in emitted) and len(emitted) == 96


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "There is no prompt."),
        (
            ("--listen", "0", "--rescore", DEMO_TARGET),
            "--rescore cannot be combined with --listen.",
        ),
        (("-p", "x", "--id-slot", -1), "--id-slot is outside 0..65536."),
        (("-p", "x", "--request", "[1]"), "is not a JSON object"),
        (("-p", "x", "--request", '{"stream": false}'), "--request sets stream"),
        (("-p", "x", "--api-key-env", "NO_SUCH_KEY"), "The variable NO_SUCH_KEY is not set."),
        (("-p", "x", "--top-p", 3), "--top-p is outside"),
    ],
)
def test_wrong_usage_is_2(
    cli: Cli, server: ScriptedServer, words: tuple[object, ...], said: str
) -> None:
    outcome = cli("observe", server.url, *words)
    assert outcome.status == 2 and said in outcome.err
    assert not server.of("/completion")


@pytest.mark.parametrize("url", ["ftp://x", "http://me:secret@127.0.0.1:8080"])
def test_an_address_that_is_none_is_2(cli: Cli, url: str) -> None:
    outcome = cli("observe", url, "-p", "x")
    assert outcome.status == 2 and "secret" not in outcome.err


def test_a_model_that_is_none_is_told_before_anything_is_sent(
    cli: Cli, server: ScriptedServer
) -> None:
    outcome = cli("observe", server.url, *PROMPT, "--rescore", "no-such.gguf")
    assert outcome.status == 1 and "no-such.gguf" in outcome.err and not server.received


def test_another_model_is_told_and_the_run_is_kept(
    cli: Cli, server: ScriptedServer, tmp_path: Path
) -> None:
    words = ("--rescore", DEMO_DRAFT, "--trace", tmp_path / "out")
    outcome = cli("observe", server.url, *PROMPT, *words)
    assert outcome.status == 1 and "another model" in outcome.err
    assert "43 of 152 drafted tokens accepted" in outcome.out
    assert (tmp_path / "out" / "rounds.csv").exists()


def test_nothing_listens(cli: Cli) -> None:
    outcome = cli("observe", "127.0.0.1:9", "-p", "x")
    assert outcome.status == 1 and outcome.out == ""
    assert outcome.err == (
        "draftscope: error: http://127.0.0.1:9 cannot be reached: connection refused. "
        "Start the server, or check address and port.\n"
    )


def test_a_server_that_loads_is_waited_for_and_said_once(cli: Cli) -> None:
    with ScriptedServer("mtp", loading=2) as server:
        outcome = cli("observe", server.url, *PROMPT)
        assert outcome.status == 0
        assert outcome.err.count("is loading its model") == 1


def test_a_stream_that_breaks_is_1_and_its_rounds_are_kept(
    cli: Cli, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script("/completion", Reply(cut(stream(server.capture["requests"][0]), 40)))
    server.script("/v1/stream", error_reply(404, "Stream not found"))
    outcome = cli("observe", server.url, *PROMPT, "--trace", tmp_path / "out")
    assert outcome.status == 1
    assert outcome.err.endswith(
        f"draftscope: error: {server.url} broke off its reply. "
        "Check that the server is running; then send it again.\n"
    )
    assert "warning: stream-cut: " in outcome.out
    assert len(table(tmp_path / "out" / "rounds.csv")) > 15


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (WEB_PAGE, "answers /completion with text/html"),
        (error_reply(503, "no slot", "server_error"), "status 503: no slot."),
        (
            error_reply(400, "x", "exceed_context_size_error", n_prompt_tokens=7, n_ctx=5),
            "The prompt has 7 tokens, but",
        ),
    ],
)
def test_a_refusal_is_1_and_one_sentence(
    cli: Cli, server: ScriptedServer, reply: Reply, said: str
) -> None:
    server.script("/completion", reply)
    outcome = cli("observe", server.url, *PROMPT)
    errors = [line for line in outcome.err.splitlines() if line.startswith("draftscope: error:")]
    assert outcome.status == 1 and len(errors) == 1 and said in errors[0]


def test_a_key_comes_from_the_environment_or_the_keyring(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: dict[tuple[str, str], str] = {}
    monkeypatch.setattr("keyring.get_password", lambda service, name: kept.get((service, name)))
    monkeypatch.setenv("SOME_KEY", KEY)
    monkeypatch.setenv("OLD_KEY", "sk-an-old-one")
    with ScriptedServer("mtp", key=KEY) as server:
        refused = cli("observe", server.url, *PROMPT)
        old = cli("observe", server.url, *PROMPT, "--api-key-env", "OLD_KEY")
        assert refused.status == old.status == 1
        assert refused.err.startswith(f"draftscope: error: {server.url} does not accept the API k")
        words = ("--api-key-env", "SOME_KEY", "--json", "--trace", tmp_path / "out")
        given = cli("observe", server.url, *PROMPT, *words)
        kept["draftscope", server.url] = KEY
        assert given.status == cli("observe", server.url, *PROMPT).status == 0
    said = refused.err + old.err + given.out + given.err
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.*"))
    assert KEY not in said and "sk-an-old-one" not in said and KEY.encode() not in written


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_the_request_at_the_server_and_keeps_what_came(
    server: ScriptedServer, tmp_path: Path
) -> None:
    held, sent = Hold(), stream(server.capture["requests"][0])[:40]
    server.script("/completion", Reply([*sent, held]))
    text = "".join(json.loads(piece.removeprefix(b"data: "))["content"] for piece in sent)
    words: list[Any] = [sys.executable, "-m", "app", "observe", server.url, *PROMPT]
    command = subprocess.Popen(
        [str(word) for word in [*words, "--trace", tmp_path / "out"]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a suite started in the background has its children ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdout is not None
    assert command.stdout.read(len(TEXT) + len(text)) == TEXT + text
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    held.release()
    assert command.returncode == 130 and err.endswith("draftscope: interrupted\n")
    assert server.of("/completion")[0].left.wait(60)
    assert [one.method for one in server.of("/v1/stream")] == ["DELETE"]
    assert "tokens/s" in out and len(table(tmp_path / "out" / "rounds.csv")) > 15


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("how", "number"),
    [("flood", signal.SIGINT), ("silent", signal.SIGTERM), ("dripped", signal.SIGINT)],
)
def test_a_signal_ends_the_command_whatever_the_server_sends(
    server: ScriptedServer, tmp_path: Path, how: str, number: int
) -> None:
    replies = {
        "flood": Raw(token_flood),
        "silent": Raw(lambda: []),
        "dripped": dripped(b"X-A: b\r\n", b"HTTP/1.1 200 OK\r\n"),
    }
    server.script("/completion", replies[how])
    words: list[Any] = [sys.executable, "-m", "app", "observe", server.url, *PROMPT]
    command = subprocess.Popen(
        [str(word) for word in [*words, "--trace", tmp_path / "out"]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdout is not None
    shown = command.stdout.read(2000 if how == "flood" else len("def quicksort(arr):"))
    while not server.of("/completion"):
        assert command.poll() is None
    command.send_signal(number)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 128 + number and b"interrupted" in err, err
    assert server.of("/completion")[0].left.wait(20)
    rows = table(tmp_path / "out" / "rounds.csv")
    assert len(rows) > 100 if how == "flood" else not rows
    assert shown.startswith(b"def quicksort(arr):")


def test_a_limit_of_time_is_an_option_and_its_error_names_it(
    cli: Cli, server: ScriptedServer
) -> None:
    server.script("/completion", dripped(b"data: x", EVENTS))
    outcome = cli("observe", server.url, *PROMPT, "--timeout", 0.2)
    assert outcome.status == 1
    assert f"Waiting for the first event of {server.url} took more than 0.2 s." in outcome.err
    server.script("/props", Raw(lambda: []))
    outcome = cli("observe", server.url, *PROMPT, "--connect-timeout", 0.3)
    assert outcome.status == 1 and "/props took more than 0.3 s" in outcome.err
    assert cli("observe", server.url, *PROMPT, "--timeout", 0).status == 2


def test_a_wait_is_counted_below_the_text_of_a_terminal(
    cli: Cli, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.observe.server.reply._SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    server.script("/completion", Raw(lambda: []))
    outcome = cli("observe", server.url, *PROMPT, "--timeout", 1.5)
    said = f"waiting for the headers of {server.url}/completion, "
    assert f"\x1b7\r\n\x1b[K{said}0 of 1.5 s\x1b8" in outcome.err
    assert f"{said}1 of 1.5 s" in outcome.err
    end = outcome.err.rpartition("\x1b7\r\n")[2]
    assert end.startswith("\x1b[K\x1b8draftscope"), "it is taken away at the end"


def test_a_wait_is_a_line_now_and_then_where_no_line_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting, "perf_counter", lambda: now[0])
    line = waiting._WaitingLine()
    for _ in range(100):
        now[0] += 1.0
        line.show(f"waiting for the headers of URL, {now[0]:.0f} of 600 s")
    said = capsys.readouterr().err.splitlines()
    assert [one.split()[-4] for one in said] == ["5", "9", "17", "33", "65"]
    for i in range(100):  # a slow server, which lets wait a little before every token
        now[0] += 1.0
        line.show(f"waiting for the next event of URL, {2 + i % 3} of 600 s" if i % 5 else "")
    assert not capsys.readouterr().err


def test_a_terminal_is_not_given_more_than_it_can_show(
    cli: Cli, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.observe._MOST_PAINTED", 10)
    whole = cli("observe", server.url, *PROMPT)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", colour)
        outcome = cli("observe", server.url, *PROMPT)
        assert "tokens arrived too fast to be shown]" in outcome.out
    assert "too fast" not in whole.out, "a file or another program gets everything"
    assert "43 of 152 drafted tokens accepted" in outcome.out


def test_colours_are_for_terminals(cli: Cli, server: ScriptedServer, monkeypatch: Any) -> None:
    assert "\x1b[" not in cli("observe", server.url, *PROMPT).out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    plain = cli("observe", server.url, *PROMPT).out
    assert "\x1b[4;38;5;32m" in plain and "\x1b[1;38;5;166m" in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in cli("observe", server.url, *PROMPT).out


def test_the_program_starts_without_http_and_torch(python: Callable[..., Any]) -> None:
    code = (
        "import sys\nfrom app.__main__ import main\nmain(['observe', '--help'])\n"
        "print({'torch', 'httpx', 'anyio', 'keyring', 'uvicorn'} & set(sys.modules))"
    )
    assert python(code).stdout.splitlines()[-1] == "set()"
