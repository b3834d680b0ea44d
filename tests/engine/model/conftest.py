"""Golden models, loaded once, and altered copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from tests.support.golden_files import golden_file
from tests.support.rewrite_gguf import rewrite


@cache
def _golden(name: str) -> HybridModel:
    with GgufFile.open(golden_file(f"{name}.gguf")) as file:
        return load_model(file)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], HybridModel]:
    """A golden model by name, in f32."""
    return _golden


@pytest.fixture(scope="session")
def reference() -> Callable[[str], dict[str, np.ndarray]]:
    """The golden arrays of a model by name."""

    @cache
    def read(name: str) -> dict[str, np.ndarray]:
        with np.load(golden_file(f"{name}.npz")) as arrays:
            return dict(arrays)

    return read


@pytest.fixture
def golden_path() -> Callable[[str], Path]:
    """The file of a golden model."""
    return lambda name: golden_file(f"{name}.gguf")


@pytest.fixture
def variant(tmp_path: Path) -> Callable[..., Path]:
    """Write an altered copy of a golden model; arguments as in tests.support.rewrite_gguf."""

    def write(
        name: str,
        keys: dict[str, Any] | None = None,
        edit: Any = None,
        quantise: Any = None,
        to: str = "variant",
    ) -> Path:
        target = tmp_path / f"{name}-{to}.gguf"
        return rewrite(golden_file(f"{name}.gguf"), target, keys, edit, quantise)

    return write


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
