"""Records that other engines keep of their requests, as runs of a trace.

A record is recognised by its keys. Each engine is one module and one line in SHAPES.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.errors import TraceFileError
from engine.observe.records.aiperf import AIPERF
from engine.observe.records.document import Node, nodes, read_documents, unknown_keys
from engine.observe.records.lm_studio import LM_STUDIO
from engine.observe.records.mlx_vlm import MLX_VLM
from engine.observe.records.prometheus import is_metrics, read_metrics
from engine.observe.records.request import RecordedRequest
from engine.observe.records.sglang import SGLANG
from engine.observe.records.shape import Shape
from engine.observe.records.tensorrt_llm import TENSORRT_LLM
from engine.observe.records.vllm import VLLM
from engine.observe.records.writing import write_requests
from engine.trace.store import TraceStore

METRICS = "prometheus"
_REMEDY = "Choose a file that one of the engines in the README wrote."
SHAPES: dict[str, Shape] = {
    shape.name: shape for shape in (AIPERF, VLLM, SGLANG, TENSORRT_LLM, MLX_VLM, LM_STUDIO)
}
NAMES = (*SHAPES, METRICS)
"""What a file may be said to be, where its keys leave that open."""


def recognise(data: bytes) -> str | None:
    """The name of the records that a file holds, from its bytes or their beginning; None if it
    holds none. The first of NAMES where it could be several: only reading tells."""
    if is_metrics(data):
        return METRICS
    return next((name for name, shape in SHAPES.items() if shape.may_be_in(data)), None)


def fill(store: TraceStore, data: bytes, file: str, name: str | None = None) -> list[int]:
    """Write the records of a file as a run of a trace; returns the ids of its runs.

    file: its name, for messages and facts. name: one of NAMES, where the keys could be of several.
    Raises TraceFileError, with nothing written, for a file that has no records, those of several
    engines, or values that cannot be.
    """
    unknown: dict[str, Any] = {}
    if name == METRICS or (name is None and is_metrics(data)):
        found, name, title = read_metrics(data, file), METRICS, "counters of speculative decoding"
    else:
        every = list(nodes(file, read_documents(data, file)))
        shape = SHAPES[name] if name is not None else _shape_of(every, file)
        found, unknown = _read(shape, every)
        name, title = shape.name, f"records of {shape.title}"
    if not found:
        raise TraceFileError(f"{file} has no {title}.", _REMEDY)
    return [write_requests(store, found, name, file, unknown)]


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


def _read(shape: Shape, every: list[Node]) -> tuple[list[RecordedRequest], dict[str, Any]]:
    """The records of one engine, each once, and what nothing asked for around several of them."""
    records: dict[int, Node] = {}
    for node in every:
        if shape.sign_of(node.values):
            records.setdefault(id(shape.request_of(node)), node)
    n_inside = Counter(id(one) for node in records.values() for one in node.around)
    shared = {key for key, n in n_inside.items() if n > 1}
    found = [shape.read(node) for node in records.values()]
    common: dict[str, Any] = {}
    for node, request in zip(records.values(), found, strict=True):
        request.unknown = unknown_keys(node, shared)
        if not common and shared:
            common = unknown_keys(node, set())
            common = {key: common[key] for key in common if key not in request.unknown}
    return found, common
