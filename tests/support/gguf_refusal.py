"""Opening a bad file: what must hold for every error, and how much it may cost."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from tests.support.counted_calls import counted_calls


@contextmanager
def flat(n_calls: int = 200_000, n_bytes: int = 2**20) -> Iterator[None]:
    """Fails when the block makes many calls or allocates much."""
    gc.disable()
    tracemalloc.start()
    try:
        with counted_calls() as count:
            yield
        assert tracemalloc.get_traced_memory()[1] < n_bytes
        assert count.n < n_calls
    finally:
        tracemalloc.stop()
        gc.enable()


def refusal(path: Path | str) -> ModelFileError:
    """The error that opening a file gives; checked to be one sentence and one remedy."""
    with flat(), pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    error = caught.value
    for sentence in (error.message, error.remedy):
        assert sentence.endswith(".")
        assert sentence.isprintable()
        assert len(sentence) < 400
    place = f"{error.place}: " if error.place else ""
    assert error.message.startswith(f"{error.path.name}: {place}")
    return error


def refusal_of(folder: Path, data: bytes) -> ModelFileError:
    path = folder / "bad.gguf"
    path.write_bytes(data)
    return refusal(path)
