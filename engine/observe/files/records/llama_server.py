"""Replies of llama-server saved as text: a stream of events, or JSON with its final counters.

A stream with counters in every event tells its rounds, as if it were read from the server. When
its pieces arrived nobody knows: times begin with the request and are the server's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from engine.analysis.findings.check import record_findings
from engine.foreign_numbers import OutOfRangeError, real
from engine.observe.files.records.document import Node
from engine.observe.files.records.shape import Shape
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.trace.store import TraceStore

LLAMA_SERVER = Shape(
    "llama-server",
    "llama-server",
    (("predicted_n", "predicted_ms"),),
    without=("draft_rounds", "predicted_per_second_n_gen"),  # mlx-vlm's, this program's own
)
_TIME = re.compile(rb'"(?:prompt_ms|predicted_ms)"\s*:\s*([0-9.]{1,20})')


def write_stream(store: TraceStore, data: bytes, file: str) -> int:
    """Write one stream as a run; returns its id. The last event may be cut."""
    run = _begin(store, file)
    first = []
    with suppress(OutOfRangeError):  # the stream's reader says what is wrong with it
        first = [real(time.decode()) for time in _TIME.findall(data[: 1 << 16])[:2]]
    now = sum(first)  # of the first event: the request then began at 0
    request = run.request("", {}, 0.0)
    request.head(200, {"content-type": "text/event-stream"}, now)
    request.data(data, now)
    request.done(now)
    return _end(store, run)


def write_replies(store: TraceStore, nodes: Sequence[Node], file: str) -> int:
    """Write replies in one piece as a run with a sequence for each; returns its id.

    nodes: the `timings` in them.
    """
    run = _begin(store, file)
    for node in nodes:
        reply = node.around[-1] if node.around else {}
        if not isinstance(reply, dict) or reply.get("timings") is not node.values:
            reply = {"content": "", "stop": True, "timings": node.values}
        request = run.request("", {}, 0.0)
        request.head(200, {"content-type": "application/json"}, 0.0)
        request.data(json.dumps(reply).encode(), 0.0)
        request.done(0.0)
    return _end(store, run)


def _begin(store: TraceStore, file: str) -> ObservedRun:
    record = {"file": file, "shape": LLAMA_SERVER.name}
    return ObservedRun(store, "record", ServerFacts(""), record=record)


def _end(store: TraceStore, run: ObservedRun) -> int:
    run.end()
    record_findings(store, [run.run_id])
    return run.run_id
