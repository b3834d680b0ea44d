"""A llama-server of a real build, for tests that are marked `peer`."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

_ROUND = re.compile(r"\| task (\d+) \| .*accepted +(\d+)/ *(\d+) draft tokens( \(restore)?")


@contextmanager
def llama_server(log: Path, *words: object) -> Iterator[str]:
    """Its address, once the model is loaded. log: what it says, with the rounds that it drafted.
    Skips the test where neither DRAFTSCOPE_LLAMA_CPP names a folder with a build nor the wheel
    `xllamacpp` is installed."""
    folder = os.environ.get("DRAFTSCOPE_LLAMA_CPP")
    program: list[object] = [Path(folder or "") / "llama-server"]
    if not folder:
        if importlib.util.find_spec("xllamacpp") is None:
            pytest.skip(
                "there is neither a build of llama.cpp (DRAFTSCOPE_LLAMA_CPP) nor xllamacpp"
            )
        program = [sys.executable, Path(__file__).with_name("xllamacpp_server.py")]
    port = free_port()
    command = [*program, *words, "-t", 1, "--metrics", "--port", port]
    with log.open("wb") as file:
        started = subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=file,
            env={**os.environ, "LLAMA_TRACE": "1"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url):
                assert started.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)
            yield url
        finally:
            started.terminate()
            started.wait(60)


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def logged_rounds(log: str) -> list[list[tuple[int, int, bool]]]:
    """Accepted, drafted and whether a checkpoint was restored, of each round with a draft, by
    request. A restore is followed by the same line about its replay, which is not a round."""
    found: dict[str, list[tuple[int, int, bool]]] = {}
    replaying: set[str] = set()
    for task, accepted, drafted, restored in _ROUND.findall(log):
        if task in replaying and not restored:
            replaying.remove(task)
            continue
        found.setdefault(task, []).append((int(accepted), int(drafted), bool(restored)))
        if restored:
            replaying.add(task)
    return list(found.values())


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
