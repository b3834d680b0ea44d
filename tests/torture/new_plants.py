"""Faults planted for the campaigns of what comes from outside: logs, terminals, signals, encodings,
files that change, clients of the proxy."""

from __future__ import annotations

import gzip
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
        "a number of 400 digits in a log is believed": (
            "lognumbers",
            around("engine.foreign:whole", _any_number),
        ),
        "an accepted draft of a log is counted one too short": (
            "lognumbers",
            around("engine.observe.rounds.server_state:ServerState.on_accepted", _one_fewer),
        ),
        "lines of a log are searched in quadratic time": (
            "lognumbers",
            around("engine.observe.rounds.log_reader:LogReader.feed", _slowly),
        ),
        "a terminal gets lines as they are": (
            "terminal",
            around("engine.plain_text:terminal_text", _as_it_is),
        ),
        "lines of findings have C1 characters as they are": (
            "terminal",
            around("engine.plain_text:terminal_text", _but_c1),
        ),
        "JSON has control characters as they are": (
            "terminal",
            around("app.cli.output:_json_character", _as_it_is),
        ),
        "a server is waited for before a signal is obeyed": (
            "stopping",
            around("engine.observe.server.server_run:ServerRun.stop", _late),
        ),
        "a signal is obeyed when the work is done": (
            "stopping",
            around("app.cli.recorded:record", _done_first),
        ),
        "a run that is stopped goes on": ("faults", around("engine.run:Run.stop", _nothing)),
        "a run that a signal stops has no end": (
            "stopping",
            around("engine.run:Run.stop", _nothing),
        ),
        "nothing is exported after a signal": (
            "stopping",
            around("app.cli.recorded:export", _not_after_a_signal),
        ),
        "a gzipped file unpacks without a limit": (
            "encodings",
            around("engine.files:unpacked", _without_a_limit),
        ),
        "a pipe or a device is opened as a file": (
            "encodings",
            around("engine.files:_regular", _any),
        ),
        "a reply in an encoding is taken as it is": (
            "encodings",
            around("engine.observe.server.reply:check_encoding", _nothing),
        ),
        "weights are mapped without being asked": (
            "filechange",
            around("engine.model.loader:reader_for", _mapped),
        ),
        "a change of a file is noticed after the last round alone": (
            "filechange",
            around("engine.gguf.part_file:ModelFiles.note", _in_the_end),
        ),
        "a bus error of a mapped file is not caught": (
            "filechange",
            around("engine.gguf.part_file:_guard", _nothing),
        ),
        "any host is answered": (
            "proxying",
            around("engine.observe.proxy.request_checks:AllowedHosts.fault", _nothing),
        ),
        "a half-closed client is dropped": (
            "proxying",
            around(
                "engine.observe.proxy.client_connection:ClientConnection.eof_received", _nothing
            ),
        ),
        "the end of a reply is not recorded": (
            "proxying",
            around("engine.observe.proxy.exchange_queue:RecordedExchange.data", _without_its_end),
        ),
    }


def _any_number(whole: Any, text: str, *_: Any) -> int:
    return int(text) if text.isdigit() else int(whole(text))


def _but_c1(escaped: Any, text: str, *more: Any) -> str:
    parts = re.split("([\x80-\x9f])", text)
    return "".join(part if i % 2 else escaped(part, *more) for i, part in enumerate(parts))


def _done_first(record: Any, job: Any, advance: Any, *more: Any) -> None:
    def whole() -> bool:
        while advance():
            pass
        return False

    record(job, whole, *more)


def _without_a_limit(unpacked: Any, data: bytes, *_: Any, **more: Any) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _in_the_end(note: Any, files: Any, facts: Any, round_: Any, after: Any = None) -> None:
    if round_ is None:
        note(files, facts, round_, after)


def _one_fewer(original: Any, server: Any, *said: Any) -> Any:
    *before, accepted, drafted = said
    return original(server, *before, max(0, accepted - 1), drafted)


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
