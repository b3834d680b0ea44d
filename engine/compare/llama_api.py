"""llama.cpp's C interface through ctypes: its functions, and the layouts of its parameter
structures.

llama_api.txt declares both; `?` marks what a library may lack. A layout is selected by the size
that the library writes and by its default values.

Frames connect Draftscope with a process that drives llama.cpp (llama_driver.cpp). A frame is its
length (u64) and values; a value is `i` and an int64, or `b`, a length (u64) and bytes, all little
endian. A request starts with the name of a command, a reply with 0, or with 1, the kind of error
and a message.

If an environment variable names a folder, every driven process writes a transcript of its requests,
so that another build can be asked the same: one frame per command. Blobs made by the library are
replaced by their number, because another build makes its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import re
import struct
import sys
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import IO, Any, NamedTuple

from engine.errors import PeerLibraryError

_ROOM = 1 << 14


class CommandError(Exception):
    """A refused command. kind: build, model, full, library or option."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "use_extra_bufts": True, "no_host": False}
_CONTEXT_DEFAULTS = {
    "n_seq_max": 1,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "op_offload": True,
    "kv_unified": False,
}


class _LlamaBatch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class _Tensor(Structure):
    """The head of a ggml_tensor, as far as a trace needs it."""

    _fields_ = (("type", c_int32), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4))


_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
EvalCallback = ctypes.CFUNCTYPE(c_bool, POINTER(_Tensor), c_bool, c_void_p)
_KINDS: dict[str, Any] = {
    "void": None,
    "void*": c_void_p,
    "char*": c_char_p,
    "bool": c_bool,
    "float": c_float,
    "float*": POINTER(c_float),
    "int32": c_int32,
    "int32*": POINTER(c_int32),
    "uint8*": POINTER(c_uint8),
    "uint32": c_uint32,
    "uint64": c_uint64,
    "size_t": c_size_t,
    "size_t*": POINTER(c_size_t),
    "batch": _LlamaBatch,
    "tensor*": POINTER(_Tensor),
    "log_callback": _LogCallback,
}
"""The types in llama_api.txt."""
_FUNCTION = re.compile(r"(\? )?(\S+) (\w+)\((.*)\)")
SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"
"""The rows read by an MTP block, from a staging interface in C++."""


def _declared() -> tuple[list[list[str]], list[tuple[Any, ...]]]:
    """Structures of llama_api.txt as lines, after the function that gives their defaults; and
    functions: the mark of optional ones, result, name, arguments."""
    text = Path(__file__).with_name("llama_api.txt").read_text(encoding="utf-8")
    *structures, (_, *lines) = (block.splitlines() for block in text.split("\n\n"))
    found = (_FUNCTION.fullmatch(line.strip()) for line in lines)
    return structures, [one.groups() for one in found if one]


def _fields(lines: Sequence[str], *, newer: bool) -> list[tuple[str, Any]]:
    """newer: including fields added later."""
    words = (line.split() for line in lines if newer or "?" not in line)
    return [
        (name, _KINDS[kind])
        for kind, *names in (line[1:] if line[0] == "?" else line for line in words)
        for name in names
    ]


_STRUCTURES, _DECLARED = _declared()
_FUNCTIONS = {
    name: (_KINDS[result], [_KINDS[one] for one in arguments.split(", ") if one])
    for _, result, name, arguments in _DECLARED
}
_OPTIONAL = {name for may_lack, _, name, _ in _DECLARED if may_lack}
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[list[tuple[str, Any]], ...]]] = {
    name: (defaults, (_fields(lines, newer=False), _fields(lines, newer=True)))
    for (name, *lines), defaults in zip(
        _STRUCTURES, (_MODEL_DEFAULTS, _CONTEXT_DEFAULTS), strict=True
    )
}
"""Defaults common to all layouts, and the fields of each layout, of llama.cpp from August 2026: the
model's of 72 and 80 bytes, the context's of 160 and 168."""


class LlamaApi:
    """The functions of a library, called as in C. Raises CommandError for a library that cannot be
    loaded, lacks a function, or has parameters of an unknown layout."""

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            self._siblings = [
                ctypes.CDLL(str(path))
                for stem in ("libggml", "libggml-base")
                for path in sorted(library.parent.glob(f"{stem}.*"))[:1]
            ]
            for name, (result, arguments) in _FUNCTIONS.items():
                self._declare(name, result, arguments)
            self._model_params, self._context_params = map(self._layout, LAYOUTS)
        except (AttributeError, OSError) as error:
            raise CommandError(
                "build", f"The library {library.name} cannot be used: {error}"
            ) from error
        self._load = self._function("llama_model_load_from_file")
        self._load.restype, self._load.argtypes = c_void_p, [c_char_p, self._model_params]
        self._init = self._function("llama_init_from_model")
        self._init.restype, self._init.argtypes = c_void_p, [c_void_p, self._context_params]
        self.llama_model_load_from_file, self.llama_init_from_model = self._load, self._init
        self.llama_log_callback = _LogCallback

    def llama_model_default_params(self) -> Any:
        return self._defaults("llama_model_default_params", self._model_params)

    def llama_context_default_params(self) -> Any:
        return self._defaults("llama_context_default_params", self._context_params)

    def _function(self, name: str) -> Any:
        for library in (self._library, *self._siblings):
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(f"it has no {name}")

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> None:
        try:
            found = self._function(name)
        except AttributeError:
            if name in _OPTIONAL:
                return
            raise
        found.restype, found.argtypes = result, arguments
        setattr(self, name, found)

    def _defaults(self, name: str, kind: type[Structure]) -> Structure:
        function = self._function(name)
        function.restype, function.argtypes = kind, []
        found: Structure = function()
        return found

    def _layout(self, name: str) -> type[Structure]:
        defaults, layouts = LAYOUTS[name]
        written, tried = self._n_written(name), []
        for fields in layouts:
            kind = type(name, (Structure,), {"_fields_": fields})
            size = ctypes.sizeof(kind)
            tried.append(str(size))
            if written is not None and not size - 8 < written <= size:
                continue
            values = self._defaults(name, kind)
            if all(getattr(values, field) == value for field, value in defaults.items()):
                return kind
        found = "" if written is None else f" ({written} bytes; known are {' and '.join(tried)})"
        raise OSError(f"{name} returns parameters with an unknown layout{found}")

    def _n_written(self, name: str) -> int | None:
        """Bytes up to the last one written by a function that returns a structure. None where the
        calling convention hides it: here the caller passes the address as first argument."""
        if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
            return None
        function = self._function(name)
        function.restype, function.argtypes = None, [c_void_p]
        seen = []
        for fill in (0xA5, 0x5A):
            buffer = (ctypes.c_ubyte * _ROOM)(*[fill] * _ROOM)
            function(buffer)
            seen.append(bytes(buffer))
        same = [i for i, (a, b) in enumerate(zip(*seen, strict=True)) if a == b]
        return same[-1] + 1 if same else 0


Value = int | bytes
_N = struct.Struct("<Q")
_INTEGER = struct.Struct("<q")
_MOST_BYTES = 1 << 34
_PIECE = 1 << 20


class WireError(Exception):
    """Received data is not a frame."""


def write_frame(stream: IO[bytes], values: Sequence[Value | str]) -> None:
    """Send values as one frame."""
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, int):
            parts.append(b"i" + _INTEGER.pack(value))
            continue
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        parts += [b"b" + _N.pack(len(raw)), raw]
    stream.write(_N.pack(sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[Value]:
    """Read the next frame. Raises EOFError at the end of the stream or inside a frame, and
    WireError for invalid data."""
    (n,) = _N.unpack(_read(stream, _N.size))
    if n > _MOST_BYTES:
        raise WireError(f"a frame of {n} bytes")
    frame = memoryview(_read(stream, n))
    values: list[Value] = []
    at = 0
    while at < n:
        kind, body = bytes(frame[at : at + 1]), at + 1 + _N.size
        if kind not in (b"i", b"b") or body > n:
            raise WireError(f"a value of kind {kind!r}")
        if kind == b"i":
            values.append(_INTEGER.unpack(frame[at + 1 : body])[0])
            at = body
            continue
        (size,) = _N.unpack(frame[at + 1 : body])
        if size > n - body:
            raise WireError(f"{size} bytes in a frame of {n}")
        values.append(bytes(frame[body : body + size]))
        at = body + size
    return values


def _read(stream: IO[bytes], n: int) -> bytes:
    """n bytes as they arrive, so that a false length allocates nothing."""
    parts: list[bytes] = []
    while n:
        part = stream.read(min(n, _PIECE))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


TRANSCRIPTS = "DRAFTSCOPE_LLAMA_TRANSCRIPTS"
_numbers = itertools.count()


class ApiCall(NamedTuple):
    """A command. saved: indices of values that are numbers of blobs, from 0 in order of arrival."""

    name: str
    values: list[Value]
    saved: tuple[int, ...]


class Transcript:
    """Writes the commands of one process to a folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{next(_numbers):04}"
        self._file = path.open("wb")
        self._blobs: dict[bytes, int] = {}
        self._n_saved = 0

    def add(self, name: str, values: Sequence[Value | str], reply: Sequence[Value]) -> None:
        """Add a command that was answered."""
        kept, places = list(values), 0
        for place, value in enumerate(values):
            number = self._blobs.get(_hash(value)) if isinstance(value, bytes) else None
            if number is not None:
                kept[place], places = number, places | 1 << place
        if name == "save" and isinstance(reply[0], bytes):
            self._blobs[_hash(reply[0])] = self._n_saved
            self._n_saved += 1
        write_frame(self._file, [name, places, *kept])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def transcript() -> Transcript | None:
    """A new transcript, if the environment requests one."""
    folder = os.environ.get(TRANSCRIPTS)
    return Transcript(Path(folder)) if folder else None


def read_transcript(path: Path) -> list[ApiCall]:
    """The commands of a transcript; of a truncated one the complete ones. Raises
    PeerLibraryError."""
    found: list[ApiCall] = []
    with path.open("rb") as file:
        while True:
            try:
                name, places, *values = read_frame(file)
            except EOFError:
                return found
            except (WireError, ValueError) as error:
                raise PeerLibraryError(
                    f"{path.name} is not a transcript: {error}.", "Record it anew."
                ) from error
            if not isinstance(name, bytes) or not isinstance(places, int):
                raise PeerLibraryError(f"{path.name} is not a transcript.", "Record it anew.")
            saved = tuple(i for i in range(len(values)) if places >> i & 1)
            found.append(ApiCall(name.decode("utf-8", "replace"), values, saved))


def _hash(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()
