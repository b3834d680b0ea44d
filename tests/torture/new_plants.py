"""Faults planted for the campaigns of what comes from outside: logs, terminals, signals, encodings,
files that change, clients of the proxy."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

Plant = Callable[[], None]
Around = Callable[[str, Callable[..., Any]], Plant]
_SLOW = re.compile("[a-z]+ .*\0")


def new_plants(around: Around) -> dict[str, tuple[str, Plant]]:
    """As `tests.torture.plants.PLANTS`, whose `around` this takes."""
    return {
        "an accepted draft of a log is counted one too short": (
            "lognumbers",
            around("engine.observe.rounds.log:LogReader._accepted", _one_fewer),
        ),
        "lines of a log are searched in quadratic time": (
            "lognumbers",
            around("engine.observe.rounds.log:LogReader.feed", _slowly),
        ),
        "a terminal gets lines as they are": (
            "terminal",
            around("engine.terminal_text:terminal_text", _as_it_is),
        ),
        "JSON has control characters as they are": (
            "terminal",
            around("app.cli.output:_json_character", _as_it_is),
        ),
        "a server is waited for before a signal is obeyed": (
            "stopping",
            around("engine.observe.server.server_run:ServerRun.stop", _late),
        ),
        "nothing is exported after a signal": (
            "stopping",
            around("app.cli.recorded:export", _not_after_a_signal),
        ),
        "a pipe or a device is opened as a file": (
            "encodings",
            around("engine.files:_regular", _any),
        ),
        "a reply in an encoding is taken as it is": (
            "encodings",
            around("engine.observe.server.exchange:check_encoding", _nothing),
        ),
        "weights are mapped without being asked": (
            "filechange",
            around("engine.model.loader:reader_for", _mapped),
        ),
        "a bus error of a mapped file is not caught": (
            "filechange",
            around("engine.gguf.part_file:_guard", _nothing),
        ),
        "any host is answered": (
            "proxying",
            around("engine.observe.proxy.allowed_hosts:AllowedHosts.fault", _nothing),
        ),
        "the end of a reply is not recorded": (
            "proxying",
            around("engine.observe.proxy.exchange_queue:Recording.data", _without_its_end),
        ),
    }


def _one_fewer(original: Any, reader: Any, slot: Any, us: Any, accepted: int, *more: Any) -> None:
    original(reader, slot, us, max(0, accepted - 1), *more)


def _slowly(feed: Any, reader: Any, text: str) -> None:
    _SLOW.search(text)
    feed(reader, text)


def _as_it_is(_: Any, text: str, *more: Any) -> str:
    return text


def _late(stop: Any, run: Any) -> None:
    time.sleep(60)
    stop(run)


def _not_after_a_signal(export: Any, *args: Any) -> None:
    # the handlers go with the first signal
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        export(*args)


def _any(_: Any, path: Any, kind: Any) -> int:
    return os.open(path, os.O_RDONLY)


def _mapped(reader_for: Any, file: Any, mmap: bool | None, *more: Any) -> Any:
    return reader_for(file, mmap is not False, *more)


def _without_its_end(data: Any, recording: Any, piece: bytes) -> None:
    data(recording, piece[:-1] if b'"stop": true' in piece else piece)


def _nothing(*_: Any) -> str:
    return ""
