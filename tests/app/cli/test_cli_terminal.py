"""Every subcommand with names, texts and messages that a terminal would obey."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.__main__ import main
from app.cli.parser import SUBCOMMANDS
from engine.observe.proxy.proxy_run import ProxyRun
from engine.session import Session
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.fake_llama import FakeLlama, use
from tests.support.hostile_words import HOSTILE, IN_A_NAME, hostile_model, left_of, write_json
from tests.support.rewrite_gguf import rewrite
from tests.support.scripted_replies import Reply, changed, error_reply, json_reply, stream
from tests.support.scripted_server import ScriptedServer

Cli = Callable[..., Outcome]
QUICK = ("--threads", 1, "--compute", "f32", "-n", 5)
RECORD = ROOT / "tests" / "data" / "records" / "vllm-detailed-stream.json"


@dataclass(frozen=True)
class World:
    """Files with hostile names and contents."""

    folder: Path
    model: Path
    llama: FakeLlama

    def named(self, suffix: str) -> Path:
        return self.folder / f"{IN_A_NAME}{suffix}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    model = hostile_model(folder)
    world = World(folder, model, FakeLlama(Session.open(model, compute="f32")))
    write_json(
        world.named(".prompts"),
        [
            {"name": f"{HOSTILE}{i}", "text": f"{i} {HOSTILE}", "category": HOSTILE}
            for i in range(2)
        ],
    )
    write_json(world.named(".turns"), [{"role": "user", "content": HOSTILE}])
    world.named(".memory").write_text(
        "context A\ndecode A 0: 1 2\nexpect A 0 pos=7 # \x1b]0;\x07\x9b31m\u202e", "utf-8"
    )
    plan = (
        f"title = {json.dumps(HOSTILE, ensure_ascii=False)}\n[settings]\nn-predict = 2\nlimit = 1\n"
    )
    for entry in (
        {"model": str(world.model), "prompts": str(world.named(".prompts")), "threads": 1},
        {"model": str(world.model), "prompts": str(world.named(".prompts")), "ctx-size": 8},
    ):
        plan += "[[jobs]]\n" + "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in entry.items()
        )
    world.named(".toml").write_text(plan.replace("\x7f", "\\u007F"), "utf-8")
    record = json.loads(RECORD.read_bytes())
    record[HOSTILE] = HOSTILE
    for event in record.get("stream", record.get("events", [])):
        if isinstance(event, dict):
            event[HOSTILE] = HOSTILE
    write_json(world.named(".json"), record)
    rewrite(world.model, world.named(".odd"), {"general.architecture": IN_A_NAME})
    words = ["run", world.model, "-p", HOSTILE, *QUICK, "--spec-type", "draft-mtp"]
    assert main([str(word) for word in (*words, "--trace", world.named(".trace"))]) == 0
    return world


COMMANDS: dict[str, Callable[[World], list[object]]] = {
    "info": lambda w: ["info", w.model],
    "info, json": lambda w: ["info", w.model, "--json"],
    "bisect": lambda w: ["bisect", w.model, "--repo", HOSTILE, "--good=a", f"--bad={HOSTILE}"],
    "conform": lambda w: ["conform", HOSTILE],
    "info, unknown architecture": lambda w: ["info", w.named(".odd")],
    "tokenize": lambda w: ["tokenize", w.model, HOSTILE],
    "tokenize, json": lambda w: ["tokenize", w.model, HOSTILE, "--json"],
    "logits": lambda w: ["logits", w.model, "--tokens", "1,2", "--out", w.named(".npz")],
    "logits, json": lambda w: [
        "logits",
        w.model,
        "--tokens=1",
        f"--out={w.named('.npz')}",
        "--json",
    ],
    "run, json": lambda w: ["run", w.model, "-p", HOSTILE, *QUICK, "--json"],
    "run, markdown": lambda w: ["run", w.model, "-p", HOSTILE, *QUICK, "--markdown"],
    "run, report": lambda w: [
        *("run", w.model, "-p", HOSTILE, *QUICK, "--markdown", "--report", w.named(".html"))
    ],
    "run, chat": lambda w: ["run", w.model, "-p", "refuse", *QUICK, "--chat"],
    "run, turns": lambda w: ["run", w.model, "--turns", w.named(".turns"), *QUICK],
    "run, turns as text": lambda w: [
        *("run", w.model, "--turns", w.named(".turns"), *QUICK, "--turns-answers", "anew")
    ],
    "run, unknown drafter": lambda w: ["run", w.model, "-p", "a", "--spec-type", HOSTILE],
    "compare": lambda w: ["compare", w.model, "-p", HOSTILE, *QUICK, "--lane", "ring"],
    "compare, json": lambda w: ["compare", w.model, "-p", HOSTILE, *QUICK, "--json"],
    "compare, markdown": lambda w: ["compare", w.model, "-p", HOSTILE, *QUICK, "--markdown"],
    "compare, lane": lambda w: ["compare", w.model, "-p", "a", "--lane", f"ring,fault={HOSTILE}"],
    "compare, scenario": lambda w: ["compare", w.model, "--scenario", HOSTILE],
    "memory": lambda w: ["memory", w.named(".memory"), "-m", w.model, "--rollback", "ring"],
    "memory, no script": lambda w: ["memory", w.named(".turns"), "-m", w.model],
    "memory, json": lambda w: ["memory", w.named(".memory"), "-m", w.model, "--json"],
    "check-rollback": lambda w: [
        *("check-rollback", w.model, "--depths", 1, "-n", 6, "--trace", w.named(".checked"))
    ],
    "bench": lambda w: ["bench", w.model, "--prompts", w.named(".prompts"), *QUICK],
    "bench, json": lambda w: [
        *("bench", w.model, "--prompts", w.named(".prompts"), *QUICK),
        *("--json", "--out", w.named(".bench")),
    ],
    "bench, markdown": lambda w: [
        *("bench", w.model, "--prompts", w.named(".prompts"), *QUICK, "--markdown")
    ],
    "bench, w1": lambda w: ["bench", "w1", w.model, "--prompts", w.named(".prompts"), *QUICK],
    "bench, slots": lambda w: [
        *("bench", "slots", w.model, "--slots", "1", "--prompts", w.named(".prompts"), *QUICK)
    ],
    "bench, recording": lambda w: [
        *("bench", "recording", w.model, "--repeat", 1, "--prompts", w.named(".prompts"), *QUICK)
    ],
    "bench, steps": lambda w: [
        "bench",
        "forward",
        w.model,
        "--steps",
        "1",
        "--repeat",
        1,
        "--threads",
        1,
    ],
    "bench, splits": lambda w: [
        *("bench", "forward", w.model, "--splits", "--repeat", 1, "--threads", 1)
    ],
    "bench, against": lambda w: ["bench", "against", w.model, "--llama-cpp", w.named(".build")],
    "bench, compare": lambda w: ["bench", "compare", w.named(".a"), w.named(".b")],
    "bench, write": lambda w: ["bench", "random-model", w.named(".new"), "--size", "tiny"],
    "sweep, list": lambda w: ["sweep", w.named(".toml"), "--out", w.named(".sweep"), "--list"],
    "sweep": lambda w: ["sweep", w.named(".toml"), "--out", w.named(".sweep")],
    "sweep, json": lambda w: ["sweep", w.named(".toml"), "--out", w.named(".sweep"), "--json"],
    "sweep, markdown": lambda w: [
        *("sweep", w.named(".toml"), "--out", w.named(".sweep"), "--markdown")
    ],
    "tune": lambda w: [
        *("tune", w.model, "--prompts", w.named(".prompts"), *QUICK, "--spec-type", "suffix"),
        *("--json", w.named(".tuned"), "--out", w.named(".tune")),
    ],
    "tune, drafter": lambda w: ["tune", w.model, "--spec-type", HOSTILE],
    "match": lambda w: ["match", w.model, "--prompts", w.named(".prompts"), *QUICK],
    "match, json": lambda w: ["match", w.model, "--prompts", w.named(".prompts"), *QUICK, "--json"],
    "fidelity": lambda w: ["fidelity", w.model, "-p", HOSTILE, "-n", 3, "--modes", "q8"],
    "fidelity, json": lambda w: ["fidelity", w.model, "-p=a", "-n=3", "--modes=q8", "--json"],
    "import": lambda w: ["import", w.named(".json"), "--trace", w.named(".imported")],
    "import, json": lambda w: ["import", w.named(".json"), "--json"],
    "import, no record": lambda w: ["import", w.named(".turns")],
    "export": lambda w: [
        *("export", w.named(".trace"), "--aiperf", w.named(".jsonl"), "--html", w.named(".html")),
        *("--perfetto", w.named(".pftrace")),
    ],
    "run, fork": lambda w: ["run", w.model, "--from", w.named(".trace"), "--round", 1],
    "rescore": lambda w: ["rescore", w.named(".trace"), w.model, "--trace", w.named(".again")],
    "rescore, json": lambda w: ["rescore", w.named(".trace"), w.model, "--json"],
    "triage": lambda w: ["triage", w.named(".trace"), w.named(".trace")],
    "acceptance": lambda w: ["acceptance", w.named(".trace")],
    "acceptance, two": lambda w: ["acceptance", w.named(".trace"), w.named(".trace")],
    "drafter-diff": lambda w: ["drafter-diff", w.named(".trace"), w.named(".trace")],
    "triage, json": lambda w: ["triage", w.named(".trace"), w.named(".trace"), "--json"],
    "demo-path": lambda w: ["demo-path", HOSTILE],
    "help": lambda w: ["help", HOSTILE],
    "window": lambda w: [HOSTILE],
    "window, folder": lambda w: [w.folder, f"--{HOSTILE}"],
}
STATUS = {
    "compare": (0, 1),
    "import, no record": (1,),
    "run, chat": (1,),
    **dict.fromkeys(("memory", "memory, json", "sweep", "sweep, json", "sweep, markdown"), (1,)),
    **dict.fromkeys(
        ("run, unknown drafter", "compare, lane", "compare, scenario", "memory, no script"), (2,)
    ),
    **dict.fromkeys(("tune, drafter", "demo-path", "help", "window", "window, folder"), (2,)),
    **dict.fromkeys(("bench, against", "bench, compare"), (1, 2)),
    **dict.fromkeys(("bisect", "conform"), (2,)),
}


def check(outcome: Outcome, *, is_terminal: bool) -> None:
    assert not left_of(outcome.out, is_terminal=is_terminal)
    assert not left_of(outcome.err, is_terminal=is_terminal)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("name", "is_terminal"),
    [
        *((name, True) for name in COMMANDS),
        *((name, False) for name in ("info, json", "run, json", "run, markdown", "rescore")),
    ],
)
@pytest.mark.thinned(12)
def test_no_command_sends_a_terminal_what_a_file_says(
    cli: Cli, world: World, name: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, world.llama)
    for name_of_stream in ("stdout", "stderr") if is_terminal else ():
        monkeypatch.setattr(f"sys.{name_of_stream}.isatty", lambda: True)
    outcome = cli(*COMMANDS[name](world))
    check(outcome, is_terminal=is_terminal)
    assert outcome.status in STATUS.get(name, (0,)), outcome.err
    if "json" in name:
        assert outcome.json


def test_every_command_is_among_them() -> None:
    assert {name.partition(",")[0] for name in COMMANDS} == {*SUBCOMMANDS, "window"} - {"observe"}


def test_the_text_of_a_run_is_itself_in_a_pipe_and_harmless_on_a_terminal(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", world.model, "-p", f"{HOSTILE}é\u200d\t", *QUICK)
    outcome = cli(*words)
    assert outcome.out.startswith(f"{HOSTILE}é\u200d\t") and HOSTILE in outcome.out[len(HOSTILE) :]
    assert HOSTILE in cli(*words, "-p", "a").out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for more in ((), ("-p", "a")):
        outcome = cli(*words, *more)
        check(outcome, is_terminal=True)
        assert "é\u200d\t" in outcome.out and r"\x9b31m\u202e" in outcome.out


# servers


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        props = {"build_info": HOSTILE, "model_path": HOSTILE, "total_slots": 1, HOSTILE: HOSTILE}
        server.script("/props", *[json_reply({**props, "default_generation_settings": {}})] * 9)
        yield server


def hostile_stream(server: ScriptedServer) -> Reply:
    """The captured reply with a hostile text in each event."""

    def change(_: int, event: Any) -> Any:
        return {**event, "content": HOSTILE, HOSTILE: HOSTILE}

    return Reply(changed(stream(server.capture["requests"][0]), change))


PROMPT = ("-p", "def quicksort(arr):", "-n", 96)


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_observe_on_a_terminal(
    cli: Cli, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, no_colour: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    server.script("/completion", hostile_stream(server))
    outcome = cli("observe", server.url, *PROMPT)
    check(outcome, is_terminal=True)
    assert r"\x1b]0;b\x07" in outcome.out and r"\x1b]0;b\x07" in outcome.err
    assert ("\x1b[" in outcome.out) != bool(no_colour)


def test_observe_in_a_pipe(cli: Cli, server: ScriptedServer) -> None:
    server.script("/completion", hostile_stream(server), hostile_stream(server))
    outcome = cli("observe", server.url, *PROMPT)
    assert HOSTILE * 2 in outcome.out and not left_of(outcome.err)
    outcome = cli("observe", server.url, *PROMPT, "--json")
    check(outcome, is_terminal=False)
    assert HOSTILE * 2 in outcome.json["sequences"][0]["text"]


@pytest.mark.parametrize(
    "words", [(), ("--json",), ("--capture", f"{IN_A_NAME}.gz"), ("--log", IN_A_NAME)]
)
def test_what_a_server_refuses_with(
    cli: Cli, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    server.script("/completion", error_reply(500, HOSTILE, HOSTILE))
    outcome = cli("observe", server.url, *PROMPT, *words)
    check(outcome, is_terminal=False)
    assert outcome.status


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_clients_of_the_proxy_ask_and_get(
    cli: Cli, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, words: Any
) -> None:
    advance, threads = ProxyRun.advance, []
    server.script("/completion", hostile_stream(server), error_reply(500, HOSTILE, HOSTILE))

    def ask(url: str) -> None:
        for _ in range(2):
            httpx.post(f"{url}/completion", json={"prompt": HOSTILE}, trust_env=False)

    def advanced(run: ProxyRun) -> bool:
        if not threads:
            threads.append(threading.Thread(target=ask, args=[run.url]))
            threads[0].start()
        more = advance(run)
        if len(run.requests) == 2 and not run._open:
            threads[0].join(60)
            return False
        return more

    monkeypatch.setattr(ProxyRun, "advance", advanced)
    outcome = cli("observe", server.url, "--listen", "0", *words)
    check(outcome, is_terminal=False)
    assert outcome.status == 0 and "/completion" in outcome.out


# what is not ours to word


def test_faults_and_the_words_of_libraries_are_filtered_too(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_file(*_: object, **__: object) -> None:
        sys.stderr.write(HOSTILE)
        sys.stderr.writelines([HOSTILE, "\n"])
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("engine.gguf.file.GgufFile.open", open_file)
    outcome = cli("info", "--demo")
    assert outcome.status == 1 and outcome.err.rstrip().splitlines()[-1].startswith("B\\x00")
    assert outcome.err.count(r"\x9b31m\u202e") == 3
    assert not left_of(outcome.err)


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals as on POSIX")
def test_a_real_terminal(world: World) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "app", "run", world.model, "-p", IN_A_NAME, *map(str, QUICK)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # as Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    text = said.decode().replace("\r\n", "\n")
    assert r"\x9b31m\u202e" in text and not left_of(text, is_terminal=True)
