"""Records that other engines keep of their requests, as runs of a trace.

A record is recognised by its keys. Each engine is a reader in `readers` and a name in SHAPES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from engine.errors import TraceFileError
from engine.observe.files.records.aiperf import AIPERF
from engine.observe.files.records.document import (
    Node,
    is_stream,
    nodes,
    read_documents,
    unknown_keys,
)
from engine.observe.files.records.prometheus import is_metrics, read_metrics
from engine.observe.files.records.readers import (
    LLAMA_SERVER,
    LM_STUDIO,
    MLX_VLM,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    Shape,
)
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.writing import write_replies, write_requests, write_stream
from engine.trace.store import TraceStore

METRICS = "prometheus"
_REMEDY = "Choose a file that one of the engines wrote that `draftscope help observe` lists."
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (AIPERF, VLLM, SGLANG, TENSORRT_LLM, MLX_VLM, LM_STUDIO, LLAMA_SERVER)
}
_SIGNS = {key for shape in SHAPES.values() for sign in shape.signs for key in sign}
NAMES = (*SHAPES, METRICS)
"""What a file may be said to be, where its keys leave that open."""


def recognise(data: bytes) -> str | None:
    """The name of the records that a file holds, from its bytes or their beginning; None if it
    holds none. The first of NAMES where it could be several: only reading tells."""
    if is_metrics(data):
        return METRICS
    return next((name for name, shape in SHAPES.items() if shape.may_be_in(data)), None)


def fill(
    store: TraceStore, data: bytes, file: str, name: str | None = None, later: bytes = b""
) -> list[int]:
    """Write the records of a file as a run of a trace; returns the ids of its runs.

    file: its name, for messages and facts. name: one of NAMES, where the keys could be of several.
    later: of counters a second scrape, so that the run is what was done between the two.
    Raises TraceFileError, with nothing written, for a file that has no records, those of several
    engines, or values that cannot be.
    """
    if name == METRICS or (name is None and is_metrics(data)):
        return [_write(store, read_metrics(data, file, later), METRICS, file, {})]
    if name in (None, LLAMA_SERVER.name) and _is_llama_server_stream(data):
        return [write_stream(store, data, file)]
    every = nodes(file, read_documents(data, file), _SIGNS)
    shape = SHAPES[name] if name is not None else _shape_of(every, file)
    records = _records(shape, every)
    if shape.read is None:
        if not records:
            raise _nothing(file, shape.name)
        return [write_replies(store, records, file)]
    found = [shape.read(node) for node in records]
    return [_write(store, found, shape.name, file, _tell_unknown(records, found))]


def _is_llama_server_stream(data: bytes) -> bool:
    """A stream of llama-server may be cut anywhere, so it is recognised by its bytes."""
    begin = data[:64].decode("utf-8-sig", errors="replace")
    return is_stream(begin) and recognise(data) == LLAMA_SERVER.name


def _write(
    store: TraceStore,
    found: list[RecordedRequest],
    name: str,
    file: str,
    unknown: Mapping[str, Any],
) -> int:
    if not found:
        raise _nothing(file, name)
    return write_requests(store, found, name, file, unknown)


def _nothing(file: str, name: str) -> TraceFileError:
    title = SHAPES[name].title if name in SHAPES else "Prometheus"
    return TraceFileError(f"{file} has no records of {title}.", _REMEDY)


def _shape_of(every: list[Node], file: str) -> Shape:
    """Whose records these are, by their keys."""
    signs: dict[str, tuple[str, str]] = {}
    for node in every:
        for shape in SHAPES.values():
            if shape.name not in signs and (sign := shape.sign_of(node.values)):
                signs[shape.name] = (sign[0], node.place)
    if len(signs) > 1:
        found = " and ".join(
            f"{SHAPES[name].title} ({key}{f' in {place}' if place else ''})"
            for name, (key, place) in signs.items()
        )
        raise TraceFileError(
            f"{file} has keys of {found}.",
            f"Choose one with {' or '.join(f'--as {name}' for name in signs)}.",
        )
    if not signs:
        raise TraceFileError(f"{file} has no key that an engine's records are known by.", _REMEDY)
    return SHAPES[next(iter(signs))]


def _records(shape: Shape, every: list[Node]) -> list[Node]:
    """The records of one engine, each once."""
    records: dict[Hashable, Node] = {}
    for node in every:
        if shape.sign_of(node.values):
            records[shape.request_of(node)] = node
    return list(records.values())


def _tell_unknown(records: list[Node], found: list[RecordedRequest]) -> dict[str, Any]:
    """Give each request what nothing asked for in its record; returns what lies around several."""
    n_inside = Counter(id(one) for node in records for one in node.around)
    shared = {key for key, n in n_inside.items() if n > 1}
    common: dict[str, Any] = {}
    for node, request in zip(records, found, strict=True):
        request.unknown = unknown_keys(node, shared)
        if not common and shared:
            common = unknown_keys(node, set())
            common = {key: common[key] for key in common if key not in request.unknown}
    return common
