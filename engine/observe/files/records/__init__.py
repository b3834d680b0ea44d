"""Request records of other engines, as runs of a trace.

A record is recognised by its keys. Each engine is a reader in `readers` and a name in SHAPES.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.errors import TraceFileError, check_most
from engine.foreign import as_json, is_whole
from engine.long_work import watched
from engine.observe.files.records.aiperf import AIPERF, WARMUP, is_summary_table, table_values
from engine.observe.files.records.document import Node, nodes, read_documents, unknown_keys
from engine.observe.files.records.printed import (
    EAGLE,
    FASTDEPLOY,
    MLC,
    SPEC_BENCH,
    counted_shape,
    is_printed,
    read_printed,
)
from engine.observe.files.records.prometheus import is_metrics, only_samples, read_metrics
from engine.observe.files.records.readers import LLAMA_SERVER, READERS, USAGE, RecordShape, keys_in
from engine.observe.files.records.replies import KeptReply, kept_replies, read_reply
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.writing import write_replies, write_requests
from engine.observe.rounds.server_log import MOST_REQUESTS
from engine.observe.rounds.stream_rounds import Addition
from engine.trace.store import TraceStore

_HEAD = 1 << 18
METRICS, REPLY, PRINTED, COUNTED = "prometheus", "reply", "benchmark", "counts"
_REMEDY = "Choose a file of an engine that `draftscope help observe` lists."
SHAPES: dict[str, RecordShape] = {
    one.name: one for one in (AIPERF, *READERS, SPEC_BENCH, MLC, FASTDEPLOY, EAGLE, LLAMA_SERVER)
}
_PLAIN = RecordShape(REPLY, REPLY, (), LLAMA_SERVER.read)
"""Replies without draft figures."""
_SET = re.compile(r"(?i)(?:config|setting|option|arg|param|argument|parameter|threshold)s?$")
"""Names of settings, not counts."""
_WHOLE = {"prompt_n", "prompt_ms"}
"""Keys of timings about the prompt."""
_SIGNS = {key for shape in SHAPES.values() for key in shape.keys}
_REPLY = re.compile(
    rb'"choices"\s*:\s*\[|"meta_info"\s*:\s*\{|"object"\s*:\s*"response"'
    rb'|"stop_reason"\s*:|"type"\s*:\s*"(?:response\.|message_(?:start|delta)"\s*,)'
    rb'|"done"\s*:\s*(?:true|false)|"(?:tokens_predicted|output_ids)"\s*:'
)
NAMES = (*SHAPES, REPLY, METRICS, PRINTED, COUNTED)
"""Names for formats, to choose from where keys are ambiguous."""


def recognise(data: bytes) -> str | None:
    """The name of the records in a file, from its bytes or their beginning; None if there are none.
    The first of NAMES if several are possible: only reading tells."""
    if is_metrics(data):
        return METRICS
    text = data.decode("utf-8-sig", "replace")
    data = as_json(text).encode("utf-8", "replace")
    keys = keys_in(data)
    known = next((name for name, shape in SHAPES.items() if shape.may_be_in(keys)), None)
    if known is None and is_summary_table(data):
        return AIPERF.name
    if known is not None:
        return known
    is_several = b"}\n{" in data  # some of which may have no draft figures
    if is_printed(text) and not (is_several and counted_shape(data) is not None):
        return PRINTED
    if _REPLY.search(data):
        return REPLY
    return COUNTED if counted_shape(data) is not None else None


def fill(
    store: TraceStore,
    contents: bytes | list[bytes],
    file: str,
    name: str | None = None,
    later: bytes = b"",
    cancelled: Callable[[], bool] | None = None,
) -> list[int]:
    """Write the records of a file as runs of a trace; returns their ids.

    contents: its bytes, or a list to be emptied. file: its name, for messages and facts. name: one
    of NAMES. later: for counters a second scrape, for the time between the two. Raises
    TraceFileError, with nothing written, for a file without records, with those of several engines,
    or with impossible values, and Cancelled when `cancelled` turns true.
    """
    data = contents.pop() if isinstance(contents, list) else contents
    known = name or recognise(data[:_HEAD]) or recognise(data[_HEAD:])
    if known == METRICS:
        (data, left_out), (later, _) = only_samples(data), only_samples(later)
        if not (found := read_metrics(data, file, later)):
            raise _nothing(file, "Prometheus")
        return [write_requests(store, found, METRICS, file, left_out=left_out)]
    if known == PRINTED:
        text = data.decode("utf-8-sig", "replace")
        unread: list[str] = []
        if not (found := read_printed(text, unread)):
            raise _nothing(file, "benchmarks")
        left_out = f"acceptance figures ({len(unread)}), the first in " if unread else ""
        left_out += "".join(unread[:1])
        return [write_requests(store, found, PRINTED, file, left_out=left_out)]
    documents, left_out = (
        ([("", table_values(data))], "") if is_summary_table(data) else read_documents(data, file)
    )
    others = [one for one in watched(documents, cancelled) if type(one[1]) is not Addition]
    every = nodes(file, others, _SIGNS)
    every = [one for one in watched(every, cancelled) if WARMUP not in one.path]
    shape = SHAPES.get(name) if name is not None else _shape_of(every, file)
    if shape is None and name != REPLY:  # an unknown engine may name its counts
        data = as_json(data[:_HEAD].decode("utf-8-sig", "replace")).encode("utf-8", "replace")
        shape = counted_shape(data)
        every = nodes(file, others, set() if shape is None else shape.keys)
        every = [node for node in every if not _SET.search(".".join(node.path[-1:]))]
    # AIPerf has the counts of the replies that it keeps
    replies = [] if shape is AIPERF else [*watched(kept_replies(documents), cancelled)]
    if shape is None and not replies:
        raise TraceFileError(f"{file} has none of the keys of a known engine's records.", _REMEDY)
    if shape is LLAMA_SERVER:
        events = {id(event) for reply in replies for event in reply.events}
        alone = [
            node
            for node in every
            if shape.sign_of(node.values) and events.isdisjoint(map(id, node.around))
        ]
        if not alone and not replies:
            raise _nothing(file, shape.title)
        if replies or all(node.values.keys() >= _WHOLE for node in alone):
            del data, every, documents, others
            return [write_replies(store, replies, alone, file, left_out, cancelled)]
    for _, value in others:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and isinstance(ids := one.get("tokens"), array):
                one["tokens"] = list(ids)  # facts are JSON
    shape = shape or _PLAIN
    found, unknown = _requests(shape, every, replies, file, cancelled)
    del data, every, documents, others, replies
    if not found:
        raise _nothing(file, shape.title)
    return [write_requests(store, found, shape.name, file, unknown, left_out=left_out)]


def _nothing(file: str, title: str) -> TraceFileError:
    return TraceFileError(f"{file} has no records of {title}.", _REMEDY)


def _shape_of(every: list[Node], file: str) -> RecordShape | None:
    """The kind of these records, by their keys; None without any."""
    signs: dict[str, tuple[str, str]] = {}
    forms = set[tuple[object, ...]]()
    for node in every:
        form = (*node.values, *[value is None for value in node.values.values()])
        if form in forms:
            continue
        forms.add(form)
        for shape in SHAPES.values():
            if shape.name not in signs and (sign := shape.sign_of(node.values)):
                signs[shape.name] = (sign[0], node.place)
    if len(signs) > 1:
        signs.pop(USAGE.name, None)  # an engine's own counts are next to it
    if len(signs) > 1:
        found = " and ".join(
            f"{SHAPES[name].title} ({key}{f' in {place}' if place else ''})"
            for name, (key, place) in signs.items()
        )
        raise TraceFileError(
            f"{file} has keys of {found}.",
            f"Choose one with {' or '.join(f'--as {name}' for name in signs)}.",
        )
    return SHAPES[next(iter(signs))] if signs else None


def _requests(
    shape: RecordShape,
    every: list[Node],
    replies: list[KeptReply],
    file: str,
    cancelled: Callable[[], bool] | None,
) -> tuple[list[RecordedRequest], dict[str, Any]]:
    """The requests of a file, replies first, and what else the file contains."""
    owner = {id(event): id(reply) for reply in replies for event in reply.events}
    counts: dict[int, dict[Any, Node]] = {}
    others: dict[Any, Node] = {}
    for node in every:
        if not shape.sign_of(node.values):
            continue
        around = (node.values, *reversed(node.around))
        reply = next((owner[id(one)] for one in around if id(one) in owner), None)
        if reply is None:
            mine, key = others, shape.request_of(node)
        else:
            inside = (one.get("index") for one in node.around if isinstance(one, dict))
            mine, key = counts.setdefault(reply, {}), next(filter(is_whole, inside), 0)
        if key not in mine or shape.has_counts(node.values):  # the last one of a stream counts
            mine[key] = node
    check_most(file, len(replies) + len(others), MOST_REQUESTS, "requests")
    found: list[RecordedRequest] = []
    read: list[tuple[Node, RecordedRequest]] = []
    for kept in watched(replies, cancelled):
        mine = counts.get(id(kept), {})
        known = {index: shape.read(node) for index, node in mine.items()}
        read += [(mine[index], one) for index, one in known.items()]
        found += read_reply(kept, known, every[0].taken if every else {}, file)
    for node in watched(others.values(), cancelled):
        one = shape.read(node)
        if one.timings or one.num_draft_tokens is not None or shape.has_counts(node.values):
            read.append((node, one))
            found.append(one)
    return found, _tell_unknown([node for node, _ in read], [one for _, one in read])


def _tell_unknown(records: list[Node], found: list[RecordedRequest]) -> dict[str, Any]:
    """Add unread keys of each record to its request; returns those shared by several."""
    n_inside = Counter(id(one) for node in records for one in node.around)
    shared = {key for key, n in n_inside.items() if n > 1}
    common: dict[str, Any] = {}
    for node, request in zip(records, found, strict=True):
        request.unknown = unknown_keys(node, shared)
        if not common and shared:
            common = unknown_keys(node, set())
            common = {key: common[key] for key in common if key not in request.unknown}
    return common
