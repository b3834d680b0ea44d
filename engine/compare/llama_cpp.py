"""llama.cpp on a model file, by the C interface of llama-cpp-python (the extra `peer`).

Only what a lane needs: tokens in, logits out. The library is imported when it is first used.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine.errors import ContextFullError, OptionError, UnsupportedModelError

_F32 = 0  # GGML_TYPE_F32
_NO_FLASH_ATTENTION = 0
_LOUD = 4  # GGML_LOG_LEVEL_ERROR


def require() -> ModuleType:
    """The bindings. Raises OptionError naming the command that installs them."""
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise OptionError(
            f"The peer lane needs llama-cpp-python, which cannot be imported ({error}).",
            "Install it with: pip install 'llama-cpp-python>=0.3'",
        ) from error


class LlamaCpp:
    """A context with n_seqs sequences of n_ctx cells each: attention cells float32, no flash
    attention, no GPU, as many threads as torch uses.

    Raises OptionError without the library, UnsupportedModelError if llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, n_seqs: int, n_ctx: int, n_ubatch: int) -> None:
        self._batch: Any = None
        self._context = self._model = None
        self._messages: list[str] = []
        self._api: Any = require()
        self._log = self._api.llama_log_callback(self._hear)  # C keeps no reference
        self._api.llama_log_set(self._log, None)
        self._api.llama_backend_init()
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise self._unsupported(path)
        of_context = self._api.llama_context_default_params()
        of_context.n_ctx, of_context.n_seq_max = n_ctx * n_seqs, n_seqs
        of_context.n_batch = of_context.n_ubatch = min(n_ubatch, n_ctx)
        of_context.n_threads = of_context.n_threads_batch = torch.get_num_threads()
        of_context.flash_attn_type = _NO_FLASH_ATTENTION
        of_context.type_k = of_context.type_v = _F32
        of_context.kv_unified = False
        self._context = self._api.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise self._unsupported(path)
        self._width = int(of_context.n_batch)
        self._n_vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(self._width, 0, 1)

    @property
    def version(self) -> str:
        """Of llama-cpp-python."""
        return str(self._api.__version__)

    @property
    def n_bytes(self) -> int:
        """Weights, in bytes."""
        return int(self._api.llama_model_size(self._model))

    def decode(self, seq: int, pos0: int, tokens: Sequence[int]) -> torch.Tensor:
        """Decode tokens at pos0, pos0 + 1, …: logits [1, n_vocab] float32 behind the last.

        Raises ContextFullError when llama.cpp finds no cells or fails.
        """
        for start in range(0, len(tokens), self._width):
            part = tokens[start : start + self._width]
            self._batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self._batch.token[i], self._batch.pos[i] = token, pos0 + start + i
                self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, seq
                self._batch.logits[i] = start + i == len(tokens) - 1
            status = self._api.llama_decode(self._context, self._batch)
            if status:
                raise ContextFullError(
                    f"llama.cpp could not decode position {pos0 + start} (status {status}).",
                    "Raise -c, or leave the peer lane out.",
                )
        row = self._api.llama_get_logits_ith(self._context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(row, (self._n_vocab,)).copy()).unsqueeze(0)

    def forget(self, seq: int) -> None:
        """Drop a sequence."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, seq, -1, -1)

    def close(self) -> None:
        """Give everything back; may be called again."""
        if self._batch is not None:
            self._api.llama_batch_free(self._batch)
        if self._context:
            self._api.llama_free(self._context)
        if self._model:
            self._api.llama_model_free(self._model)
            self._api.llama_log_set(self._api.llama_log_callback(), None)
        self._batch = self._context = self._model = None

    def __del__(self) -> None:
        self.close()

    def _unsupported(self, path: Path) -> UnsupportedModelError:
        self.close()
        why = self._messages[-1] if self._messages else "no reason given"
        return UnsupportedModelError(
            f"llama.cpp cannot load {path.name}: {why}.",
            "Leave the peer lane out, or install a newer llama-cpp-python.",
        )

    def _hear(self, level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == _LOUD and (message := text.decode("utf-8", "replace").strip().rstrip(".")):
            self._messages = [message]
