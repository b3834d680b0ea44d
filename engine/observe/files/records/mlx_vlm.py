"""What mlx-vlm tells of a request: `timings` with llama-server's names and the number of rounds.

Accepted tokens may exceed those emitted: a round counts before a stop cuts it.
"""

from __future__ import annotations

from engine.observe.files.records.document import Node
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.shape import Shape

TIMINGS = {
    "cache_n": "count",
    "prompt_n": "count",
    "predicted_n": "count",
    **dict.fromkeys(
        (
            "prompt_ms",
            "prompt_per_token_ms",
            "prompt_per_second",
            "predicted_ms",
            "predicted_per_token_ms",
            "predicted_per_second",
        ),
        "number",
    ),
}


def _read(node: Node) -> RecordedRequest:
    values = node.fields()
    found = RecordedRequest(
        "mlx-vlm",
        node.place,
        num_spec_steps=values.count("draft_rounds"),
        num_draft_tokens=values.count("draft_n"),
        num_accepted_draft_tokens=values.count("draft_n_accepted"),
    )
    told = {name: getattr(values, kind)(name) for name, kind in TIMINGS.items()}
    found.timings = {name: value for name, value in told.items() if value is not None}
    found.check_counts(
        {
            "num_spec_steps": "draft_rounds",
            "num_draft_tokens": "draft_n",
            "num_accepted_draft_tokens": "draft_n_accepted",
        }
    )
    found.record = dict(node.values)
    values.text("draft_kind")
    return found


MLX_VLM = Shape("mlx-vlm", "mlx-vlm", (("draft_rounds",),), _read)
