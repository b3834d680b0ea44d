"""Saved sequences come back bit by bit; a file that is not one is refused, whatever it holds."""

from __future__ import annotations

import json
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TraceFileError
from engine.memory import state_file
from engine.memory.kv import AttentionKV, AttentionState
from engine.memory.recurrent import RecurrentCheckpoint
from engine.memory.state_file import SequenceCheckpoint, load_state, save_state
from engine.model.parts import CellSize
from engine.model.recurrence import StateKey

FRAME = struct.Struct("<8sII")


def state_of(n_cells: int, *, recurrent: bool = True, n_attention: int = 1) -> SequenceCheckpoint:
    generator = torch.Generator().manual_seed(n_cells)

    def layers(n: int, *shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape, generator=generator) for _ in range(n))

    positions = torch.arange(n_cells) + 3
    k = (*layers(n_attention, n_cells, 2, 4), *layers(n_attention, n_cells, 1, 5))
    v = layers(n_attention, n_cells, 2, 3)
    keys = [StateKey(layer, name) for name in ("state", "window") for layer in (0, 1, 4)]
    tensors = (*layers(3, 4, 8, 8), *layers(3, 3, 6))
    past = RecurrentCheckpoint(n_cells + 2, dict(zip(keys, tensors, strict=True)))
    cells = AttentionState(positions, k, v)
    return SequenceCheckpoint(n_cells + 2, past if recurrent else None, cells)


def assert_same(got: SequenceCheckpoint, want: SequenceCheckpoint) -> None:
    assert torch.equal(got.attention.positions, want.attention.positions)
    assert (got.recurrent is None) == (want.recurrent is None)
    pairs = [(got.attention.k, want.attention.k), (got.attention.v, want.attention.v)]
    if got.recurrent and want.recurrent:
        assert got.recurrent.pos == want.recurrent.pos
        assert list(got.recurrent.states) == list(want.recurrent.states)
        ours, theirs = (state.recurrent.states.values() for state in (got, want))
        pairs.append((tuple(ours), tuple(theirs)))
    for ours, theirs in pairs:
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n_cells", [0, 1, 7])
@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("n_attention", [0, 1])
def test_what_is_saved_is_loaded(tmp_path, n_cells, recurrent, n_attention):
    state = state_of(n_cells, recurrent=recurrent, n_attention=n_attention)
    save_state(tmp_path / "a.seq", state)
    loaded = load_state(tmp_path / "a.seq")
    assert_same(loaded, state)
    loaded.attention.positions.add_(1)  # its own memory, writable


def test_layout(tmp_path):
    """Read with nothing but struct and json: the format, not the reader, is what counts."""
    state = state_of(2)
    assert state.recurrent
    save_state(tmp_path / "a.seq", state)
    data = (tmp_path / "a.seq").read_bytes()
    magic, version, size = FRAME.unpack_from(data)
    assert (magic, version) == (b"DSSEQ\r\n\x1a", 3)
    header = json.loads(data[16 : 16 + size])
    assert header == {
        "n_cells": 2,
        "pos": 4,
        "keys": [[2, 4], [1, 5]],
        "values": [[2, 3]],
        "states": [["state", [4, 8, 8], [0, 1, 4]], ["window", [3, 6], [0, 1, 4]]],
    }
    body = data[16 + size : -4]
    assert struct.unpack_from("<2q", body) == (3, 4)
    floats = torch.tensor(struct.unpack(f"<{len(body) // 4 - 4}f", body[16:]))
    past = state.recurrent
    tensors = (*state.attention.k, *state.attention.v, *past.states.values())
    assert torch.equal(floats, torch.cat([t.flatten() for t in tensors]))
    assert struct.unpack("<I", data[-4:]) == (zlib.crc32(data[:-4]),)


def test_from_one_memory_to_another(tmp_path):
    """Out of a pool with holes, made in inference mode, into streams of a dirty memory."""
    layers = {1: CellSize(2, 4, 3), 3: CellSize(1, 5, 0)}
    source = AttentionKV(layers, 2, 16, torch.device("cpu"), unified=True)
    target = AttentionKV(layers, 2, 16, torch.device("cpu"))
    with torch.inference_mode():
        source.put(0, state_of(4).attention)
        source.put(1, state_of(5).attention)
        source.seq_rm(0, 4, 6)
        source.put(0, state_of(6).attention)
        saved = SequenceCheckpoint(7, None, source.state(0))
    save_state(tmp_path / "a.seq", saved)
    target.put(1, state_of(9).attention)
    target.put(1, load_state(tmp_path / "a.seq").attention)
    assert_same(SequenceCheckpoint(8, None, target.state(1)), state_of(6, recurrent=False))
    assert target.used(1) == 6 and target.used(0) == 0


def test_saving_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.seq"
    save_state(path, state_of(3))
    save_state(path, state_of(2))
    before = path.read_bytes()

    def disk_full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.zlib, "crc32", disk_full)
    with pytest.raises(TraceFileError, match="No space left"):
        save_state(path, state_of(5))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be(tmp_path):
    with pytest.raises(TraceFileError, match="cannot be written"):
        save_state(tmp_path / "missing" / "a.seq", state_of(1))
    with pytest.raises(TraceFileError, match="cannot be read"):
        load_state(tmp_path / "a.seq")
    with pytest.raises(TraceFileError, match="not a regular file"):
        load_state(tmp_path)


def rebuilt(tmp_path, header: object, body: bytes | None = None, *, crc: int | None = None):
    """A file with this header, and a checksum that is right unless given."""
    path = tmp_path / "b.seq"
    save_state(path, state_of(2))
    data = path.read_bytes()
    old = FRAME.unpack_from(data)[2]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = FRAME.pack(b"DSSEQ\r\n\x1a", 3, len(text)) + text + (body or data[16 + old : -4])
    path.write_bytes(data + struct.pack("<I", zlib.crc32(data) if crc is None else crc))
    return path


GOOD = {
    "n_cells": 2,
    "pos": 4,
    "keys": [[2, 4], [1, 5]],
    "values": [[2, 3]],
    "states": [["state", [4, 8, 8], [0, 1, 4]], ["window", [3, 6], [0, 1, 4]]],
}


def test_a_rebuilt_file_is_good(tmp_path):
    assert_same(load_state(rebuilt(tmp_path, GOOD)), state_of(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_cells": 3}, "does not have the size in its header"),
        ({"n_cells": 2**31}, "does not have the size in its header"),
        ({"n_cells": 2**31 + 1}, "is wrong"),
        ({"n_cells": -1}, "is wrong"),
        ({"n_cells": True}, "is wrong"),
        ({"n_cells": 2.0}, "is wrong"),
        ({"keys": [[2**31, 2**31]]}, "does not have the size in its header"),
        ({"values": []}, "does not have the size in its header"),
        ({"keys": [[8]]}, "is wrong"),
        ({"values": ["2,4"]}, "is wrong"),
        ({"values": 2}, "is wrong"),
        ({"states": [["state", [2] * 5, [0]]]}, "is wrong"),
        ({"states": [["state", [18, None], [0]]]}, "is wrong"),
        ({"states": [["state", [4, 8, 8], [0, 0]]]}, "names a state twice"),
        ({"states": [["state", [4, 8, 8], []]]}, "is wrong"),
        ({"states": [["state", [4, 8, 8]]]}, "is wrong"),
        ({"states": [[7, [4, 8, 8], [0]]]}, "is wrong"),
        ({"states": [["state", [0], [0]]] * 17}, "is wrong"),
        ({"keys": [[0, 0]] * 4097}, "is wrong"),
        ({"states": [["state", [0, 0, 0], [2**31]]]}, "is wrong"),
        ({"states": [["state", [2**31] * 4, [0]]]}, "does not have the size in its header"),
        ({"pos": None}, "no position"),
        ({"pos": -2}, "is wrong"),
        ({"pos": "4"}, "is wrong"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_headers_that_lie(tmp_path, change, message):
    with pytest.raises(TraceFileError, match=message):
        load_state(rebuilt(tmp_path, GOOD | change))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "JSON"),
        (b"[" * 4000, "JSON"),
        (b"\xff", "JSON"),
        (b"[]", "is wrong"),
        (b" " * 70000, "70000 bytes"),
        (b'{"n_cells": ' + b"9" * 3000 + b"}", "is wrong"),
    ],
)
def test_headers_that_are_none(tmp_path, header, message):
    with pytest.raises(TraceFileError, match=message):
        load_state(rebuilt(tmp_path, header))


def test_contents_that_cannot_be(tmp_path):
    path = rebuilt(tmp_path, GOOD)
    body = path.read_bytes()[16 + len(json.dumps(GOOD)) : -4]
    for positions in ((4, 3), (-1, 3), (0, 2**31)):
        with pytest.raises(TraceFileError, match="positions"):
            load_state(rebuilt(tmp_path, GOOD, struct.pack("<2q", *positions) + body[16:]))
    for number in (float("nan"), float("inf")):
        with pytest.raises(TraceFileError, match="not finite"):
            load_state(rebuilt(tmp_path, GOOD, body[:-4] + struct.pack("<f", number)))
    with pytest.raises(TraceFileError, match="checksum"):
        load_state(rebuilt(tmp_path, GOOD, crc=0))
    with pytest.raises(TraceFileError, match="size"):
        load_state(rebuilt(tmp_path, GOOD, body + b"\0"))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "cut short"),
        (b"DSSEQ", "cut short"),
        (b"GGUF" * 4, "not a saved sequence"),
        (FRAME.pack(b"DSSEQ\r\n\x1a", 2, 0), "version 2"),
        (FRAME.pack(b"DSSEQ\r\n\x1a", 3, 9), "cut short"),
    ],
)
def test_other_files(tmp_path, start, message):
    (tmp_path / "a.seq").write_bytes(start)
    with pytest.raises(TraceFileError, match=message):
        load_state(tmp_path / "a.seq")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_found(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "a.seq"
    save_state(path, state_of(2))
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[where] ^= data.draw(st.integers(1, 255))
    else:
        del content[where:]
    path.write_bytes(content)
    with pytest.raises(TraceFileError):
        load_state(path)
