"""Threads by the size of a model."""

from __future__ import annotations

import pytest
import torch

from engine import threads
from engine.gguf.file import GgufFile
from engine.model import info
from engine.model.info import describe
from engine.threads import temporary_threads, threads_for, use_threads

NAME = "qwen35-a-f32"


@pytest.fixture
def four(monkeypatch) -> None:
    """A machine on which torch uses four threads."""
    monkeypatch.setattr(threads, "ALL", 4)
    torch.set_num_threads(4)


def test_a_small_model_gets_one_and_a_large_one_all(four, golden_path, monkeypatch):
    with GgufFile.open(golden_path(NAME)) as file:
        model = describe(file)
    assert threads_for(model) == 1
    monkeypatch.setattr(info, "SMALL_MODEL", model.n_params)
    assert threads_for(model) == 4


def test_a_number_that_is_asked_for_counts(four, golden_path):
    with GgufFile.open(golden_path(NAME)) as file:
        model = describe(file)
    use_threads(2, model)
    assert torch.get_num_threads() == 2
    with temporary_threads():
        assert torch.get_num_threads() == 4
    assert torch.get_num_threads() == 2
