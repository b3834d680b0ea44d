"""AIPerf's acceptance records: read, and written for every sequence of a trace.

A record has no time and no text, so nothing of a trace but its counts goes into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.observe.records.document import Node
from engine.observe.records.request import RecordedRequest
from engine.observe.records.shape import Shape
from engine.observe.records.vllm import read_counts
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, timings

_NAMES = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")


def _read(node: Node) -> RecordedRequest:
    found, values = read_counts(node, "")
    found.engine = values.text("engine") or ""
    found.tell_tokens(None, None, values.count("completion_tokens"))
    return found


AIPERF = Shape(
    "aiperf",
    "AIPerf",
    (("engine", "num_spec_steps", "mean_acceptance_length"), ("engine", "per_step_accepted")),
    _read,
)
