"""llama.cpp in a child process, so that a crash of the library affects nothing else.

A build under development may fail an assertion or corrupt its memory; here that becomes an error
message. The process is llama_driver.cpp, or engine.compare.llama_cpp if that cannot be compiled;
both answer the same commands (engine.compare.llama_api).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from engine.batch import Span
from engine.compare.llama_api import (
    CommandError,
    Transcript,
    Value,
    WireError,
    read_frame,
    transcript,
    write_frame,
)
from engine.compare.llama_cpp import NODE
from engine.compare.llama_library import environment, find_build, how_it_ended, start_words
from engine.errors import (
    ContextFullError,
    DraftscopeError,
    OptionError,
    PeerLibraryError,
    UnsupportedModelError,
)
from engine.options.llama_cpp import CACHE_TYPES, FLASH_ATTENTION, LlamaSettings

_WAIT_S = 5.0
_SILENT_S = 600.0
"""Longest wait for a reply: a library can decode for ever (see plamo2_notes)."""
_LONGEST = 300
_TAIL = 4096
"""Bytes of the child's error output that are examined after its end."""
_ERROR_LINE = re.compile(r"[\d.]+ E (.+)")
"""A line of llama-server's log marked as an error, without time and mark."""


class GraphNode(NamedTuple):
    """A computed node of a graph. shape: ne, innermost first. values: every `stride`th value in
    order, float32; none for unreadable types. norm, sum: over all."""

    name: str
    op: str
    shape: tuple[int, ...]
    values: np.ndarray
    stride: int
    norm: float
    sum: float


class LlamaEngine(ABC):
    """A loaded model of n_layers and n_bytes of weights, and its contexts, identified by number;
    close() frees all.

    Raises UnsupportedModelError if llama.cpp cannot load the file or open a context for it,
    OptionError for what the build does not support, PeerLibraryError if the library fails.
    """

    def __init__(self, path: Path, settings: LlamaSettings | None = None) -> None:
        self.settings = settings or LlamaSettings()
        self._path = path
        self._widths: list[int] = []
        self._model, self._n_vocab, self.n_layers, self.n_bytes = self._open_model(path)

    def _open_model(self, path: Path) -> list[int]:
        settings = self.settings
        words = str(path), settings.n_gpu_layers, settings.devices, int(settings.load_mtp)
        return _integers(self._ask("open_model", *words), 4)

    def add_model(self, path: Path) -> int:
        """Load a second file, such as a separate MTP block. Returns its number."""
        return self._open_model(path)[0]

    @abstractmethod
    def _call(self, name: str, *values: Value | str) -> list[Value]:
        """The reply values of a command. Raises CommandError and PeerLibraryError."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called again."""

    def build_facts(self) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
        """The library's description of itself: version, commit, processor features, and its devices
        by name and description."""
        _, *texts = self._ask("build_facts")
        version, commit, system, devices = (_text(one) for one in texts)
        pairs = (line.partition("\t")[::2] for line in devices.splitlines())
        return version, commit, system, tuple(pairs)

    def version(self) -> str:
        """The library and its version."""
        return " ".join(filter(None, ("llama.cpp", self.build_facts()[0])))

    def open_context(
        self,
        n_seqs: int,
        n_ctx: int,
        n_ubatch: int,
        n_rs_seq: int,
        n_threads: int,
        n_batch: int | None = None,
        *,
        kv_unified: bool | None = None,
        mtp_of: int | None = None,
        traced: bool = False,
        model: int | None = None,
    ) -> tuple[int, int]:
        """Open a context of n_seqs sequences of n_ctx cells each, under the engine's settings.

        n_batch: tokens of a batch, None = from the settings. n_rs_seq: requested snapshot planes.
        kv_unified: None = from the settings. mtp_of: makes an MTP context attached to that one.
        traced: its decodes can be traced. model: one that was added. Returns the context's number
        and its planes, 0 if the architecture has none.
        """
        settings = self.settings
        ubatch = min(n_ubatch, n_ctx)
        unified = settings.kv_unified if kv_unified is None else kv_unified
        found = self._ask(
            "open_context",
            self._model if model is None else model,
            n_seqs,
            n_ctx * n_seqs,
            max(ubatch, n_batch or settings.n_batch or ubatch),
            ubatch,
            n_rs_seq,
            n_threads,
            FLASH_ATTENTION[settings.flash_attn],
            CACHE_TYPES[settings.type_k],
            CACHE_TYPES[settings.type_v],
            int(unified),
            int(mtp_of is not None),
            -1 if mtp_of is None else mtp_of,
            int(traced),
        )
        number, planes, width = _integers(found, 3)
        self._widths.append(width)
        return number, planes if n_rs_seq else 0

    def close_context(self, number: int) -> None:
        """Close a context; its number is not used again."""
        self._ask("close_context", number)

    def decode(self, number: int, spans: Sequence[Span]) -> np.ndarray:
        """Decode spans in one batch; if they exceed it, in several of one sequence each. Logits
        float32 [n, n_vocab] of the requested rows, in order.

        Raises ContextFullError when llama.cpp finds no cells or fails.
        """
        width = self._widths[number]
        if sum(len(span.tokens) for span in spans) <= width:
            return self._decode(number, spans, 0)[0]
        rows = []
        for span in spans:
            for start in range(0, len(span.tokens), width):
                part = span.tokens[start : start + width]
                outputs = [i - start for i in span.outputs if start <= i < start + len(part)]
                one = Span(span.seq, span.pos0 + start, part, outputs)
                rows.append(self._decode(number, [one], 0)[0])
        return np.concatenate(rows)

    def decode_mtp(self, number: int, span: Span, rows: np.ndarray) -> np.ndarray:
        """Decode a span in an MTP context: logits float32 [n, n_vocab] of the requested rows.

        rows: float32 [n, n_embd], of the token before each; see `nextn`.
        """
        return self._decode(number, [span], 0, np.ascontiguousarray(rows, "<f4").tobytes())[0]

    def nextn(self, number: int, n: int) -> np.ndarray:
        """Input rows of an MTP block for the last n tokens of the last batch: float32 [n, n_embd].
        Needs an attached MTP context."""
        (raw,) = self._ask("nextn", number, n)
        return np.frombuffer(_bytes(raw), "<f4").reshape(n, -1)

    def trace(
        self, number: int, spans: Sequence[Span], most_values: int = 4096
    ) -> tuple[np.ndarray, list[GraphNode]]:
        """Decode one batch in a traced context: its logits, and every node of its graphs in order
        of computation, each computed alone. most_values: limit per node."""
        logits, found = self._decode(number, spans, most_values)
        return logits, graph_nodes(*found)

    def seq_rm(self, number: int, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove positions p0 <= pos < p1 (negative: no bound). False: refused."""
        return bool(self._ask("seq_rm", number, seq, p0, p1)[0])

    def seq_cp(self, number: int, src: int, dst: int) -> None:
        """Make dst a copy of src."""
        self._ask("seq_cp", number, src, dst)

    def seq_keep(self, number: int, seq: int) -> None:
        """Remove every other sequence."""
        self._ask("seq_keep", number, seq)

    def seq_add(self, number: int, seq: int, p0: int, p1: int, shift: int) -> None:
        """Move positions p0 <= pos < p1 by shift."""
        self._ask("seq_add", number, seq, p0, p1, shift)

    def positions(self, number: int, seq: int) -> tuple[int, int]:
        """First and last position present in both attention cells and recurrent state, -1 =
        none."""
        first, last = _integers(self._ask("positions", number, seq), 2)
        return first, last

    def pos_max(self, number: int, seq: int) -> int:
        """The last of `positions`."""
        return self.positions(number, seq)[1]

    def save(self, number: int, seq: int, flags: int) -> bytes:
        """Save a sequence as a blob; flags: WHOLE, PARTIAL, or PARTIAL with ON_DEVICE."""
        (blob,) = self._ask("save", number, seq, flags)
        return _bytes(blob)

    def load(self, number: int, seq: int, blob: bytes, flags: int) -> None:
        """Load a blob of the same flags into a sequence."""
        self._ask("load", number, seq, blob, flags)

    def save_file(self, number: int, seq: int, path: Path, tokens: Sequence[int] = ()) -> None:
        """Save a sequence and its tokens as a slot file of the library."""
        self._ask("save_file", number, seq, str(path), np.array(tokens, "<i4").tobytes())

    def load_file(self, number: int, seq: int, path: Path) -> list[int]:
        """Load a slot file into a sequence. Returns its tokens."""
        (tokens,) = self._ask("load_file", number, seq, str(path))
        found: list[int] = np.frombuffer(_bytes(tokens), "<i4").tolist()
        return found

    def _decode(
        self, number: int, spans: Sequence[Span], most_values: int, rows_in: bytes = b""
    ) -> tuple[np.ndarray, list[bytes]]:
        table = np.array(
            [
                (token, span.pos0 + i, span.seq, i in span.outputs)
                for span in spans
                for i, token in enumerate(span.tokens)
            ],
            "<i4",
        )
        raw = [column.tobytes() for column in table[:, :3].T]
        outputs = table[:, 3].astype("i1")
        raw.append(outputs.tobytes())
        status, logits, *found = self._ask("decode", number, *raw, rows_in, most_values)
        if status:
            where = ", ".join(f"position {span.pos0} of sequence {span.seq}" for span in spans)
            raise ContextFullError(
                f"llama.cpp could not decode {where} (status {status!r}).",
                "Raise -c, or leave out its lanes.",
            )
        rows = np.frombuffer(_bytes(logits), "<f4")
        if rows.size != int(outputs.sum()) * self._n_vocab or (most_values and len(found) != 2):
            raise self._wrong("decode")
        return rows.reshape(-1, self._n_vocab).copy(), [_bytes(one) for one in found]

    def _ask(self, name: str, *values: Value | str) -> list[Value]:
        try:
            return self._call(name, *values)
        except CommandError as error:
            raise self._refused(error) from error

    def _refused(self, error: CommandError) -> DraftscopeError:
        if error.kind == "build":
            return PeerLibraryError(
                f"{error}.",
                "Name a newer build, or one with its headers, with its libraries in one folder.",
            )
        if error.kind == "model":
            return UnsupportedModelError(
                f"llama.cpp cannot load {self._path.name}: {error}.",
                "Leave out its lanes, or use a newer llama.cpp.",
            )
        if error.kind == "option":
            return OptionError(
                f"llama.cpp refuses the request: {error}.", "Use another build or other settings."
            )
        return PeerLibraryError(f"llama.cpp failed: {error}.", "Look at that place in the build.")

    def _wrong(self, name: str) -> PeerLibraryError:
        return PeerLibraryError(
            f"The llama.cpp process sent a wrong reply to {name}.", "Use another build."
        )


class LlamaProcess(LlamaEngine):
    """A LlamaEngine in a child process. library: see find_build; None = an installed package.

    Also raises PeerLibraryError if the library cannot be used, or once the process has ended.
    """

    def __init__(
        self, path: Path, library: Path | None = None, settings: LlamaSettings | None = None
    ) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._silent = threading.Event()
        self._transcript: Transcript | None = None
        build = find_build(library)
        words = start_words(build)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read when the child has ended
        self._child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment(build.library.parent),
        )
        self._transcript = transcript()
        try:
            super().__init__(path, settings)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        if self._transcript is not None:
            self._transcript.close()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):  # it ended with unsent data
                    stream.close()
        try:
            child.wait(_WAIT_S)  # closing its input makes it leave
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._stderr.close()

    def __del__(self) -> None:
        self.close()

    def _call(self, name: str, *values: Value | str) -> list[Value]:
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            raise PeerLibraryError("The llama.cpp process has ended.", "Compare once more.")
        watch = threading.Timer(reply_limit(), self._end_silent, [self._child])
        watch.daemon = True
        watch.start()
        try:
            write_frame(self._child.stdin, [name, *values])
            failed, *found = read_frame(self._child.stdout)
        except (OSError, EOFError, WireError, ValueError) as error:
            raise self._ended(name) from error
        finally:
            watch.cancel()
        if failed:
            kind, message = (_text(one) for one in (*found, b"", b"")[:2])
            raise CommandError(kind, message)
        if self._transcript is not None:
            self._transcript.add(name, values, found)
        return found

    def _end_silent(self, child: subprocess.Popen[bytes]) -> None:
        self._silent.set()
        child.kill()

    def _ended(self, name: str) -> PeerLibraryError:
        assert self._child is not None
        try:
            status = self._child.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            status = self._child.wait()
        why = last_words(self._stderr) or how_it_ended(status)
        self.close()
        if self._silent.is_set():
            return PeerLibraryError(
                f"The llama.cpp library did not answer {name} within {reply_limit():g} s, and its "
                "process was ended.",
                "Use another build, or set DRAFTSCOPE_LLAMA_WAIT to more seconds for a slow one.",
            )
        return PeerLibraryError(
            f"The llama.cpp library ended its process in {name}: {why}.",
            "Look at that place of the build, or use another one.",
        )


def reply_limit() -> float:
    """Time limit for one command, seconds. Raises OptionError."""
    said = os.environ.get("DRAFTSCOPE_LLAMA_WAIT", "")
    with suppress(ValueError):
        seconds = float(said) if said else _SILENT_S
        if 0 < seconds <= threading.TIMEOUT_MAX:
            return seconds
    raise OptionError(
        f"DRAFTSCOPE_LLAMA_WAIT is {said[:40]!r}.", "Set it to a number of seconds above 0."
    )


def graph_nodes(table: bytes, values: bytes) -> list[GraphNode]:
    """The nodes of a traced decode's reply. Raises PeerLibraryError."""
    wrong = PeerLibraryError(
        "The llama.cpp process sent a wrong reply to trace.", "Use another build."
    )
    if len(table) % NODE.itemsize or len(values) % 4:
        raise wrong
    nodes, floats, at = [], np.frombuffer(values, "<f4"), 0
    for row in np.frombuffer(table, NODE):
        n = int(row["n_values"])
        if not 0 <= n <= floats.size - at:
            raise wrong
        shape = tuple(int(size) for size in row["ne"])
        name, op = (row[key].decode("utf-8", "replace") for key in ("name", "op"))
        numbers = int(row["stride"]), float(row["norm"]), float(row["sum"])
        nodes.append(GraphNode(name, op, shape, floats[at : at + n], *numbers))
        at += n
    return nodes


def last_words(stderr: IO[bytes]) -> str:
    """The last line of an error output, without full stop; a failed assertion, or the first line
    that llama-server marks as an error, takes precedence, because the others follow from it."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL))
    lines = stderr.read().decode("utf-8", "replace").splitlines()
    said = [line.strip().rstrip(".") for line in lines if line.strip()]
    loud = [line for line in said if "ASSERT" in line or "what()" in line or "fatal" in line]
    if loud:
        return loud[-1].rpartition("/")[2][:_LONGEST]  # without the path of a source file
    errors = [found[1] for line in said if (found := _ERROR_LINE.match(line))]
    return (errors[:1] or said[-1:] or [""])[0][:_LONGEST]


def _integers(values: Sequence[Any], n: int) -> list[int]:
    if len(values) != n or not all(isinstance(one, int) for one in values):
        raise PeerLibraryError("The llama.cpp process sent a wrong reply.", "Use another build.")
    return list(values)


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise PeerLibraryError("The llama.cpp process sent a wrong reply.", "Use another build.")
    return value


def _text(value: Value) -> str:
    return _bytes(value).decode("utf-8", "replace")
