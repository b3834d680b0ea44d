"""llama.cpp in a process of its own, so that a library that ends it ends nothing else.

A build under work may fail an assertion, overrun its memory or be of another version than the
binding. All of that is a sentence here. Parent and child send pickles over the child's standard
input and output: (method of LlamaCpp, arguments) and ("value", result) or
("error", kind, message, remedy).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

import engine.errors
from engine.compare.llama_cpp import LlamaCpp, ModelFacts, TokenSpan, require
from engine.compare.llama_library import check_library, environment, folder_of, how_it_ended
from engine.errors import DraftscopeError, PeerLibraryError

_WAIT_S = 5.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LONGEST = 300
_TAIL = 4096
"""Bytes of the child's error output that are looked at when it has ended."""


class LlamaProcess:
    """A LlamaCpp in a child process, with its methods. library: a folder of a build, or the file
    of its libllama; None = the one that came with the binding.

    Raises what LlamaCpp raises, and PeerLibraryError where the library cannot be used with the
    binding, or once the process has ended.
    """

    def __init__(self, path: Path, library: Path | None = None) -> None:
        folder = None if library is None else folder_of(library)
        check_library(folder)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read when the child has ended
        self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment(folder),
        )
        try:
            self._call("open", path)
        except BaseException:
            self.close()
            raise

    def facts(self) -> ModelFacts:
        found: ModelFacts = self._call("facts")
        return found

    def open_context(
        self,
        n_seqs: int,
        n_ctx: int,
        n_ubatch: int,
        n_rs_seq: int,
        n_threads: int,
        n_batch: int | None = None,
    ) -> tuple[int, int]:
        number, found = self._call(
            "open_context", n_seqs, n_ctx, n_ubatch, n_rs_seq, n_threads, n_batch
        )
        return number, found

    def decode(self, number: int, spans: Sequence[TokenSpan]) -> np.ndarray:
        plain = [TokenSpan(one.seq, one.pos0, list(one.tokens), one.outputs) for one in spans]
        rows: np.ndarray = self._call("decode", number, plain)
        return rows

    def seq_rm(self, number: int, seq: int, p0: int, p1: int = -1) -> bool:
        return bool(self._call("seq_rm", number, seq, p0, p1))

    def seq_cp(self, number: int, src: int, dst: int) -> None:
        self._call("seq_cp", number, src, dst)

    def seq_keep(self, number: int, seq: int) -> None:
        self._call("seq_keep", number, seq)

    def seq_add(self, number: int, seq: int, p0: int, p1: int, shift: int) -> None:
        self._call("seq_add", number, seq, p0, p1, shift)

    def pos_max(self, number: int, seq: int) -> int:
        return int(self._call("pos_max", number, seq))

    def save(self, number: int, seq: int, flags: int) -> bytes:
        blob: bytes = self._call("save", number, seq, flags)
        return blob

    def load(self, number: int, seq: int, blob: bytes, flags: int) -> None:
        self._call("load", number, seq, blob, flags)

    def close(self) -> None:
        """End the process; may be called again."""
        if self._child is None:
            return
        child, self._child = self._child, None
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):  # it has ended with something unsent
                    stream.close()
        try:
            child.wait(_WAIT_S)  # the end of its input is the sign to leave
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._stderr.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self.close()

    def _call(self, name: str, *args: Any) -> Any:
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            raise PeerLibraryError("The llama.cpp process has ended.", "Compare once more.")
        try:
            pickle.dump((name, args), self._child.stdin, pickle.HIGHEST_PROTOCOL)
            self._child.stdin.flush()
            reply = pickle.load(self._child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._ended(name) from error
        if reply[0] == "value":
            return reply[1]
        _, kind, message, remedy = reply
        raise getattr(engine.errors, kind)(message, remedy)

    def _ended(self, name: str) -> PeerLibraryError:
        assert self._child is not None
        try:
            status = self._child.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            status = self._child.wait()
        why = last_words(self._stderr) or how_it_ended(status)
        self.close()
        return PeerLibraryError(
            f"The llama.cpp library ended its process in {name}: {why}.",
            "Look at that place of the build, or use another one.",
        )


LlamaEngine = LlamaCpp | LlamaProcess
"""A model in llama.cpp, here or in another process."""


def last_words(stderr: IO[bytes]) -> str:
    """The last line of an error output, without a full stop; a failed assertion if there is
    one."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL))
    lines = stderr.read().decode("utf-8", "replace").splitlines()
    said = [line.strip().rstrip(".") for line in lines if line.strip()]
    loud = [line for line in said if "ASSERT" in line or "what()" in line or "fatal" in line]
    words = (loud or said or [""])[-1].rpartition("/")[2]  # without the folders of a source file
    return words[:_LONGEST]


def _serve() -> None:
    """The child: answers calls until its input ends."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is not a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes
    if sys.platform == "linux":  # also from the middle of a call that never ends
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    opened: LlamaCpp | None = None
    while True:
        try:
            name, args = pickle.load(requests)
        except EOFError:
            break
        try:
            if name == "open":
                require()
                opened = LlamaCpp(*args)
                value: Any = None
            else:
                value = getattr(opened, name)(*args)
            reply: tuple[Any, ...] = ("value", value)
        except DraftscopeError as error:
            reply = ("error", type(error).__name__, error.message, error.remedy)
        pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
        replies.flush()
    if opened is not None:
        opened.close()


if __name__ == "__main__":
    _serve()
