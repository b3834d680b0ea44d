"""Recordings of CUDA: which stream they use, and that it is given up however one ends."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from engine.machine.graphs import _RecordOnCuda


class _Graph:
    """A recording, which is no good where something happened that none may have."""

    def pool(self):
        return 7

    def replay(self):
        return None


@pytest.fixture
def seen(monkeypatch):
    """What is current, a stream and a device; and recordings, each with stream and pool."""
    current, recordings = {"device": 1, "stream": "usual"}, []

    @contextmanager
    def stream(one):
        before, current["stream"] = current["stream"], one
        try:
            yield
        finally:
            current["stream"] = before

    class Recording:
        def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
            recordings.append((stream, pool, capture_error_mode))

        def __enter__(self):
            self._before, current["stream"] = current["stream"], recordings[-1][0]

        def __exit__(self, kind, *_):
            """As torch's: of one that has become invalid nothing more is done."""
            if kind is not None:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")
            current["stream"] = self._before

    monkeypatch.setattr(torch.cuda, "Stream", lambda: f"of device {current['device']}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    return current, recordings


def test_a_recording_of_each_memory_has_the_stream_of_its_device(seen):
    current, recordings = seen
    record, x = _RecordOnCuda(), torch.ones(1)
    for _ in range(2):
        assert record(lambda: (x,))[0] == (x,)
    current["device"] = 0
    _RecordOnCuda()(lambda: (x,))
    first, second, other = recordings
    assert first == ("of device 1", None, "relaxed") and second == ("of device 1", 7, "relaxed")
    assert other[0] == "of device 0" and current["stream"] == "usual"


def test_a_recording_that_fails_leaves_the_stream_as_it_was(seen):
    current, _ = seen

    def fail():
        assert current["stream"] == "of device 1"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        _RecordOnCuda()(fail)
    assert current["stream"] == "usual"
