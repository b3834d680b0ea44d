"""What TensorRT-LLM tells of a request: `speculative_decoding` of a choice, or of the performance
metrics that it writes, a line for each request."""

from __future__ import annotations

from engine.observe.files.records.document import Node
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.shape import Shape, read_usage

_KEYS = {
    "num_spec_steps": "num_spec_steps",
    "num_draft_tokens": "total_draft_tokens",
    "num_accepted_draft_tokens": "total_accepted_draft_tokens",
    "num_spec_tokens": "num_spec_tokens",
    "histogram": "acceptance_histogram",
}


def _read(node: Node) -> RecordedRequest:
    values = node.fields()
    found = RecordedRequest(
        "tensorrt-llm",
        node.place,
        num_spec_steps=values.count("num_spec_steps"),
        num_draft_tokens=values.count("total_draft_tokens"),
        num_accepted_draft_tokens=values.count("total_accepted_draft_tokens"),
        num_spec_tokens=values.count("num_spec_tokens"),
        histogram=values.histogram("acceptance_histogram"),
    )
    found.check_ratio(
        "acceptance_rate",
        values.number("acceptance_rate"),
        found.num_accepted_draft_tokens,
        found.num_draft_tokens,
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    )
    found.check_counts(_KEYS)
    read_usage(node, node.owner("usage", "perf_metrics"), found)
    choice = node.owner("finish_reason")
    if choice is not node.values:
        found.stop = node.fields(choice).text("finish_reason") or ""
    found.record = dict(node.values)
    return found


TENSORRT_LLM = Shape("tensorrt-llm", "TensorRT-LLM", (("total_accepted_draft_tokens",),), _read)
