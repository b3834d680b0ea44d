"""Frames of the driver of llama.cpp: what is written is read, and nothing else."""

from __future__ import annotations

import struct
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.compare.llama_api import WireError, read_frame, write_frame

VALUES = st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.binary(max_size=40), max_size=6)


@given(VALUES)
def test_frames_come_back(values: list[int | bytes]) -> None:
    stream = BytesIO()
    write_frame(stream, values)
    write_frame(stream, ["name"])
    stream.seek(0)
    assert read_frame(stream) == values
    assert read_frame(stream) == [b"name"]
    with pytest.raises(EOFError):
        read_frame(stream)


@given(st.binary(max_size=64))
def test_anything_else_is_an_error(raw: bytes) -> None:
    try:
        found = read_frame(BytesIO(struct.pack("<Q", len(raw)) + raw))
    except WireError:
        return
    again = BytesIO()
    write_frame(again, found)
    assert again.getvalue()[8:] == raw


def test_lengths_are_not_believed() -> None:
    with pytest.raises(WireError, match="a frame of"):
        read_frame(BytesIO(struct.pack("<Q", 1 << 60)))
    with pytest.raises(EOFError):
        read_frame(BytesIO(struct.pack("<Q", 1 << 33) + b"few bytes"))
    inner = b"b" + struct.pack("<Q", 1 << 40) + b"x"
    with pytest.raises(WireError, match="bytes in a frame of"):
        read_frame(BytesIO(struct.pack("<Q", len(inner)) + inner))
