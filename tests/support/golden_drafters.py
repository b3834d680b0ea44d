"""The golden drafters: files and arrays, which lie next to the tree; the smallest are in it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from engine.model.drafters.loading import DraftVocabulary
from tests.support.golden_files import DATA

BESIDE = DATA.parents[2] / "shared" / "golden-draft"
TARGETS = {
    "eagle3-a-shared": "qwen35-c-v2x-mtp-f32",
    "eagle3-b-d2t-norms": "qwen3-f-f32",
    "eagle3-c-lastlayer": "qwen35-c-v2x-mtp-f32",
    "dflash-a-mrope": "qwen35-c-v2x-mtp-f32",
    "dflash-b-swa-d2t": "qwen3-f-f32",
    "dflash2-a": "qwen35-c-v2x-mtp-f32",
    "dspark-a-anchor": "qwen35-c-v2x-mtp-f32",
    "dspark-b-bonus-d2t": "qwen3-f-f32",
}


def spread(vocabulary: DraftVocabulary, logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n_drafted] of a head by the target's ids, minus infinity for the others."""
    if vocabulary.ids is None:
        return logits
    wide = logits.new_full((*logits.shape[:-1], vocabulary.n_vocab), -torch.inf)
    return wide.index_copy_(-1, vocabulary.ids, logits)


def drafter_file(name: str) -> Path:
    """A drafter `NAME.gguf`, or its arrays `NAME.npz`."""
    inside = DATA / "drafters" / name
    return inside if inside.exists() else BESIDE / name


def drafters(prefix: str) -> list[str]:
    """Names of the golden drafters of a kind that can be found."""
    return [name for name in TARGETS if name.startswith(prefix) and there(name)]


def there(name: str) -> bool:
    return drafter_file(f"{name}.gguf").exists() and drafter_file(f"{name}.npz").exists()


@cache
def golden_drafter(name: str) -> dict[str, np.ndarray]:
    with np.load(drafter_file(f"{name}.npz")) as data:
        return dict(data)
