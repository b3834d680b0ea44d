"""Hash of a model's tensors, computed in the background and cached.

The head of a file does not distinguish a model from the same model after further training. Hashing
all data takes half a second per GiB (SHA-256 with hardware support), so nothing waits for it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from engine.errors import Cancelled, DraftscopeError
from engine.files import write_text
from engine.gguf.binary import check_cancelled, never
from engine.gguf.part_file import FileStamp
from kernels.kernel_files import cache_folder

HASH_S = 60.0
"""Time a command waits for the hash, seconds."""
_CHUNK = 4 << 20  # bytes between two checks for cancellation, 2 ms
_LOOK_S = 0.05
_MOST_KEPT = 256
_MOST_BYTES = 1 << 20  # of the cache file
_LARGE = 1 << 28
_SETTLED_NS = 2 * 10**9  # since the last change; another one within it may have the same time


ModelFilePart = tuple[Path, FileStamp, int]
"""One file of a model as it was when opened, and the size of its head."""


def hash_tensors(
    parts: Sequence[ModelFilePart], cancelled: Callable[[], bool] = never
) -> str | None:
    """SHA-256 of everything after the heads, in order; None if a file is not the one opened.

    Raises OSError and, soon after `cancelled` returns True, Cancelled. The interpreter lock is
    free while bytes are read and hashed.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    for path, stamp, head in parts:
        with open(path, "rb", buffering=0) as file:
            file.seek(head)
            while n := file.readinto(buffer):
                check_cancelled(cancelled)
                digest.update(buffer[:n])
            if FileStamp.of(os.fstat(file.fileno())) != stamp:
                return None
    return digest.hexdigest()


# -- cache ---------------------------------------------------------------------------------


def kept_file() -> Path:
    """Path of the hash cache."""
    return cache_folder() / "contents.json"


def kept_hash(parts: Sequence[ModelFilePart]) -> str | None:
    """The hash computed earlier for the same unchanged files."""
    key = _key(parts)
    return next((found for known, found in _read() if known == key), None)


def keep_hash(parts: Sequence[ModelFilePart], found: str) -> None:
    """Cache a hash, unless the files have just been written; a failure to write it is ignored."""
    newest = max(max(stamp.mtime_ns, stamp.ctime_ns) for _, stamp, _ in parts)
    if time.time_ns() - newest < _SETTLED_NS:
        return
    key = _key(parts)
    others = [entry for entry in _read() if _paths(entry[0]) != _paths(key)]
    text = json.dumps({"version": 1, "contents": [*others[1 - _MOST_KEPT :], (key, found)]})
    path = kept_file()
    with suppress(OSError, DraftscopeError):  # it will be computed again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def _key(parts: Sequence[ModelFilePart]) -> list[list[Any]]:
    return [[os.path.abspath(path), *astuple(stamp)] for path, stamp, _ in parts]


def _paths(key: list[list[Any]]) -> list[Any]:
    return [part[0] for part in key]


def _read() -> list[tuple[list[list[Any]], str]]:
    """The hashes in `kept_file`, newest last; none if that file is missing or damaged."""
    try:
        with kept_file().open("rb") as file:
            entries = json.loads(file.read(_MOST_BYTES))["contents"]
        return [
            ([[str(part[0]), *part[1:]] for part in key], found)
            for key, found in entries
            if key and isinstance(found, str)
        ]
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return []


# -- in the background ---------------------------------------------------------------------


class ContentHash:
    """Computes the hash of models in a thread and stores it in their identities.

    models: for each the identity that gets `content`, and its files.
    """

    def __init__(self, models: Sequence[tuple[dict[str, Any], Sequence[ModelFilePart]]]) -> None:
        self._models = [([identity], parts) for identity, parts in models]
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._hurry = threading.Event()

    @property
    def known(self) -> bool:
        """Whether every identity has its `content`."""
        return all(one.get("content") for identities, _ in self._models for one in identities)

    def tell(self, identity: dict[str, Any]) -> None:
        """Store the first model's hash here too; call before `start`."""
        self._models[0][0].append(identity)

    def start(self, ready: Callable[[], bool]) -> None:
        """Start once `ready` returns True; it is polled in the thread, every 50 ms."""
        if self._thread is None and not self.known:
            self._thread = threading.Thread(
                target=self._work, args=(ready,), name="content", daemon=True
            )
            atexit.register(self.cancel)  # a thread that outlives Python can abort the process
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the started work at most this long; returns whether everything is known."""
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.known

    def find(self, seconds: float) -> None:
        """Start now, and wait at most this long."""
        self.start(lambda: True)
        self.wait(seconds)

    def cancel(self) -> None:
        """Cancel and wait for the thread's end; known hashes stay."""
        self._cancelled.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.cancel)

    def _work(self, ready: Callable[[], bool]) -> None:
        n_bytes = sum(stamp.size for _, parts in self._models for _, stamp, _ in parts)
        # small files are hashed soon, and with all processors busy an idle thread never ends
        if sys.platform == "linux" and n_bytes > _LARGE:  # a priority can be a thread's own there
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not ready() and not self._hurry.wait(_LOOK_S):
            pass
        for identities, parts in self._models:
            with suppress(OSError, Cancelled):
                found = kept_hash(parts) or hash_tensors(parts, self._cancelled.is_set)
                if found is not None:
                    keep_hash(parts, found)
                    for identity in identities:
                        identity["content"] = found
