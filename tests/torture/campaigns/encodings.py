"""Encodings of replies and files, and paths that lead to what is not a file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.trace.reopen import open_trace
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.commands import Said, said_by
from tests.torture.log_steps import logs
from tests.torture.raw_server import Asked, RawServer, chunk

_M = str(DATA / "qwen35-c-v2x-mtp-f32.gguf")
_CPU_S = 15.0
_BOMB = 1 << 28
"""Bytes of zeros that a bomb becomes."""
_X = ["-n", "2", "-p", "x y"]
_F = "FILE"
INPUTS: dict[str, tuple[list[str], str]] = {
    # words with FILE in them, and what the file is
    "model": (["run", _F, *_X], "model"),
    "info": (["info", _F], "model"),
    "drafter": (["run", _M, "-md", _F, *_X, "--spec-type", "draft-simple"], "draft"),
    "prompt": (["run", _M, "-n", "2", "-f", _F], "text"),
    "compare prompt": (["compare", _M, "-n", "2", "-f", _F], "text"),
    "turns": (["run", _M, "-n", "2", "--turns", _F], "turns"),
    "grammar": (["run", _M, *_X, "--grammar-file", _F], "grammar"),
    "schema": (["run", _M, *_X, "--json-schema", _F], "schema"),
    "lookup": (["run", _M, *_X, "--spec-type", "ngram-cache", "-lcs", _F], "lookup"),
    "bench prompts": (["bench", _M, "-n", "2", "--prompts", _F], "prompts"),
    "match prompts": (["match", _M, "-n", "2", "--prompts", _F], "prompts"),
    "fidelity": (["fidelity", _M, "-n", "2", "--modes", "bf16", "-f", _F], "text"),
    "memory": (["memory", _F, "-m", _M], "script"),
    "plan": (["sweep", _F, "--list"], "plan"),
    "import": (["import", _F], "log"),
    "import capture": (["import", _F], "capture"),
    "import record": (["import", _F], "record"),
    "import log": (["import", str(logs()["mtp.json.gz"]), "--log", _F], "log"),
    "import model": (["import", str(logs()["mtp.json.gz"]), "--model", _F], "model"),
    "export": (["export", _F, "--aiperf", "a.jsonl"], "trace"),
    "rescore": (["rescore", _F, _M], "trace"),
    "rescore model": (["rescore", "TRACE", _F, "--assume-same"], "model"),
    "triage": (["triage", _F, "TRACE"], "trace"),
    "bench compare": (["bench", "compare", _F, _F], "results"),
    "observe log": (["observe", "URL", "-p", "x", "--log", _F], "log"),
    "observe prompt": (["observe", "URL", "-f", _F], "text"),
    "observe model": (["observe", "URL", "-p", "x", "--assume-same", "--rescore", _F], "model"),
}
_OUTPUTS: dict[str, list[str]] = {
    "run trace": ["run", _M, *_X, "--trace", _F],
    "run report": ["run", _M, *_X, "--report", _F],
    "compare trace": ["compare", _M, *_X, "--trace", _F],
    "logits": ["logits", _M, "--tokens", "1,2", "--out", _F],
    "bench": ["bench", _M, "-n", "2", "--prompts", "PROMPTS", "--out", _F],
    "export": ["export", "TRACE", "--aiperf", _F],
    "import trace": ["import", str(logs()["plain.log"]), "--trace", _F],
    "capture": ["observe", "URL", "-p", "x", "--capture", _F],
    "observe trace": ["observe", "URL", "-p", "x", "--trace", _F],
}
_FOLDERS = ("run trace", "compare trace", "import trace", "observe trace")
_PATHS = (
    "link",
    "fifo",
    "zero",
    "sparse",
    "folder",
    "loop",
    "dangling",
    "full",
    "null",
    "gone",
    "long name",
    "empty",
    "socket",
)
_PACKED = ("import", "import capture", "import log", "import record")
_ENDLESS = ("fifo", "zero")
_TEXTS = (
    "utf-8-sig",
    "utf-16",
    "utf-16-be",
    "utf-32",
    "latin-1",
    "crlf",
    "null",
    "bad",
    "gzip",
    "gzip bomb",
    "gzip cut",
    "gzip of two",
    "gzip and more",
    "gzip of gzip",
)
_REPLIES = (
    "gzip",
    "deflate",
    "raw deflate",
    "br",
    "zstd",
    "unknown",
    "wrong",
    "cut",
    "stacked",
    "twice",
    "bomb",
    "bomb of bombs",
    "identity",
    "capitals",
    "empty",
)
_FORMS = (
    "plain",
    "chunked",
    "extension",
    "capitals",
    "trailer",
    "no end",
    "line feeds",
    "size of signs",
    "huge size",
    "negative size",
    "small",
    "no length",
    "long",
    "short",
)
_WHOLE_FORMS = ("plain", "chunked", "extension", "capitals", "trailer", "no length")
_CHARSETS = (
    "",
    "; charset=utf-16",
    "; charset=x-unknown",
    "; charset",
    "; charset=\xff;;",
    ";" * 99,
)
_ASKED = ("/props", "/v1/models", "/completion")


def _draw(random: np.random.Generator, number: int) -> Case:
    kind = ("path", "text", "reply", "output")[number % 4]
    untouched = number % 24 < 4
    which = number // 4
    inputs = list(INPUTS)
    of_text = [name for name in inputs if INPUTS[name][1] not in ("model", "draft", "trace")]
    if kind == "path":
        how = _PATHS[int(random.integers(len(_PATHS)))]
        case: Case = {"input": inputs[which % len(inputs)], "how": how}
        if which % 2 == 0:
            case = {"input": of_text[which % len(of_text)], "how": _ENDLESS[which // 2 % 2]}
    elif kind == "text":
        how = _TEXTS[int(random.integers(len(_TEXTS)))]
        case = {"input": of_text[which % len(of_text)], "how": how}
        if which % 3 == 0:
            case = {"input": _PACKED[which // 3 % len(_PACKED)], "how": "gzip bomb"}
    elif kind == "output":
        how = _PATHS[int(random.integers(len(_PATHS)))]
        case = {"output": list(_OUTPUTS)[which % len(_OUTPUTS)], "how": how}
    else:
        case = {
            "reply": _ASKED[(0, 2, 1, 2)[which % 4]],
            "how": _REPLIES[which % len(_REPLIES)],
            "form": str(random.choice(_FORMS)) if random.random() < 0.6 else "plain",
            "charset": str(random.choice(_CHARSETS)) if random.random() < 0.3 else "",
        }
    if untouched:
        case |= {"how": "identity" if kind == "reply" else "as it is"}
        case |= {"form": "plain", "charset": ""} if kind == "reply" else {}
    return case


def _play(case: Case, folder: Path) -> Figures:
    os.chdir(folder)
    start = time.process_time()
    if "reply" in case:
        said = _replied(case)
    elif "output" in case:
        said = _written(case, folder)
    else:
        said = _read(case, folder)
    spent = time.process_time() - start
    said.check()
    assert spent < _CPU_S, f"{spent:.1f} s of processor time"
    assert "not enough memory" not in said.text, said.text[-300:]
    untouched = case["how"] == "as it is" or (
        case["how"] == "identity" and case["form"] == "plain" and not case["charset"]
    )
    if untouched:
        assert said.status == int(case.get("input") == "observe model"), said.text[-500:]
    kind = next(name for name in ("input", "output", "reply") if name in case)
    return {kind: 1, "done": said.status == 0, "untouched": untouched, "cpu_s_max": spent}


# -- replies -----------------------------------------------------------------------------------


def _replied(case: Case) -> Said:
    with RawServer(lambda asked, link: _answer(case, asked, link)) as server:
        said = said_by(["observe", server.url, "-p", "x", "-n", "4"])
    if case["how"] not in ("identity", "empty") and case["form"] in _WHOLE_FORMS:
        assert "in the encoding" in said.text, f"no word about an encoding: {said.text[-300:]}"
    if not said.status and case["reply"] == "/completion":
        assert b"a\xc3\xa9c" in said.out, f"the text is lost: {said.out[:200]!r} {said.text[-300:]}"
    return said


def _facts(path: str) -> bytes:
    if path == "/props":
        said: Any = {"default_generation_settings": {"n_ctx": 64}, "total_slots": 1}
    elif path == "/v1/models":
        said = {"data": [{"id": "m", "meta": {"n_vocab": 384}}]}
    else:
        said = []
    return json.dumps(said).encode()


def _stream() -> bytes:
    events = [
        {"content": "a", "tokens": [5], "stop": False},
        {"content": "éc", "tokens": [6], "stop": False},
        {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 2},
    ]
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    return "".join(lines).encode()


def _answer(case: Case, asked: Asked, link: socket.socket) -> None:
    streams = asked.path == "/completion"
    body = _stream() if streams else _facts(asked.path)
    kind = "text/event-stream" if streams else "application/json"
    how, form, charset = "identity", "plain", ""
    if asked.path == case["reply"]:
        how, form, charset = case["how"], case["form"], case["charset"]
    name, body = _encoded(how, body)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}{charset}\r\nConnection: close\r\n".encode(
        "latin-1"
    )
    for each in name:
        head += b"Content-Encoding: " + each + b"\r\n"
    link.sendall(head + _formed(form, body))


def _encoded(how: str, body: bytes) -> tuple[list[bytes], bytes]:
    """Names for headers, and what is sent."""
    if how == "bomb":
        return [b"gzip"], _bomb()
    if how == "bomb of bombs":
        return [b"gzip, gzip"], gzip.compress(_bomb(), 1)
    raw = zlib.compressobj(wbits=-15)
    return {
        "gzip": ([b"gzip"], gzip.compress(body)),
        "deflate": ([b"deflate"], zlib.compress(body)),
        "raw deflate": ([b"deflate"], raw.compress(body) + raw.flush()),
        "br": ([b"br"], b"\x8b\x02\x80" + body),
        "zstd": ([b"zstd"], b"\x28\xb5\x2f\xfd" + body),
        "unknown": ([b"x-\xff\x1b"], body),
        "wrong": ([b"gzip"], body),
        "cut": ([b"gzip"], gzip.compress(body)[:-9]),
        "stacked": ([b"gzip, deflate"], zlib.compress(gzip.compress(body))),
        "twice": ([b"gzip", b"gzip"], gzip.compress(gzip.compress(body))),
        "identity": ([], body),
        "capitals": ([b"GZIP"], gzip.compress(body)),
        "empty": ([b""], body),
    }[how]


@cache
def _bomb() -> bytes:
    made = zlib.compressobj(9, wbits=31)
    piece = bytes(1 << 20)
    return b"".join(made.compress(piece) for _ in range(_BOMB >> 20)) + made.flush()


def _formed(form: str, body: bytes) -> bytes:
    """What follows the head's first lines: how long the body is, and the body."""
    half = len(body) // 2
    two = chunk(body[:half]) + chunk(body[half:])
    in_chunks = b"Transfer-Encoding: chunked\r\n\r\n"
    length = b"Content-Length: %d\r\n\r\n"
    return {
        "plain": length % len(body) + body,
        "chunked": in_chunks + two + chunk(b""),
        "extension": in_chunks + two.replace(b"\r\n", b";a=b\r\n", 1) + chunk(b""),
        "capitals": in_chunks + b"%X\r\n%s\r\n" % (len(body), body) + chunk(b""),
        "trailer": in_chunks + two + b"0\r\nX: y\r\n\r\n",
        "no end": in_chunks + two,
        "line feeds": in_chunks + b"%x\n%s\n0\n\n" % (len(body), body),
        "size of signs": in_chunks + b"zz\r\n" + two,
        "huge size": in_chunks + b"f" * 30 + b"\r\n" + two,
        "negative size": in_chunks + b"-5\r\n" + two,
        "small": in_chunks
        + b"".join(chunk(body[i : i + 1]) for i in range(len(body)))
        + chunk(b""),
        "no length": b"\r\n" + body,
        "long": length % (len(body) + 99) + body,
        "short": length % half + body,
    }[form]


# -- files -------------------------------------------------------------------------------------


def _read(case: Case, folder: Path) -> Said:
    words, what = INPUTS[case["input"]]
    source = sources()[what]
    path = folder / source.name
    if case["how"] in _PATHS:
        _place(case["how"], path, source)
    elif case["how"] == "as it is":
        path = source
    else:
        path.write_bytes(_rewritten(case["how"], source.read_bytes()))
    said = said_of(words, str(path))
    if case["how"] == "link":
        # the tokens of the double of a server are not the model's, and that is said
        right = int(case["input"] == "observe model")
        assert said.status == right, f"a link is not followed: {said.text[-300:]}"
    if case["how"] == "gzip bomb" and case["input"] in _PACKED:
        assert "unpacks to more than" in said.text, said.text[-300:]
    return said


def said_of(words: list[str], path: str) -> Said:
    """A command, in whose words FILE is this path and URL a server that answers as it should."""
    places = {_F: path, "TRACE": str(sources()["trace"]), "PROMPTS": str(sources()["prompts"])}
    own = [places.get(word, word) for word in words]
    if "URL" not in own:
        return said_by(own)
    with RawServer(lambda asked, link: _answer({"reply": ""}, asked, link)) as server:
        return said_by([server.url if word == "URL" else word for word in own])


def _rewritten(how: str, data: bytes) -> bytes:
    if how.startswith("gzip"):
        if how == "gzip bomb":
            return gzip.compress(data) + _bomb()
        once = gzip.compress(data)
        return {
            "gzip": once,
            "gzip cut": once[:-9],
            "gzip of two": gzip.compress(data[: len(data) // 2])
            + gzip.compress(data[len(data) // 2 :]),
            "gzip and more": once + b"and more",
            "gzip of gzip": gzip.compress(once),
        }[how]
    if how == "crlf":
        return data.replace(b"\n", b"\r\n")
    if how == "null":
        return data.replace(b" ", b"\0")
    if how == "bad":
        return data[: len(data) // 2] + b"\xff\xfe\xed\xa0\x80" + data[len(data) // 2 :]
    return data.decode("utf-8", "replace").encode(how, "replace")


def _place(how: str, path: Path, source: Path | None) -> None:
    """Something at a path; a link leads to the source."""
    if how == "fifo":
        os.mkfifo(path)
    elif how == "sparse":
        path.touch()
        os.truncate(path, 3 << 30)
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to("gone")
    elif how == "empty":
        path.touch()
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif how in ("zero", "full", "null"):
        path.symlink_to(f"/dev/{how}")
    elif how == "link" and source is not None:
        path.symlink_to(source)


@contextmanager
def _read_by_another(pipe: Path) -> Iterator[None]:
    """What is written to a pipe is read, as another program does."""
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(0.01):
            with suppress(BlockingIOError):
                os.read(reading, 1 << 20)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        is_over.set()
        reader.join()
        os.close(reading)


def _written(case: Case, folder: Path) -> Said:
    how, name = case["how"], case["output"]
    path = folder / ("x" * 300 if how == "long name" else "out")
    target = folder / "elsewhere"
    if how == "link" and name in _FOLDERS:
        target.mkdir()
    _place(how, path, target)
    with _read_by_another(path) if how == "fifo" else nullcontext():
        said = said_of(_OUTPUTS[name], str(path))
    if how == "link":
        assert said.status == 0, f"a link is not followed: {said.text[-300:]}"
        if name in _FOLDERS:
            assert path.is_symlink() and path.readlink() == target, "the link is replaced"
    if how in ("as it is", "link", "gone"):
        assert said.status == 0, said.text[-300:]
        assert path.exists(), "nothing is written"
        if name in _FOLDERS:
            open_trace(path)
    left = {one.name for one in folder.iterdir()} - {path.name, target.name, "gone", "a.jsonl"}
    assert not left, f"left behind: {left}"
    return said


@cache
def sources() -> dict[str, Path]:
    """A good file of each kind."""
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-encodings-"))
    texts = {
        "text.txt": "x y é\n",
        "turns.json": json.dumps(["x y", "y x"]),
        "grammar.lark": 'start: "x" | "y"\n',
        "schema.json": json.dumps({"type": "integer"}),
        "prompts.json": json.dumps([{"name": "one", "text": "x y"}]),
        "script.memory": "title t\nabout a\npolicies planes\ntokens some = 17 203 88\n"
        "context A n_rs_seq=2\ndecode A 0: some\n",
        "plan.toml": f'title = "t"\n[settings]\nmodel = "{_M}"\nprompt = "x"\n[[jobs]]\n',
    }
    found = {}
    for name, text in texts.items():
        found[name.partition(".")[0]] = folder / name
        (folder / name).write_text(text, encoding="utf-8")
    found["model"] = folder / Path(_M).name  # by which a trace knows it
    shutil.copy2(_M, found["model"])
    found["draft"] = DATA / "qwen35-a-f32.gguf"
    found["log"] = logs()["verbose-plain.log"]
    found["record"] = logs()["vllm-detailed-stream.json"]
    found["capture"] = folder / "capture.json"
    found["capture"].write_bytes(gzip.decompress(logs()["utf8.json.gz"].read_bytes()))
    found["trace"], found["results"], found["lookup"] = (
        folder / name for name in ("trace", "results.json", "lookup.bin")
    )
    # token ids with what followed them how often, as llama.cpp keeps them
    ids = np.array([5, 9, -1, -1, 1, 31, 2], np.int32)
    found["lookup"].write_bytes(ids.tobytes())
    words = ["-n", "6", "-p", "x y", "--spec-type", "draft-mtp", "--trace", str(found["trace"])]
    said_by(["run", _M, *words]).check(0)
    words = ["-n", "2", "--prompts", str(found["prompts"]), "--out", str(found["results"])]
    said_by(["bench", _M, *words]).check(0)
    return found


def _prepare() -> None:
    sources(), _bomb()


CAMPAIGN = Campaign(
    "encodings",
    "Read as it is meant, or refused in a sentence: nothing hangs, grows or is left behind.",
    _draw,
    _play,
    _prepare,
    seconds=20.0,
    n_bytes=2**30,
    batch=12,
    n_least=24,
)
