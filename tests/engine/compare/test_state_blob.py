"""States of llama.cpp, from bytes built by hand, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.compare.peer_lane import StateHistory
from engine.compare.state_blob import decode_state, relative_errors, state_difference
from engine.errors import StateBlobError
from engine.memory.recurrent import RecurrentCheckpoint
from engine.model.recurrence import ConvWindow, RecurrentLayout, StateKey, TokenWindow
from engine.model.recurrent_states import DeltaState, SsdState

LAYOUT = RecurrentLayout.alike(
    (0, 2), state=DeltaState(2, 2, 3, grouped=True), window=ConvWindow(4, 5)
)
R = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
S = -np.arange(2 * 2 * 3 * 3, dtype=np.float32).reshape(2, 2, 3, 3)


P = 100 + np.arange(2 * 6, dtype=np.float32).reshape(6, 2)


def blob(
    pos: int = 7, *, n_cells: int = 1, n_layers: int = 4, kind: int = 0, has_ngrams: bool = False
) -> bytes:
    """llama_memory_recurrent::state_write of one sequence: R of all layers, then S."""
    parts = [struct.pack("<IiI", 0xAF143CD8, 0, n_cells)]
    if n_cells:
        parts.append(struct.pack("<iI", pos, 0))
    parts.append(struct.pack("<II", 0, n_layers))
    for rows in (R, S):
        for layer, row in enumerate(rows):
            parts.append(struct.pack("<iQ", kind, row.nbytes))
            parts.append(row.tobytes() if n_cells else b"")
            if has_ngrams and rows is R and layer == 1:
                parts += [struct.pack("<Q", P.nbytes), P.tobytes()]
    return b"".join(parts)


def test_rows_are_the_transposes_of_ours() -> None:
    state = decode_state(blob(), LAYOUT, 4)
    assert state.pos == 7
    for i, layer in enumerate(LAYOUT.layers):
        r, s = (state.states[StateKey(layer, name)] for name in ("window", "state"))
        assert r.shape == (3, 5) and s.shape == (2, 3, 3)
        for channel in range(5):
            # time fastest, oldest first
            assert r[:, channel].tolist() == R[i, channel].tolist()
        assert s[1, 2, 1] == S[i, 1, 1, 2]


def test_states_of_mamba_2_lie_as_ours_do() -> None:
    ours = RecurrentLayout.alike((0, 2), state=SsdState(2, 3, 1, 3), window=ConvWindow(4, 5))
    state = decode_state(blob(), ours, 4)
    for i, layer in enumerate(ours.layers):
        assert np.array_equal(state.states[StateKey(layer, "state")], S[i])


def test_a_window_of_n_grams_follows_that_of_its_layer() -> None:
    """Without a type of its own; the newest tokens are not in the blob."""
    ngrams = {StateKey(2, "tokens"): TokenWindow(3), StateKey(2, "ngrams"): ConvWindow(3, 6)}
    layout = RecurrentLayout(LAYOUT.states | ngrams)
    state = decode_state(blob(has_ngrams=True), layout, 4)
    assert state.states[StateKey(2, "ngrams")].tolist() == P.T.tolist()
    assert StateKey(2, "tokens") not in state.states
    apart = state_difference(layout, state, state, 0)
    assert apart is not None and apart.conv == apart.state == [0.0, 0.0]
    with pytest.raises(StateBlobError, match="of type 48 in layer 0"):
        decode_state(blob(has_ngrams=True), LAYOUT, 4)


def test_a_short_convolution_has_a_window_and_an_empty_state() -> None:
    layout = RecurrentLayout.alike((1,), window=ConvWindow(4, 5))
    raw = struct.pack("<IiIiIII", 0xAF143CD8, 0, 1, 7, 0, 0, 4)
    raw += struct.pack("<iQ", 0, R[0].nbytes) + R[0].tobytes() + struct.pack("<iQ", 0, 0)
    state = decode_state(raw, layout, 4)
    assert list(state.states) == [StateKey(1, "window")]
    history = StateHistory(3)
    history.add(state)
    assert history.position_of(state) == 7
    apart = state_difference(layout, state, state, 0)
    assert apart is not None and apart.conv == [0.0] and np.isnan(apart.state).all()


def test_an_empty_sequence_has_no_states() -> None:
    state = decode_state(blob(n_cells=0), LAYOUT, 4)
    assert (state.pos, state.states) == (-1, {})
    assert StateHistory(3).position_of(state) is None
    assert state_difference(LAYOUT, state, state, 0) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"GGUF" + blob()[4:], "begins with 0x46554747"),
        (blob(n_layers=5), "of 5 layers and not of 4"),
        (blob(kind=1), "of type 1 in layer 0"),
        (blob(pos=-2), "at position -2"),
        (blob() + b"\0", "1 bytes after"),
        (blob()[:-1], "ends after"),
        (blob()[:8] + struct.pack("<I", 2) + blob()[12:], "holds 2 cells"),
        (b"", "ends after 0 bytes"),
    ],
)
def test_what_is_no_state_of_this_model_is_refused(wrong: bytes, says: str) -> None:
    with pytest.raises(StateBlobError, match=says):
        decode_state(wrong, LAYOUT, 4)


@given(st.integers(0, len(blob()) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read(at: int, value: int) -> None:
    damaged = bytearray(blob())
    damaged[at] = value
    try:
        state = decode_state(bytes(damaged), LAYOUT, 4)
    except StateBlobError:
        return
    assert state.states.keys() in (LAYOUT.states.keys(), set())


def test_errors_are_relative_to_the_first() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    x, y, z = (StateKey(i, "state") for i in range(3))
    zero = torch.zeros(2)
    found = relative_errors({x: a, y: a, z: zero}, {x: b, y: a, z: zero})
    assert found == {x: 0.1, y: 0.0, z: 0.0}


def test_a_position_is_told_by_the_nearest_state_and_none_between_two() -> None:
    def scaled(pos: int, state: float, window: float) -> RecurrentCheckpoint:
        one = decode_state(blob(pos), LAYOUT, 4)
        by = {"state": state, "window": window}
        return RecurrentCheckpoint(pos, {k: row * by[k.name] for k, row in one.states.items()})

    history = StateHistory(2)
    for pos in (5, 6, 7):
        history.add(scaled(pos, pos, pos))
    assert history.positions_of(scaled(9, 6.01, 7)) == {"state": 6, "window": 7}
    assert history.positions_of(scaled(9, 6.5, 7)) == {"state": None, "window": 7}  # between two
    assert history.positions_of(scaled(9, 5, 7)) == {"state": None, "window": 7}  # forgotten
    assert history.position_of(scaled(9, 6.01, 7)) == 6
    assert history.position_of(scaled(9, 6.5, 7)) is None
