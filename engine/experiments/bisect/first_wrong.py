"""The first wrong operation: the judge's requests to a good build are repeated on both builds, and
the nodes of their graphs are compared in order of computation.

Their difference before any rollback is the noise; the first node that differs ten times as much is
the first wrong one. If a reply differs, such as that of a removal or of a saved state, the first
wrong node after it is reported with it; without one, the reply itself, or the end of the process.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from engine.compare.llama_api import TRANSCRIPTS, ApiCall, CommandError, Value, read_transcript
from engine.compare.llama_process import GraphNode, LlamaProcess, graph_nodes
from engine.errors import DraftscopeError, PeerLibraryError
from engine.experiments.bisect.builds import Judge, SkippedError
from engine.options.llama_cpp import LlamaSettings

_UNDOES = ("seq_rm", "load", "load_file", "seq_cp", "seq_keep")
_MARGIN, _LEAST, _MOST = 10.0, 1e-6, 1e-3
"""Required multiple of the noise; smallest and largest relative error used as threshold."""
_MOST_VALUES = 4096
_VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE")
_LAYER = re.compile(r"(?:-|_l)(\d+)\b")
_OPEN_MODEL, _OPEN_CONTEXT, _DECODE = "open_model", "open_context", "decode"


class FirstWrong(msgspec.Struct):
    """Where a bad build departs from a good one. layer: None outside of layers. op: of ggml, or the
    command with a different reply; node: its name in the graph. error: relative, infinite for other
    shapes, other replies and an end; noise: the same before any rollback. where: the batch, and the
    preceding rollback."""

    layer: int | None
    op: str
    node: str
    error: float
    noise: float
    where: str

    @property
    def text(self) -> str:
        """As one line."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        node = f" {self.node!r}" if self.node else ""
        error = f", relative error {self.error:.1e}" if np.isfinite(self.error) else ""
        return f"{layer}{self.op}{node}{error} (noise {self.noise:.1e}), {self.where}"


def find_first_wrong(
    judge: Judge,
    model: Path,
    checks: Collection[str],
    good: Path,
    bad: Path,
    limit_s: float = 600.0,
) -> FirstWrong | None:
    """The first wrong operation of a bad build; None if there is none, or none was found in limit_s
    seconds. judge, checks: supply the requests, as sent to the good build."""
    until = time.monotonic() + limit_s
    reply: FirstWrong | None = None
    with tempfile.TemporaryDirectory(prefix="draftscope-") as folder:
        os.environ[TRANSCRIPTS] = folder
        try:
            judge(good, checks)
        except SkippedError:
            return None
        finally:
            del os.environ[TRANSCRIPTS]
        for path in sorted(Path(folder).iterdir(), key=lambda one: one.stat().st_mtime_ns):
            try:
                found = _compared(read_transcript(path), model, (good, bad), until)
            except (DraftscopeError, CommandError):  # the good build does not reproduce it
                continue
            if found is not None and found.node:
                return found
            reply = reply or found  # another process may have read what it wrote
    return reply


class _Replay(LlamaProcess):
    """A build that repeats a transcript, with every decode traced."""

    def __init__(self, model: Path, build: Path, opened: ApiCall, folder: Path) -> None:
        self._folder, self._blobs = folder, list[Value]()
        _, n_gpu_layers, devices, with_mtp = opened.values
        assert isinstance(n_gpu_layers, int)
        assert isinstance(devices, bytes)
        settings = LlamaSettings(
            n_gpu_layers=n_gpu_layers, devices=devices.decode(), load_mtp=bool(with_mtp)
        )
        super().__init__(model, build, settings)

    def answer(self, asked: ApiCall) -> list[Value]:
        """The reply, including refusals. Raises PeerLibraryError once it has ended."""
        values = list(asked.values)
        for place in asked.saved:
            number = values[place]
            assert isinstance(number, int)
            values[place] = self._blobs[number]
        if asked.name == _OPEN_CONTEXT:
            values[-1] = 1
        elif asked.name == _DECODE:
            values[-1] = _MOST_VALUES
        elif asked.name in ("save_file", "load_file") and isinstance(values[2], bytes):
            values[2] = str(self._folder / Path(values[2].decode()).name).encode()
        try:
            reply = self._call(asked.name, *values)
        except CommandError as error:
            return [error.kind.encode()]
        if asked.name == "save":
            self._blobs.append(reply[0])
        return reply


def _compared(
    asked: Sequence[ApiCall], model: Path, builds: tuple[Path, Path], until: float
) -> FirstWrong | None:
    if not asked or asked[0].name != _OPEN_MODEL or not any(a.name == _DECODE for a in asked):
        return None
    noise, undone, n_decoded = 0.0, "", 0
    reply: FirstWrong | None = None
    with (
        tempfile.TemporaryDirectory(prefix="draftscope-") as mine,
        tempfile.TemporaryDirectory(prefix="draftscope-") as theirs,
        closing(_Replay(model, builds[0], asked[0], Path(mine))) as good,
        closing(_Replay(model, builds[1], asked[0], Path(theirs))) as bad,
    ):
        for one in asked[1:]:
            if time.monotonic() > until:
                break
            n_decoded += one.name == _DECODE
            where = f"{_words(one)}, decode {n_decoded}" + (f" after {undone}" if undone else "")
            expected = good.answer(one)
            try:
                found = bad.answer(one)
            except PeerLibraryError as ended:
                where = f"{where}: {ended.message}"
                return reply or FirstWrong(None, one.name, "", np.inf, noise, where)
            bound = min(max(_MARGIN * noise, _LEAST), _MOST)
            for layer, op, node, error in _differences(one.name, expected, found):
                if error > bound if undone else error > _MOST:
                    wrong = FirstWrong(layer, op, node, error, noise, where)
                    if node and reply:
                        wrong.where += f"; before it {reply.op} differs, {reply.where}"
                    if node:
                        return wrong
                    reply = reply or wrong
                    break
                noise = max(noise, 0.0 if undone else error)
            if one.name in _UNDOES:
                undone = _words(one)
    return reply


def _differences(
    name: str, expected: Sequence[Value], found: Sequence[Value]
) -> Iterator[tuple[int | None, str, str, float]]:
    """Differences of a command's replies: layer, operation, node, and relative error, in order."""
    whole = [value for value in expected if isinstance(value, int)]
    if len(expected) != len(found) or whole != [v for v in found if isinstance(v, int)]:
        yield None, f"the reply of {name}", "", np.inf
    elif name == "save":
        yield None, "the state of save", "", _blobs_apart(expected[0], found[0])
    elif name == _DECODE and len(expected) == 4:
        tables = [value for value in (*expected[2:], *found[2:]) if isinstance(value, bytes)]
        theirs = _by_name(graph_nodes(*tables[2:]))
        nodes = graph_nodes(*tables[:2])
        for (key, node), layer in zip(_by_name(nodes).items(), _layers(nodes), strict=True):
            other = theirs.get(key)
            if other is not None and node.op not in _VIEWS:
                yield layer, node.op, node.name, _nodes_apart(node, other)


def _layers(nodes: Sequence[GraphNode]) -> list[int | None]:
    """Layers from the nodes' names; unnamed ones get the layer of their named neighbours if these
    agree."""
    named = [_LAYER.search(node.name) for node in nodes]
    own = [None if found is None else int(found[1]) for found in named]
    before = list(itertools.accumulate(own, _kept))
    after = list(itertools.accumulate(reversed(own), _kept))[::-1]
    return [one if one == other else None for one, other in zip(before, after, strict=True)]


def _kept(last: int | None, one: int | None) -> int | None:
    return last if one is None else one


def _by_name(nodes: Sequence[GraphNode]) -> dict[tuple[str, str, int], GraphNode]:
    """By operation, name and occurrence, so that nodes of only one build are ignored."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in nodes:
        key = node.op, node.name
        found[*key, seen[key]] = node
        seen[key] += 1
    return found


def _nodes_apart(one: GraphNode, other: GraphNode) -> float:
    if one.shape != other.shape or one.values.size != other.values.size:
        return float(np.inf)
    return _apart(one.values, other.values)


def _blobs_apart(one: Value, other: Value) -> float:
    """Distance of two blobs read as numbers; other contents are equal in both."""
    if not isinstance(one, bytes) or not isinstance(other, bytes) or len(one) != len(other):
        return float(np.inf)
    n = len(one) // 4 * 4
    words = [np.frombuffer(blob[:n], "<i4") for blob in (one, other)]
    changed = words[0] != words[1]
    if not changed.any():
        return 0.0
    return _apart(*(np.frombuffer(blob[:n], "<f4") for blob in (one, other)))


def _apart(expected: np.ndarray, found: np.ndarray) -> float:
    """Norm of the difference relative to the expected; values non-finite in both are ignored, in
    one of them infinitely wrong."""
    finite = np.isfinite(expected)
    if (finite != np.isfinite(found)).any():
        return float(np.inf)
    exact = expected[finite].astype(np.float64)
    difference = float(np.linalg.norm(found[finite].astype(np.float64) - exact))
    if difference == 0.0:
        return 0.0
    size = float(np.linalg.norm(exact))
    return difference / size if size > 0.0 else float(np.inf)


def _words(asked: ApiCall) -> str:
    """A command in words, for a batch with its contents."""
    if asked.name != _DECODE:
        numbers = [str(value) for value in asked.values if isinstance(value, int)]
        return f"{asked.name}({', '.join(numbers)})"
    arrays = [np.frombuffer(v, "<i4") for v in asked.values[2:4] if isinstance(v, bytes)]
    spans = [
        f"positions {arrays[0][arrays[1] == seq].min()} to {arrays[0][arrays[1] == seq].max()} of "
        f"sequence {seq}"
        for seq in dict.fromkeys(arrays[1].tolist())
    ]
    return f"context {asked.values[0]!r}, {', '.join(spans)}"
