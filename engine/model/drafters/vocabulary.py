"""The ids that a drafter can draft: all of its target's, or some of them."""

from __future__ import annotations

import numpy as np
import torch

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.model.drafters.config import D2T
from engine.model.limits import REMEDY
from kernels.rows import take_rows


class DraftVocabulary:
    """ids: int64 [n_drafted], the target's id of every row of the drafter's head; None where they
    are the same. n_vocab: ids of the target."""

    def __init__(self, ids: torch.Tensor | None, n_vocab: int) -> None:
        self.ids, self.n_vocab = ids, n_vocab

    def of_target(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's ids of rows of the head, int64 of any shape."""
        return rows if self.ids is None else take_rows(self.ids, rows)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., n_drafted] of the head by the target's ids [..., n_vocab], minus infinity
        for the others."""
        if self.ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.n_vocab), -torch.inf)
        return wide.index_copy_(-1, self.ids, logits)


def read_ids(file: GgufFile, n_vocab: int, device: torch.device) -> torch.Tensor | None:
    """The tensor D2T of a file that engine.model.drafters.config has checked: ids 0..n_vocab - 1
    that differ. Raises ModelFileError for others; None without the tensor."""
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
