"""The first wrong operation between two builds that answer from a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from engine.compare.llama_api import TRANSCRIPTS, ApiCall, Transcript, Value, read_transcript
from engine.compare.llama_cpp import NODE
from engine.compare.llama_process import graph_nodes
from engine.errors import PeerLibraryError
from engine.experiments.bisect import first_wrong
from engine.experiments.bisect.first_wrong import FirstWrong, find_first_wrong

GOOD, BAD = Path("good"), Path("bad")
Nodes = dict[str, float]
"""The first value of each node of a decode, by operation and name."""


def graph(nodes: Nodes) -> list[Value]:
    """A reply to a traced decode."""
    table, values = np.zeros(len(nodes), NODE), []
    for row, (key, first) in zip(table, nodes.items(), strict=True):
        row["op"], row["name"] = key.split(" ", 1)
        row["ne"], row["n_values"], row["stride"] = (4, 1, 1, 1), 4, 1
        values += [first, 1.0, -2.0, np.nan]
    return [0, b"", table.tobytes(), np.array(values, "<f4").tobytes()]


class Build:
    """In place of a process. replies: of one build to commands, by their number."""

    replies: ClassVar[dict[Path, Callable[[int, ApiCall], list[Value]]]] = {}

    def __init__(self, model: Path, build: Path, opened: ApiCall, folder: Path) -> None:
        assert opened.name == "open_model"
        self._reply, self._n = self.replies[build], 0

    def answer(self, asked: ApiCall) -> list[Value]:
        self._n += 1
        return self._reply(self._n, asked)

    def close(self) -> None: ...


def decode(pos0: int, n: int) -> list[Value | str]:
    arrays = np.arange(n, dtype="<i4"), np.arange(pos0, pos0 + n, dtype="<i4"), np.zeros(n, "<i4")
    return [0, *(one.tobytes() for one in arrays), np.ones(n, "i1").tobytes(), 0]


def judge(build: Path, checks: Collection[str]) -> dict[str, tuple[str, str]]:
    """What a judge has a process write: a prompt, a draft, its undoing, and a last batch."""
    written = Transcript(Path(os.environ[TRANSCRIPTS]))
    written.add("open_model", ["m.gguf", 0, "", 0], [0, 8, 2, 9])
    written.add("open_context", [0] * 14, [0, 3, 8])
    for name, values in (
        ("decode", decode(0, 6)),
        ("decode", decode(6, 3)),
        ("seq_rm", [0, 0, 7, -1]),
        ("decode", decode(7, 2)),
    ):
        written.add(name, values, [0])
    written.close()
    return {}


PLAIN: Nodes = {"GET_ROWS cache_s_l0 (view)": 1.0, "VIEW v-1": 2.0, "MUL_MAT ffn_out-1": 3.0}


def found(
    monkeypatch: pytest.MonkeyPatch, bad: Callable[[int, ApiCall], list[Value]]
) -> FirstWrong | None:
    """With a good build of PLAIN graphs; the third decode is command 5."""
    monkeypatch.setattr(first_wrong, "_Replay", Build)
    replies = {GOOD: lambda n, asked: graph(PLAIN) if asked.name == "decode" else [1], BAD: bad}
    monkeypatch.setattr(Build, "replies", replies)
    return find_first_wrong(judge, Path("m.gguf"), [], GOOD, BAD)


def test_the_first_node_beyond_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(n: int, asked: ApiCall) -> list[Value]:
        if asked.name != "decode":
            return [1]
        moved = {"VIEW v-1": 9.0, "MUL_MAT ffn_out-1": 3.5} if n == 5 else {}
        noise = {"GET_ROWS cache_s_l0 (view)": 1.0 + 1e-5}
        return graph(PLAIN | noise | moved | {"ADD only_here-0": 4.0})

    first = found(monkeypatch, bad)
    assert first is not None
    assert (first.layer, first.op, first.node) == (1, "MUL_MAT", "ffn_out-1")
    assert first.error == pytest.approx(0.5 / 14**0.5, rel=1e-6)
    assert first.noise == pytest.approx(1e-5 / 6**0.5, rel=0.05)
    assert first.where == (
        "context 0, positions 7 to 8 of sequence 0, decode 3 after seq_rm(0, 0, 7, -1)"
    )
    assert "layer 1, MUL_MAT 'ffn_out-1', relative error 1.3e-01" in first.text


def test_a_node_without_a_name_is_of_the_layer_around_it() -> None:
    names = ("inp", "norm-0", "node_3", "out-0", "node_5", "norm-1", "node_7", "out-1", "result")
    table, values = np.zeros(len(names), NODE), np.zeros(0, "<f4")
    for row, name in zip(table, names, strict=True):
        row["name"], row["ne"] = name, (0, 1, 1, 1)
    found = first_wrong._layers(graph_nodes(table.tobytes(), values.tobytes()))
    assert found == [None, 0, 0, 0, None, 1, 1, 1, None]


def test_other_replies_ends_and_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(n: int, asked: ApiCall) -> list[Value]:
        return graph(PLAIN) if asked.name == "decode" else [1]

    def refuses(n: int, asked: ApiCall) -> list[Value]:
        return [0] if asked.name == "seq_rm" else same(n, asked)

    def ends(n: int, asked: ApiCall) -> list[Value]:
        if n == 5:
            raise PeerLibraryError("The llama.cpp library ended its process.", "Look.")
        return same(n, asked)

    def not_finite(n: int, asked: ApiCall) -> list[Value]:
        return graph(PLAIN | {"MUL_MAT ffn_out-1": np.nan}) if n == 5 else same(n, asked)

    def at_once(n: int, asked: ApiCall) -> list[Value]:
        return graph(PLAIN | {"MUL_MAT ffn_out-1": 4.0}) if n == 2 else same(n, asked)

    def refuses_and_moves(n: int, asked: ApiCall) -> list[Value]:
        moved = graph(PLAIN | {"MUL_MAT ffn_out-1": 3.5})
        return moved if n == 5 else refuses(n, asked)

    after = found(monkeypatch, refuses_and_moves)
    assert after is not None and (after.op, after.layer) == ("MUL_MAT", 1)
    assert "before it the reply of seq_rm differs" in after.where
    assert found(monkeypatch, same) is None
    outcomes = [found(monkeypatch, bad) for bad in (refuses, ends, not_finite, at_once)]
    assert [one and (one.op, one.layer, one.error) for one in outcomes[:3]] == [
        ("the reply of seq_rm", None, np.inf),
        ("decode", None, np.inf),
        ("MUL_MAT", 1, np.inf),
    ]
    assert outcomes[1] is not None and "ended its process" in outcomes[1].where
    assert outcomes[3] is not None and outcomes[3].where.endswith("decode 1")
    assert found(monkeypatch, lambda n, asked: same(n, asked)) is None


def test_a_transcript_names_the_blobs_of_the_library(tmp_path: Path) -> None:
    written = Transcript(tmp_path)
    written.add("save", [0, 1, 0], [b"state"])
    written.add("save", [0, 1, 0], [b"later"])
    written.add("load", [0, 1, b"state", 0], [])
    written.add("load", [0, 1, b"foreign", 0], [])
    written.close()
    [path] = tmp_path.iterdir()
    asked = read_transcript(path)
    assert [one.saved for one in asked] == [(), (), (2,), ()]
    assert asked[2].values == [0, 1, 0, 0] and asked[3].values == [0, 1, b"foreign", 0]
    path.write_bytes(path.read_bytes()[:-3])
    assert len(read_transcript(path)) == 3
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(PeerLibraryError, match="is not a transcript"):
        read_transcript(path)
