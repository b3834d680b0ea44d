"""What vLLM tells of a request: `metrics.speculative_decoding` of a reply or of the last chunk of
a stream; and what AIPerf makes of it, with the same names.

vLLM: docs/features/speculative_decoding/acceptance_metrics.md. Steps without a draft are not
counted; a draft may have lost all its tokens to a grammar.
"""

from __future__ import annotations

from typing import Any

from engine.foreign_numbers import LONGEST_DRAFT, is_whole
from engine.observe.files.records.document import Fields, Node
from engine.observe.files.records.request import RecordedRequest, TokenChunk
from engine.observe.files.records.shape import Shape, read_usage

_KEYS = {
    name: name
    for name in (
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_spec_tokens",
        "per_step_drafted",
        "per_step_accepted",
    )
} | {"histogram": "acceptance_histogram", "by_length": "acceptance_histogram_by_draft_length"}


def read_counts(node: Node, engine: str) -> tuple[RecordedRequest, Fields]:
    """The counts of one record, with what has not been read of it yet."""
    values = node.fields()
    found = RecordedRequest(
        engine,
        node.place,
        num_spec_steps=values.count("num_spec_steps"),
        num_draft_tokens=values.count("num_draft_tokens"),
        num_accepted_draft_tokens=values.count("num_accepted_draft_tokens"),
        num_spec_tokens=values.count("num_spec_tokens"),
        histogram=values.histogram("acceptance_histogram"),
        by_length=_by_length(values),
        per_step_accepted=values.counts("per_step_accepted", LONGEST_DRAFT),
        per_step_drafted=values.counts("per_step_drafted", LONGEST_DRAFT),
    )
    mean, rate = values.number("mean_acceptance_length"), values.number("draft_acceptance_rate")
    _complete(found)
    steps, accepted = found.num_spec_steps, found.num_accepted_draft_tokens
    both = None if steps is None or accepted is None else steps + accepted
    counts = ("num_accepted_draft_tokens", "num_spec_steps")
    found.check_ratio("mean_acceptance_length", mean, both, steps, *counts)
    counts = ("num_accepted_draft_tokens", "num_draft_tokens")
    found.check_ratio("draft_acceptance_rate", rate, accepted, found.num_draft_tokens, *counts)
    found.check_counts(_KEYS)
    found.record = dict(node.values)
    return found, values


def _by_length(values: Fields) -> dict[int, list[int]] | None:
    rows = values.object("acceptance_histogram_by_draft_length")
    if rows is None:
        return None
    return {rows.index(length): rows.histogram(length) or [] for length in rows.values}


def _complete(found: RecordedRequest) -> None:
    """Counts that are not told but are the sums of lists that are."""
    if found.per_step_accepted is not None:
        if found.num_spec_steps is None:
            found.num_spec_steps = len(found.per_step_accepted)
        if found.num_accepted_draft_tokens is None:
            found.num_accepted_draft_tokens = sum(found.per_step_accepted)
    if found.per_step_drafted is not None and found.num_draft_tokens is None:
        found.num_draft_tokens = sum(found.per_step_drafted)


def _read(node: Node) -> RecordedRequest:
    found, _ = read_counts(node, "vllm")
    reply = node.owner("usage", "choices")
    read_usage(node, reply, found)
    found.chunks = _chunks(node, reply, found)
    return found


def _chunks(node: Node, reply: dict[str, Any], into: RecordedRequest) -> list[TokenChunk] | None:
    """The tokens of each chunk of the same stream, None unless all chunks tell their ids."""
    lists = (one for one in reversed(node.around) if isinstance(one, list))
    siblings = next((one for one in lists if any(each is reply for each in one)), None)
    found: list[TokenChunk] = []
    for one in siblings or (reply,):
        if not isinstance(one, dict) or one.get("id") != reply.get("id"):
            continue
        choices = one.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                return None
            into.stop = str(choice.get("finish_reason") or into.stop)[:100]
            ids, text = choice.get("token_ids"), _text(choice)
            if ids is None and siblings is not None and not text:
                continue  # the role comes alone
            if not isinstance(ids, list) or not all(is_whole(i) for i in ids):
                return None
            found.append(TokenChunk(ids, text))
    return found if siblings is not None else None


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


VLLM = Shape(
    "vllm",
    "vLLM",
    (("num_spec_steps", "mean_acceptance_length"), ("per_step_accepted",)),
    _read,
    without=("engine", "predicted_n"),  # AIPerf's, and this program's own figures
)
