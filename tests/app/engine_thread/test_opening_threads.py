"""The window gives a model the threads that the command line gives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.engine_thread.events import OpenRequest
from app.engine_thread.opening import open_engine
from engine import threads
from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.model import info
from engine.model.info import describe

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(autouse=True)
def _four(monkeypatch) -> Iterator[None]:
    """A machine on which torch uses four threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "ALL", 4)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def opened(path) -> int:
    """Threads in use once the window has opened a file."""
    open_engine(OpenRequest(path, (), "f32"), lambda *_: None)
    return torch.get_num_threads()


def test_the_window_asks_the_same_rule_for_every_model(monkeypatch):
    small, large = DATA / "qwen35-c-v2x-mtp-f32.gguf", DATA / "qwen3-f-f32.gguf"
    sizes = {}
    for path in (small, large):
        with GgufFile.open(path) as file:
            sizes[path] = describe(file).n_params
    small, large = sorted(sizes, key=sizes.__getitem__)
    assert sizes[small] < sizes[large]
    monkeypatch.setattr(info, "SMALL_MODEL", sizes[large])
    assert [opened(path) for path in (small, large, small)] == [1, 4, 1]


def test_a_model_that_cannot_be_opened_changes_nothing(tmp_path):
    torch.set_num_threads(3)
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelFileError):
        opened(tmp_path / "no.gguf")
    assert torch.get_num_threads() == 3
