"""llama.cpp on a model file, by the C interface of llama-cpp-python (the extra `peer`).

One model and any number of contexts: tokens in, logits out, and the memory operations that
rollback is made of. This is what runs in a process of its own (engine.compare.llama_process), so it
imports numpy and no torch; a library that is under work may end that process at any call.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from engine.compare.llama_library import INSTALL
from engine.errors import ContextFullError, OptionError, PeerLibraryError, UnsupportedModelError

WHOLE, PARTIAL, ON_DEVICE = 0, 1, 2
"""What is saved of a sequence: everything; the recurrent states; and those in buffers of the
device, of which the library keeps one per sequence and hands out a few bytes."""
_F32 = 0  # GGML_TYPE_F32
_NO_FLASH_ATTENTION = 0
_LOUD = 4  # GGML_LOG_LEVEL_ERROR


class TokenSpan(NamedTuple):
    """Tokens of a sequence at pos0, pos0 + 1, …; outputs: how many of the last have logits."""

    seq: int
    pos0: int
    tokens: Sequence[int]
    outputs: int


class ModelFacts(NamedTuple):
    """version: of the binding and, where it tells one, of the library. n_bytes: weights."""

    version: str
    n_bytes: int
    n_vocab: int
    n_layers: int


def require() -> ModuleType:
    """The bindings. Raises OptionError naming the command that installs them, and
    PeerLibraryError for a library that they do not fit."""
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise OptionError(
            f"llama.cpp lanes need llama-cpp-python, which cannot be imported ({error}).", INSTALL
        ) from error
    except (AttributeError, OSError, RuntimeError) as error:
        raise PeerLibraryError(
            f"llama-cpp-python cannot use the llama.cpp library ({error}).",
            "Name a build of the llama.cpp that this llama-cpp-python was made for.",
        ) from error


class LlamaCpp:
    """A loaded model without GPU. Contexts are known by number.

    Raises OptionError without the library, UnsupportedModelError if llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, api: Any = None) -> None:
        self._contexts: list[_Context] = []
        self._model: Any = None
        self._messages: list[str] = []
        self._path = path
        self._api: Any = require() if api is None else api
        self._log = self._api.llama_log_callback(self._hear)  # C keeps no reference
        self._api.llama_log_set(self._log, None)
        self._api.llama_backend_init()
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise self._unsupported()
        vocab = self._api.llama_model_get_vocab(self._model)
        self._n_vocab = int(self._api.llama_vocab_n_tokens(vocab))

    def facts(self) -> ModelFacts:
        """What the model and the library are."""
        api = self._api
        version, tell = f"llama-cpp-python {api.__version__}", getattr(api, "llama_version", None)
        if tell is not None:
            version += f", llama.cpp {tell().decode('utf-8', 'replace')}"
        return ModelFacts(
            version,
            int(api.llama_model_size(self._model)),
            self._n_vocab,
            int(api.llama_model_n_layer(self._model)),
        )

    def open_context(
        self,
        n_seqs: int,
        n_ctx: int,
        n_ubatch: int,
        n_rs_seq: int,
        n_threads: int,
        n_batch: int | None = None,
    ) -> tuple[int, int]:
        """n_seqs sequences of n_ctx cells each: attention cells float32, no flash attention.

        n_batch: tokens of a batch, None = those of a ubatch. n_rs_seq: snapshot planes to ask for.
        Returns the context's number and the planes that it has, 0 where the architecture has none.
        Raises UnsupportedModelError, and OptionError where the binding knows no planes.
        """
        api, settings = self._api, self._api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = n_ctx * n_seqs, n_seqs
        settings.n_ubatch = min(n_ubatch, n_ctx)
        settings.n_batch = settings.n_ubatch if n_batch is None else n_batch
        settings.n_threads = settings.n_threads_batch = n_threads
        settings.flash_attn_type = _NO_FLASH_ATTENTION
        settings.type_k = settings.type_v = _F32
        settings.kv_unified = False
        if n_rs_seq:
            if not hasattr(settings, "n_rs_seq"):
                raise OptionError(
                    "This llama-cpp-python knows no snapshot planes (n_rs_seq).", INSTALL
                )
            settings.n_rs_seq = n_rs_seq
        handle = api.llama_init_from_model(self._model, settings)
        if not handle:
            raise self._unsupported()
        width = int(settings.n_batch)
        batch = api.llama_batch_init(width, 0, 1)
        self._contexts.append(_Context(handle, api.llama_get_memory(handle), batch, width))
        return len(self._contexts) - 1, int(api.llama_n_rs_seq(handle)) if n_rs_seq else 0

    def decode(self, number: int, spans: Sequence[TokenSpan]) -> np.ndarray:
        """Decode spans in one batch; where they are more than a batch takes, in several of one
        sequence each. Logits float32 [n, n_vocab] of the rows asked for, in order.

        Raises ContextFullError when llama.cpp finds no cells or fails.
        """
        context = self._contexts[number]
        if sum(len(span.tokens) for span in spans) <= context.width:
            return self._decode(context, spans)
        rows = []
        for span in spans:
            for start in range(0, len(span.tokens), context.width):
                part = span.tokens[start : start + context.width]
                left = len(span.tokens) - start - len(part)
                outputs = max(0, min(len(part), span.outputs - left))
                rows.append(
                    self._decode(context, [TokenSpan(span.seq, span.pos0 + start, part, outputs)])
                )
        return np.concatenate(rows)

    def seq_rm(self, number: int, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove positions p0 <= pos < p1 (negative: no bound). False: refused."""
        memory = self._contexts[number].memory
        return bool(self._api.llama_memory_seq_rm(memory, seq, p0, p1))

    def seq_cp(self, number: int, src: int, dst: int) -> None:
        """dst becomes a copy of src."""
        self._api.llama_memory_seq_cp(self._contexts[number].memory, src, dst, -1, -1)

    def seq_keep(self, number: int, seq: int) -> None:
        """Forget every other sequence."""
        self._api.llama_memory_seq_keep(self._contexts[number].memory, seq)

    def seq_add(self, number: int, seq: int, p0: int, p1: int, shift: int) -> None:
        """Move positions p0 <= pos < p1 by shift."""
        self._api.llama_memory_seq_add(self._contexts[number].memory, seq, p0, p1, shift)

    def pos_max(self, number: int, seq: int) -> int:
        """The last position that both attention cells and recurrent state hold, -1 = none."""
        return int(self._api.llama_memory_seq_pos_max(self._contexts[number].memory, seq))

    def save(self, number: int, seq: int, flags: int) -> bytes:
        """A sequence as a blob; flags: WHOLE, PARTIAL, or PARTIAL with ON_DEVICE. Raises
        PeerLibraryError where the library cannot."""
        api, handle = self._api, self._contexts[number].handle
        size = int(api.llama_state_seq_get_size_ext(handle, seq, flags))
        buffer = (ctypes.c_uint8 * size)()
        written = int(api.llama_state_seq_get_data_ext(handle, buffer, size, seq, flags))
        if not size or written != size:
            raise self._failed(f"saving sequence {seq}")
        return bytes(buffer)

    def load(self, number: int, seq: int, blob: bytes, flags: int) -> None:
        """Put a blob of the same flags into a sequence. Raises PeerLibraryError."""
        api, handle = self._api, self._contexts[number].handle
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        if not api.llama_state_seq_set_data_ext(handle, buffer, len(blob), seq, flags):
            raise self._failed(f"restoring sequence {seq}")

    def close(self) -> None:
        """Give everything back; may be called again."""
        for context in self._contexts:
            self._api.llama_batch_free(context.batch)
            self._api.llama_free(context.handle)
        self._contexts = []
        if self._model:
            self._api.llama_model_free(self._model)
            self._api.llama_log_set(self._api.llama_log_callback(), None)
        self._model = None

    def _decode(self, context: _Context, spans: Sequence[TokenSpan]) -> np.ndarray:
        batch, n, outputs = context.batch, 0, []
        for span in spans:
            for i, token in enumerate(span.tokens):
                batch.token[n], batch.pos[n] = token, span.pos0 + i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, span.seq
                batch.logits[n] = i >= len(span.tokens) - span.outputs
                if batch.logits[n]:
                    outputs.append(n)
                n += 1
        batch.n_tokens = n
        if status := self._api.llama_decode(context.handle, batch):
            where = ", ".join(f"position {span.pos0} of sequence {span.seq}" for span in spans)
            raise ContextFullError(
                f"llama.cpp could not decode {where} (status {status}).",
                "Raise -c, or leave its lanes out.",
            )
        rows = np.empty((len(outputs), self._n_vocab), np.float32)
        for row, place in zip(rows, outputs, strict=True):
            found = self._api.llama_get_logits_ith(context.handle, place)
            row[:] = np.ctypeslib.as_array(found, (self._n_vocab,))
        return rows

    def _unsupported(self) -> UnsupportedModelError:
        self.close()
        return UnsupportedModelError(
            f"llama.cpp cannot load {self._path.name}: {self._why()}.",
            "Leave its lanes out, or install a newer llama-cpp-python.",
        )

    def _failed(self, what: str) -> PeerLibraryError:
        return PeerLibraryError(
            f"llama.cpp failed at {what}: {self._why()}.", "Look at what that build does there."
        )

    def _why(self) -> str:
        return self._messages[-1] if self._messages else "no reason given"

    def _hear(self, level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == _LOUD and (message := text.decode("utf-8", "replace").strip().rstrip(".")):
            self._messages = [message]


class _Context(NamedTuple):
    handle: Any
    memory: Any
    batch: Any
    width: int
