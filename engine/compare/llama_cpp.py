"""llama.cpp through ctypes: replaces llama_driver.cpp where that cannot be compiled.

A build without headers (a wheel) or a machine without a compiler uses this process instead of the
driver; it answers the same commands. It imports numpy and not torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.compare.llama_api import (
    GET_NEXTN,
    SET_NEXTN,
    CommandError,
    EvalCallback,
    LlamaApi,
    Value,
    WireError,
    read_frame,
    write_frame,
)
from engine.errors import DraftscopeError, OptionError

WHOLE, PARTIAL, ON_DEVICE = 0, 1, 2
"""What is saved of a sequence: everything; the recurrent states; or those in device buffers, of
which the library keeps one per sequence and returns a few bytes."""
_LOUD = 4  # GGML_LOG_LEVEL_ERROR
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MOST_NODE = 1 << 28


NODE = np.dtype(
    [
        ("name", "S64"),
        ("op", "S32"),
        ("type", "<i4"),
        ("stride", "<i4"),
        ("ne", "<i8", 4),
        ("n_values", "<i8"),
        ("norm", "<f8"),
        ("sum", "<f8"),
    ]
)
"""A node of a traced graph: `struct node` of llama_driver.cpp."""


class _Context(NamedTuple):
    handle: Any
    memory: Any
    batch: Any
    width: int
    n_vocab: int
    n_embd: int
    trace: _GraphTrace | None


class LlamaCommands:
    """The commands of llama_driver.cpp over a LlamaApi, or a double of it. Each takes and returns
    values of a frame, and raises CommandError."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._models: list[tuple[Any, int]] = []
        self._contexts: list[_Context] = []
        self._last_error = ""
        self._log = api.llama_log_callback(self._hear)  # C keeps no reference
        api.llama_log_set(self._log, None)
        api.llama_backend_init()
        if not api.ggml_backend_dev_count():
            api.ggml_backend_load_all()

    def call(self, name: str, values: Sequence[Value]) -> list[Value]:
        """The reply of a command. Raises CommandError."""
        if name in ("call", "close") or name.startswith("_") or not hasattr(self, name):
            raise CommandError("option", f"this driver knows no command {name}")
        found: list[Value] = getattr(self, name)(*values)
        return found

    def build_facts(self) -> list[Value]:
        api = self._api
        devices = [api.ggml_backend_dev_get(i) for i in range(api.ggml_backend_dev_count())]
        lines = [
            api.ggml_backend_dev_name(one) + b"\t" + api.ggml_backend_dev_description(one)
            for one in devices
        ]
        texts = [getattr(api, name, bytes)() for name in ("llama_version", "ggml_commit")]
        return [1, *texts, api.llama_print_system_info(), b"\n".join(lines)]

    def open_model(
        self, path: bytes, n_gpu_layers: int, names: bytes, load_mtp: int
    ) -> list[Value]:
        api, settings = self._api, self._api.llama_model_default_params()
        settings.n_gpu_layers = n_gpu_layers
        if load_mtp:
            settings.load_mtp = True
        if names:
            devices = []
            for name in names.split(b","):
                devices.append(api.ggml_backend_dev_by_name(name))
                if not devices[-1]:
                    found = [
                        api.ggml_backend_dev_get(i) for i in range(api.ggml_backend_dev_count())
                    ]
                    known = b", ".join(map(api.ggml_backend_dev_name, found)).decode()
                    raise CommandError("option", f"there is no device {name!r} (known: {known})")
            self._devices = (c_void_p * (len(devices) + 1))(*devices, None)
            settings.devices = ctypes.cast(self._devices, c_void_p)
        self._last_error = ""
        model = api.llama_model_load_from_file(path, settings)
        if not model:
            raise CommandError("model", self._why())
        n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
        self._models.append((model, n_vocab))
        n_layers, size = api.llama_model_n_layer(model), api.llama_model_size(model)
        return [len(self._models) - 1, n_vocab, int(n_layers), int(size)]

    def open_context(
        self,
        model: int,
        n_seqs: int,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_rs_seq: int,
        n_threads: int,
        flash: int,
        type_k: int,
        type_v: int,
        unified: int,
        mtp: int,
        other: int,
        traced: int,
    ) -> list[Value]:
        api, settings = self._api, self._api.llama_context_default_params()
        settings.n_seq_max, settings.n_ctx = n_seqs, n_ctx
        settings.n_batch, settings.n_ubatch, settings.n_rs_seq = n_batch, n_ubatch, n_rs_seq
        settings.n_threads = settings.n_threads_batch = n_threads
        settings.flash_attn_type, settings.kv_unified = flash, bool(unified)
        settings.type_k, settings.type_v = type_k, type_v
        if mtp:
            settings.ctx_type = 1
        if other >= 0:
            if not hasattr(api, SET_NEXTN):
                raise CommandError("option", "this build has no rows for MTP blocks")
            settings.ctx_other = self._context(other).handle
        trace = _GraphTrace(api) if traced else None
        if trace:
            settings.cb_eval = ctypes.cast(trace.callback, c_void_p)
        self._last_error = ""
        handle = api.llama_init_from_model(self._models[model][0], settings)
        if not handle:
            raise CommandError("model", self._why())
        if other >= 0:
            getattr(api, SET_NEXTN)(self._context(other).handle, True, False)
            getattr(api, SET_NEXTN)(handle, True, True)
        width = int(api.llama_n_batch(handle))
        batch, (owner, n_vocab) = api.llama_batch_init(width, 0, 1), self._models[model]
        memory, n_embd = api.llama_get_memory(handle), int(api.llama_model_n_embd(owner))
        self._contexts.append(_Context(handle, memory, batch, width, n_vocab, n_embd, trace))
        planes = int(api.llama_n_rs_seq(handle)) if n_rs_seq else 0
        return [len(self._contexts) - 1, planes, width]

    def close_context(self, number: int) -> list[Value]:
        context = self._contexts[number]
        if context.handle is not None:
            self._api.llama_batch_free(context.batch)
            self._api.llama_free(context.handle)
        self._contexts[number] = context._replace(handle=None, memory=None)
        return []

    def decode(
        self,
        number: int,
        tokens: bytes,
        pos: bytes,
        seqs: bytes,
        outputs: bytes,
        rows_in: bytes,
        limit: int,
    ) -> list[Value]:
        api, context = self._api, self._context(number)
        batch, n = context.batch, len(outputs)
        if not 0 < n <= context.width:
            raise CommandError("option", f"a batch of {n} tokens where {context.width} fit")
        if limit and context.trace is None:
            raise CommandError("option", "a trace of a context that was opened without")
        columns = (np.frombuffer(one, "<i4").tolist() for one in (tokens, pos, seqs))
        wanted = [i for i in range(n) if outputs[i]]
        for i, (token, place, seq) in enumerate(zip(*columns, strict=True)):
            batch.token[i], batch.pos[i] = token, place
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = bool(outputs[i])
        batch.n_tokens = n
        if context.trace and limit:
            context.trace.begin(limit)
        if rows_in:
            kept = np.frombuffer(rows_in, "<f4")
            batch.embd = kept.ctypes.data
        status = int(api.llama_decode(context.handle, batch))
        batch.embd = None
        rows = []
        for i in [] if status else wanted:
            found = api.llama_get_logits_ith(context.handle, i)
            if not found:
                raise CommandError("library", "no logits of a token that they were asked for")
            rows.append(np.ctypeslib.as_array(found, (context.n_vocab,)).astype("<f4").tobytes())
        traced = context.trace.end() if context.trace and limit else []
        return [status, b"".join(rows), *traced]

    def nextn(self, number: int, n: int) -> list[Value]:
        api, context = self._api, self._context(number)
        rows = getattr(api, GET_NEXTN)(context.handle) if hasattr(api, GET_NEXTN) else None
        if not rows or not 0 < n <= context.batch.n_tokens:
            raise CommandError("option", "no context at the side reads these rows")
        found = np.ctypeslib.as_array(rows, (context.batch.n_tokens, context.n_embd))
        return [found[-n:].astype("<f4").tobytes()]

    def seq_rm(self, number: int, seq: int, p0: int, p1: int) -> list[Value]:
        memory = self._context(number).memory
        return [int(self._api.llama_memory_seq_rm(memory, seq, p0, p1))]

    def seq_cp(self, number: int, src: int, dst: int) -> list[Value]:
        self._api.llama_memory_seq_cp(self._context(number).memory, src, dst, -1, -1)
        return []

    def seq_keep(self, number: int, seq: int) -> list[Value]:
        self._api.llama_memory_seq_keep(self._context(number).memory, seq)
        return []

    def seq_add(self, number: int, seq: int, p0: int, p1: int, shift: int) -> list[Value]:
        self._api.llama_memory_seq_add(self._context(number).memory, seq, p0, p1, shift)
        return []

    def positions(self, number: int, seq: int) -> list[Value]:
        api, memory = self._api, self._context(number).memory
        return [
            int(api.llama_memory_seq_pos_min(memory, seq)),
            int(api.llama_memory_seq_pos_max(memory, seq)),
        ]

    def save(self, number: int, seq: int, flags: int) -> list[Value]:
        api, handle = self._api, self._context(number).handle
        size = int(api.llama_state_seq_get_size_ext(handle, seq, flags))
        buffer = (c_uint8 * size)()
        self._last_error = ""
        written = int(api.llama_state_seq_get_data_ext(handle, buffer, size, seq, flags))
        if not size or written != size:
            raise CommandError("library", f"saving sequence {seq}: {self._why()}")
        return [bytes(buffer)]

    def load(self, number: int, seq: int, blob: bytes, flags: int) -> list[Value]:
        api, handle = self._api, self._context(number).handle
        buffer = (c_uint8 * len(blob)).from_buffer_copy(blob)
        self._last_error = ""
        if not api.llama_state_seq_set_data_ext(handle, buffer, len(blob), seq, flags):
            raise CommandError("library", f"restoring sequence {seq}: {self._why()}")
        return []

    def save_file(self, number: int, seq: int, path: bytes, tokens: bytes) -> list[Value]:
        handle, n = self._context(number).handle, len(tokens) // 4
        ids = (c_int32 * n).from_buffer_copy(tokens)
        self._last_error = ""
        if not self._api.llama_state_seq_save_file(handle, path, seq, ids, n):
            raise CommandError("library", f"saving the slot file of sequence {seq}: {self._why()}")
        return []

    def load_file(self, number: int, seq: int, path: bytes) -> list[Value]:
        api, handle = self._api, self._context(number).handle
        n = int(api.llama_n_ctx(handle))
        ids, found = (c_int32 * n)(), c_size_t()
        self._last_error = ""
        if not api.llama_state_seq_load_file(handle, path, seq, ids, n, ctypes.byref(found)):
            raise CommandError("library", f"loading the slot file of sequence {seq}: {self._why()}")
        return [bytes(ids)[: 4 * min(n, found.value)]]

    def close(self) -> None:
        """Free everything."""
        for number in range(len(self._contexts)):
            self.close_context(number)
        for model, _ in self._models:
            self._api.llama_model_free(model)
        self._contexts, self._models = [], []

    def _context(self, number: int) -> _Context:
        context = self._contexts[number]
        if context.handle is None:
            raise CommandError("option", f"context {number} was closed")
        return context

    def _why(self) -> str:
        return self._last_error or "no reason given"

    def _hear(self, level: int, text: bytes, _: Any) -> None:
        if level == _LOUD and (message := text.decode("utf-8", "replace").strip().rstrip(".")):
            self._last_error = message


_DTYPES = {0: "<f4", 1: "<f2", 24: "i1", 25: "<i2", 26: "<i4", 27: "<i8"}
_BF16 = 30


class _GraphTrace:
    """The nodes of a graph as the library computes them."""

    def __init__(self, api: Any) -> None:
        self._api, self._limit = api, 0
        self._nodes: list[np.ndarray] = []
        self._values: list[bytes] = []
        self.callback = EvalCallback(self._observe)

    def begin(self, limit: int) -> None:
        """Record the nodes of the next decode, at most `limit` values of each."""
        self._limit, self._nodes, self._values = limit, [], []

    def end(self) -> list[bytes]:
        """The nodes, and their values as float32."""
        self._limit = 0
        return [b"".join(one.tobytes() for one in self._nodes), b"".join(self._values)]

    def _observe(self, tensor: Any, ask: bool, _: Any) -> bool:
        if ask or not self._limit:
            return bool(self._limit)
        head, node = tensor.contents, np.zeros((), NODE)
        node["name"], node["op"] = self._api.ggml_get_name(tensor), self._api.ggml_op_desc(tensor)
        node["type"], node["ne"] = head.type, list(head.ne)
        values = self._values_of(tensor)
        if values is not None and values.size:
            stride = -(-values.size // self._limit)
            node["stride"], kept = stride, values[::stride].astype("<f4")
            exact = values.astype(np.float64)
            node["n_values"], node["sum"] = kept.size, exact.sum()
            node["norm"] = np.linalg.norm(exact)
            self._values.append(kept.tobytes())
        self._nodes.append(node)
        return True

    def _values_of(self, tensor: Any) -> np.ndarray | None:
        """In order; None for types not read here (quantised caches, and very large nodes)."""
        head, n = tensor.contents, int(self._api.ggml_nbytes(tensor))
        dtype = np.dtype("<u2" if head.type == _BF16 else _DTYPES.get(head.type, "V1"))
        if dtype.kind == "V" or not 0 < n <= _MOST_NODE:
            return None
        raw = (c_uint8 * n)()
        self._api.ggml_backend_tensor_get(tensor, raw, 0, n)
        shape, strides = tuple(head.ne)[::-1], tuple(head.nb)[::-1]
        values = np.ndarray(shape, dtype, bytes(raw), strides=strides).reshape(-1)
        if head.type == _BF16:
            values = (values.astype("<u4") << 16).view("<f4")
        return values


def serve(api: Callable[[], Any]) -> None:
    """Answer requests until the input ends."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the library is not a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes this
    if sys.platform == "linux":  # also during a call that never ends
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    commands: LlamaCommands | None = None
    while True:
        try:
            name, *values = read_frame(requests)
        except (EOFError, WireError, ValueError):
            break
        reply: list[Value | str]
        try:
            commands = commands or LlamaCommands(api())
            reply = [0, *commands.call(bytes(name).decode(), values)]
        except CommandError as error:
            reply = [1, error.kind, str(error)]
        except DraftscopeError as error:
            kind = "option" if isinstance(error, OptionError) else "library"
            reply = [1, kind, error.message.rstrip(".")]
        except (TypeError, IndexError, ValueError) as error:
            reply = [1, "option", f"the command is wrong: {error}"]
        write_frame(replies, reply)
    if commands is not None:
        commands.close()


if __name__ == "__main__":
    serve(lambda: LlamaApi(Path(sys.argv[1])))
