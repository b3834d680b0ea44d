"""Loading of a drafter file, next to its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.long_work import ReportProgress
from engine.model.drafters.config import (
    D2T,
    KINDS,
    DrafterConfig,
    DrafterInfo,
    check_drafter,
    describe_drafter,
)
from engine.model.drafters.dflash import DFlash
from engine.model.drafters.eagle3 import Eagle3
from engine.model.hybrid import HybridModel
from engine.model.limits import REMEDY
from engine.model.loader import reader_for
from engine.model.parts import Shapes
from engine.model.weights import Embedding, Projection, Weights
from kernels.rows import take_rows


class DraftVocabulary:
    """ids: int64 [n_drafted], the target id of every row of the drafter's head; None if they are
    equal. n_vocab: ids of the target."""

    def __init__(self, ids: Tensor | None, n_vocab: int) -> None:
        self.ids, self.n_vocab = ids, n_vocab

    def of_target(self, rows: Tensor) -> Tensor:
        """The target's ids of rows of the head, int64 of any shape."""
        return rows if self.ids is None else take_rows(self.ids, rows)


def read_ids(file: GgufFile, n_vocab: int, device: torch.device) -> Tensor | None:
    """The tensor D2T of a file checked by engine.model.drafters.config: distinct ids 0..n_vocab -
    1. Raises ModelFileError for others; None without the tensor."""
    if D2T not in file.tensors:
        return None
    ids = np.frombuffer(file.raw(D2T), "<i8")
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        what = (
            f"number {outside[0]} is {ids[outside[0]]}, outside the target's ids 0..{n_vocab - 1}"
        )
        raise ModelFileError(file.path, f"tensor {D2T}", what, REMEDY)
    if np.unique(ids).size < ids.size:
        raise ModelFileError(file.path, f"tensor {D2T}", "an id of the target occurs twice", REMEDY)
    return torch.from_numpy(ids.astype(np.int64)).to(device)


_MAKE: dict[str, Callable[..., Any]] = {"eagle3": Eagle3, "dflash": DFlash}
"""The drafters by architecture."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """model: what _MAKE makes. weight_bytes: memory that its own weights take."""

    config: DrafterConfig
    info: DrafterInfo
    model: Any
    vocabulary: DraftVocabulary
    weight_bytes: int


def load_drafter(
    file: GgufFile,
    target: HybridModel,
    *,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
    mmap: bool | None = None,
) -> LoadedDrafter:
    """Load the drafter in `file` to the target's device, in its compute mode.

    Missing embedding and head are the target's, in the same memory. Tokenizers are not compared
    here (see engine.draft.draft_files). mmap: see reader_for. Raises UnsupportedModelError if
    drafter and target do not fit, ModelFileError, and Cancelled between tensors.
    """
    config = KINDS[file.architecture](file)
    shapes = check_drafter(file, config, target.config)
    ids = read_ids(file, target.config.n_vocab, target.device)
    reader = reader_for(file, mmap, target.device, progress, cancelled)
    with torch.inference_mode():
        parts = _Parts(reader, shapes, target)
        embedding, head = parts.tables(config)
        model = _MAKE[file.architecture](config, parts.weights, embedding, head, ids)
    vocabulary = DraftVocabulary(ids, target.config.n_vocab)
    info = describe_drafter(file, config)
    return LoadedDrafter(config, info, model, vocabulary, parts.n_bytes)


class _Parts:
    """Hands out the tensors of one file and adds up their memory."""

    def __init__(self, reader: TensorReader, shapes: Shapes, target: HybridModel) -> None:
        self._reader, self._shapes, self._target = reader, shapes, target
        self._taken: list[Weights] = []

    @property
    def n_bytes(self) -> int:
        return sum(weights.n_bytes for weights in self._taken)

    def weights(self, prefix: str) -> Weights:
        """The tensors whose names begin with `prefix`, named without it."""
        target = self._target
        self._taken.append(
            Weights(self._reader, self._shapes, target.compute, prefix, target.device)
        )
        return self._taken[-1]

    def tables(self, config: DrafterConfig) -> tuple[Embedding, Projection]:
        """Embedding and head, the file's own where it has them."""
        weights, target = self.weights(""), self._target
        own = "token_embd.weight" in weights
        embedding = weights.table("token_embd.weight") if own else target.embedding
        if "output.weight" in weights or (own and config.ties_head):
            return embedding, weights.head(embedding)
        return embedding, target.projection
