"""Hostile words in all that the program reads: a terminal gets nothing but what the program says
itself."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.scripted_replies import error_reply, events, read_capture
from tests.support.scripted_server import ScriptedServer
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.commands import Said, said_by
from tests.torture.gguf_parts import base_file, parts_of
from tests.torture.hostile import MODEL, OURS, PLACES, WORDS, model_with, obeyed, with_word, word_of
from tests.torture.log_steps import logs, unpacked

_RUN = ["-n", "6", "--tokens", "300,301,305,307,311,331,5"]
_DRAFT = ["--spec-type", "draft-mtp"]
_LOGS = ("verbose-plain.log", "mtp.json.gz", "vllm-detailed-stream.json", "vllm-metrics.prom")
_BEYOND = ("c1", "bidi", "marks", "next line", "separators", "tags")
"""Words beyond ASCII, which JSON need not escape."""
_SERVED = ("props", "models", "error", "broken", "content", "header")
_TEXTS = ("run", "observe", "compare", "bench", "match")
"""Commands that write a model's text, which a pipe gets as it is."""


def _draw(random: np.random.Generator, number: int) -> Case:
    act = list(_ACTS)[number % len(_ACTS)]
    is_untouched = number % (3 * len(_ACTS)) < len(_ACTS) and number % 5 == 0
    words = [[str(random.choice(list(WORDS)))], list(WORDS), list(_BEYOND)][random.integers(3)]
    return {
        "act": act,
        "words": [] if is_untouched else words,
        "places": sorted({str(random.choice(PLACES)) for _ in range(int(random.integers(1, 3)))}),
        "which": int(random.integers(1 << 16)),
        "on_terminal": bool(random.random() < 0.6),
        "no_colour": bool(random.random() < 0.3),
        "json": number // len(_ACTS) % 2 == number % 2,
    }


def _play(case: Case, folder: Path) -> Figures:
    os.chdir(folder)
    os.environ.pop("NO_COLOR", None)
    if case["no_colour"]:
        os.environ["NO_COLOR"] = "1"
    act = _ACTS[case["act"]]
    said = act(case, folder)
    done, as_json = said.status == 0, "--json" in _last[0]
    said.check()
    _harmless(said, as_json, done, case["on_terminal"])
    if not case["words"]:
        assert done, f"{case['act']} without a hostile word: {said.text[-800:]}"
    return {"done": done, case["act"]: 1, "untouched": not case["words"]}


_last: list[list[str]] = [[]]


def _command(case: Case, *words: str, terminal: bool | None = None) -> Said:
    on_terminal = case["on_terminal"] if terminal is None else terminal
    _last[0] = list(words)
    return said_by(words, on_terminal=on_terminal)


def _harmless(said: Said, as_json: bool, done: bool, on_terminal: bool) -> None:
    """Raises AssertionError for what a terminal would obey, and for JSON that is none."""
    out = said.out.decode("utf-8", "surrogateescape")
    if as_json and done and not on_terminal:
        json.loads(out)
    if on_terminal:
        assert not (what := obeyed(OURS.sub("", out))), f"{_last[0][0]}: a terminal gets {what}"
        return
    if as_json or _last[0][0] not in _TEXTS:
        assert not (what := obeyed(out)), f"{_last[0][0]}: standard output gets {what}"
    err = said.err.decode("utf-8", "surrogateescape")
    assert not (what := obeyed(err)), f"{_last[0][0]}: standard error gets {what}"


def _model(case: Case, folder: Path) -> str:
    """A model with the word in its places, which may not load."""
    name = "m.gguf"
    if case["which"] % 5 == 0:
        name = f"m{word_of(case['words'], 'name')}.gguf"
    if not case["words"]:
        return str(base_file(MODEL))
    return str(model_with(word_of(case["words"], "file"), case["places"], folder / name))


def _plain(case: Case) -> str:
    return str(base_file(MODEL))


def _json(case: Case) -> list[str]:
    return ["--json"] if case["json"] else []


def _info(case: Case, folder: Path) -> Said:
    return _command(case, "info", _model(case, folder), *_json(case))


def _tokenize(case: Case, folder: Path) -> Said:
    text = f"x y {word_of(case['words'], 'option')}"
    return _command(case, "tokenize", _model(case, folder), text, *_json(case))


def _run(case: Case, folder: Path) -> Said:
    more = ["--trace", f"t{word_of(case['words'], 'name')}"] if case["which"] % 3 == 0 else []
    chat = ["--chat", "-p", f"x {word_of(case['words'], 'option')}"]
    prompt = chat if case["which"] % 4 == 1 else _RUN[2:]
    spec = _DRAFT if case["which"] % 2 else []
    return _command(
        case, "run", _model(case, folder), *_RUN[:2], *prompt, *spec, *more, *_json(case)
    )


def _compare(case: Case, folder: Path) -> Said:
    return _command(case, "compare", _model(case, folder), *_RUN, *_DRAFT, *_json(case))


def _prompts(case: Case, folder: Path) -> str:
    word = word_of(case["words"], "text" if case["which"] % 2 else "file")
    path = folder / f"p{word_of(case['words'], 'name')}.json"
    text = f"x {word}"
    path.write_text(
        json.dumps([{"prompt": text, "text": text, "name": f"one{word}", "category": word}])
    )
    return str(path)


def _bench(case: Case, folder: Path) -> Said:
    words = ["-n", "4", "--prompts", _prompts(case, folder), *_DRAFT, *_json(case)]
    return _command(case, "bench", _plain(case), *words)


def _match(case: Case, folder: Path) -> Said:
    words = ["-n", "4", "--prompts", _prompts(case, folder), *_json(case)]
    return _command(case, "match", _plain(case), *words)


def _sweep(case: Case, folder: Path) -> Said:
    word = word_of(case["words"], "file")
    texts = {
        "title": f"t{word}",
        "model": f"{word}.gguf" if word and case["which"] % 3 == 0 else _plain(case),
        "prompt": f"x y {word}",
        f"key{word}" if word and case["which"] % 3 == 1 else "spec-type": "draft-mtp",
    }
    quoted = {json.dumps(key): json.dumps(said) for key, said in texts.items()}
    title, *settings = (f"{key} = {said}" for key, said in quoted.items())
    plan = folder / f"plan{word_of(case['words'], 'name')}.toml"
    plan.write_text("\n".join([title, "[settings]", "n-predict = 4", *settings, "[[jobs]]", ""]))
    # a worker of its own, which runs the jobs, takes seconds to start
    more = ["--out", str(folder / "out")] if word and case["which"] % 16 == 2 else ["--list"]
    return _command(case, "sweep", str(plan), *more)


def _memory(case: Case, folder: Path) -> Said:
    word = word_of(case["words"], "file")
    script = folder / f"s{word_of(case['words'], 'name')}.memory"
    script.write_text(
        f"title t {word}\nabout a {word}\npolicies planes\ntokens some = 17 203 88\n"
        "context A n_rs_seq=2\ndecode A 0: some\nseq_rm A 0 2\nexpect A 0 pos=1\n"
        + (f"decode {word} 0: none\n" if word and case["which"] % 3 == 0 else "")
    )
    more = ["--list"] if case["which"] % 2 else _json(case)
    return _command(case, "memory", str(script), "-m", _plain(case), *more)


def _import(case: Case, folder: Path) -> Said:
    word = word_of(case["words"], "text").encode("utf-8", "surrogatepass")
    if case["which"] % 2:
        word = json.dumps(word.decode("utf-8", "surrogatepass"))[1:-1].encode()
    name = _LOGS[case["which"] % len(_LOGS)]
    text, at = unpacked(name), case["which"]
    for mark in (b"'", b'"', b"\n", b" ") if word else ():
        places = text.split(mark)
        k = 1 + at % max(1, len(places) - 1)
        for i in range(k, min(len(places), k + 8)):
            places[i] = word + places[i]
        text = mark.join(places)
    name = name.removesuffix(".gz")
    path = folder / f"{word_of(case['words'], 'name')}{name}"
    path.write_bytes(text)
    return _command(case, "import", str(path), *_json(case))


def _of_trace(case: Case, folder: Path) -> Said:
    """What reads an exported trace, whose texts hold the word."""
    trace = folder / "t"
    word = word_of(case["words"], "text" if case["which"] % 2 else "file")
    model = _model(case, folder) if case["which"] % 3 == 0 else _plain(case)
    made = _command(case, "run", model, *_RUN, *_DRAFT, "--trace", str(trace), terminal=False)
    if made.status:
        return made
    session = trace / "session.json"
    if word:
        every = 1 + case["which"] % 9
        session.write_text(json.dumps(with_word(json.loads(session.read_text()), word, every)))
    act = case["which"] % 4
    if act == 0:
        return _command(case, "export", str(trace), "--aiperf", str(folder / "a.jsonl"))
    if act == 1:
        return _command(case, "triage", str(trace), str(trace), *_json(case))
    return _command(case, "rescore", str(trace), _plain(case), *_json(case))


def _option(case: Case, folder: Path) -> Said:
    """A word as the value of an option, or as a name of what is not there."""
    word = word_of(case["words"], "option") or "x"
    wrong = [
        ["info", f"{word}.gguf"],
        ["info", word],
        ["run", _plain(case), "-p", "x", f"--spec-type={word}"],
        ["run", _plain(case), "-p", "x", "-n", word],
        ["run", _plain(case), "-p", "x", f"--compute={word}"],
        ["run", _plain(case), "-f", word],
        ["run", _plain(case), "-p", "x", "--trace", f"{word}/x/\udcff"],
        ["run", _plain(case), f"--{word}"],
        ["compare", _plain(case), "-p", "x", "--lane", word],
        ["compare", _plain(case), "-p", "x", "--scenario", word],
        ["memory", word],
        ["sweep", word],
        ["import", word],
        ["export", word, "--aiperf", "x"],
        ["triage", word, word],
        ["observe", word, "-p", "x"],
        ["observe", f"http://{word}/", "-p", "x"],
        ["observe", "http://127.0.0.1:1", "-p", "x", "--api-key-env", word],
        ["observe", "http://127.0.0.1:1", "--listen", word],
        [word],
    ]
    said = _command(case, *wrong[case["which"] % (len(wrong) - 1)])
    is_good = "--trace" in _last[0] or not word.strip()  # no drafter, in words
    assert said.status or is_good, "it ends well with a word that is nothing"
    return said if case["words"] else Said(0, b"", b"")


def _observe(case: Case, folder: Path) -> Said:
    """A server that says the word everywhere."""
    word = word_of(case["words"], "text")
    capture = copy.deepcopy(_capture())
    which = _SERVED[case["which"] % len(_SERVED)]
    if which in capture:
        capture[which] = with_word(capture[which], word, 1)
    with ScriptedServer(capture) as server:
        said = [
            {"content": f"a{word}b", "tokens": [5], "stop": False},
            {"content": "", "stop": True, "stop_type": f"limit{word}", "model": f"m{word}"},
        ]
        if which == "error" and word:
            path = ("/props", "/v1/models", "/completion", "/slots")[case["which"] // 8 % 4]
            server.script(path, *[error_reply(500, f"e{word}", f"k{word}")] * 3)
        elif which == "broken" and word:
            said[1:] = [{"error": {"code": 500, "message": f"m{word}"}}]
        if word:
            server.script("/completion", _reply(said, which, word))
        words = ["observe", server.url, "-n", "9", "-p", f"p{word_of(case['words'], 'option')}"]
        return _command(case, *words, *_json(case))


def _reply(said: list[dict[str, Any]], which: str, word: str) -> Any:
    from tests.support.scripted_replies import Reply

    pieces = events(*said)
    if which == "header":
        kind = "".join(c for c in word if c not in "\r\n\0").encode("utf-8", "replace")
        return Reply(pieces, 200, {"Content-Type": f"text/{kind.decode('latin-1')}"})
    return Reply(pieces)


def _capture() -> dict[str, Any]:
    if not _captured:
        _captured.append(read_capture("mtp"))
    return _captured[0]


_captured: list[dict[str, Any]] = []
_ACTS: dict[str, Callable[[Case, Path], Said]] = {
    "info": _info,
    "run": _run,
    "observe": _observe,
    "option": _option,
    "import": _import,
    "tokenize": _tokenize,
    "sweep": _sweep,
    "trace": _of_trace,
    "compare": _compare,
    "memory": _memory,
    "bench": _bench,
    "match": _match,
}


def _prepare() -> None:
    parts_of(MODEL), _capture(), logs()
    said_by(["run", str(base_file(MODEL)), *_RUN, *_DRAFT]).check(0)


CAMPAIGN = Campaign(
    "terminal",
    "No character that a terminal obeys but the program's own colours; JSON that is valid.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**30,
    batch=12,
    n_least=24,
)
