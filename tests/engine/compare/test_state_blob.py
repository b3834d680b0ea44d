"""States of llama.cpp, from bytes built by hand, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.compare.state_blob import StateShape, decode_state, relative_errors
from engine.compare.state_history import StateHistory
from engine.errors import StateBlobError

SHAPE = StateShape(layers=(0, 2), n_heads=2, d_value=3, d_key=4, n_channels=5, window=3)
R = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
S = -np.arange(2 * 2 * 3 * 4, dtype=np.float32).reshape(2, 2, 3, 4)


def blob(pos: int = 7, *, n_cells: int = 1, n_layers: int = 4, kind: int = 0) -> bytes:
    """llama_memory_recurrent::state_write of one sequence: R of all layers, then S."""
    parts = [struct.pack("<IiI", 0xAF143CD8, 0, n_cells)]
    if n_cells:
        parts.append(struct.pack("<iI", pos, 0))
    parts.append(struct.pack("<II", 0, n_layers))
    for rows in (R, S):
        for row in rows:
            parts.append(struct.pack("<iQ", kind, row.nbytes))
            parts.append(row.tobytes() if n_cells else b"")
    return b"".join(parts)


def test_rows_are_the_transposes_of_ours() -> None:
    state = decode_state(blob(), SHAPE, 4)
    assert state.pos == 7
    for layer in range(2):
        assert state.r[layer].shape == (3, 5) and state.s[layer].shape == (2, 4, 3)
        for channel in range(5):
            # time fastest, oldest first
            assert state.r[layer][:, channel].tolist() == R[layer, channel].tolist()
        assert state.s[layer][1, 3, 2] == S[layer, 1, 2, 3]


def test_an_empty_sequence_has_no_arrays() -> None:
    state = decode_state(blob(n_cells=0), SHAPE, 4)
    assert (state.pos, state.s, state.r) == (-1, (), ())
    assert StateHistory(3).positions_of(state) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"GGUF" + blob()[4:], "begins with 0x46554747"),
        (blob(n_layers=5), "of 5 layers and not of 4"),
        (blob(kind=1), "of type 1 for R of layer 0"),
        (blob(pos=-2), "at position -2"),
        (blob() + b"\0", "1 bytes behind"),
        (blob()[:-1], "ends after"),
        (blob()[:8] + struct.pack("<I", 2) + blob()[12:], "holds 2 cells"),
        (b"", "ends after 0 bytes"),
    ],
)
def test_what_is_no_state_of_this_model_is_refused(wrong: bytes, says: str) -> None:
    with pytest.raises(StateBlobError, match=says):
        decode_state(wrong, SHAPE, 4)


@given(st.integers(0, len(blob()) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read(at: int, value: int) -> None:
    damaged = bytearray(blob())
    damaged[at] = value
    try:
        state = decode_state(bytes(damaged), SHAPE, 4)
    except StateBlobError:
        return
    assert [row.shape for row in state.s] in ([(2, 4, 3)] * 2, [])


def test_errors_are_relative_to_the_first() -> None:
    a, b = np.array([3.0, 4.0], np.float32), np.array([3.0, 4.5], np.float32)
    zero = np.zeros(2, np.float32)
    assert relative_errors([a, a, zero], [b, a, zero]) == [0.1, 0.0, 0.0]


def test_a_position_is_told_by_the_nearest_state_and_none_between_two() -> None:
    history = StateHistory(2)
    for pos in (5, 6, 7):
        state = decode_state(blob(pos), SHAPE, 4)
        history.add(type(state)(pos, (state.s[0] * pos,), (state.r[0] * pos,)))
    one = decode_state(blob(), SHAPE, 4)

    def at(scale: float) -> tuple[int | None, int | None]:
        return history.positions_of(type(one)(9, (one.s[0] * scale,), (one.r[0] * 7,)))

    assert at(6.01) == (6, 7)
    assert at(6.5) == (None, 7)  # between two
    assert at(5.0) == (None, 7)  # forgotten
