"""What SGLang tells of a request: `meta_info` of /generate, `sglext.spec_tokens_details` elsewhere.

The counts have had three generations of names. Proposed drafts are verifications times the drafts
that a verification can have: an assumption of the server's, and not a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engine.observe.files.records.document import Node
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.shape import Shape, read_usage

_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_Value = TypeVar("_Value")


def _read(node: Node) -> RecordedRequest:
    values = node.fields()
    found = RecordedRequest("sglang", node.place, num_spec_steps=values.count("spec_verify_ct"))
    keys = {"num_spec_steps": "spec_verify_ct"}

    def first(named: tuple[str, ...], take: Callable[[str], _Value | None], field: str) -> None:
        """The value of the newest name; older names beside it have to say the same."""
        told = [(name, value) for name in named if (value := take(name)) is not None]
        keys[field] = told[0][0] if told else named[0]
        for name, value in told:
            setattr(found, field, told[0][1])
            found.check(
                value == told[0][1],
                (told[0][0], name),
                f"{told[0][0]} and {name}, its name in other versions, differ",
            )

    first(_ACCEPTED, values.count, "num_accepted_draft_tokens")
    first(_PROPOSED, values.count, "num_draft_tokens")
    first(_HISTOGRAM, values.histogram, "histogram")
    if found.histogram == []:
        found.histogram = None
    found.derived = ("num_draft_tokens", "draft_n", "draft_acceptance_rate")
    reply = node.owner("usage", "meta_info", "choices")
    if "completion_tokens" in node.values:
        counts = (
            values.count(key) for key in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        found.tell_tokens(*counts)
    else:
        read_usage(node, reply, found)
    rate, length = values.number("spec_accept_rate"), values.number("spec_accept_length")
    accepted, drafted = found.num_accepted_draft_tokens, found.num_draft_tokens
    names = keys["num_accepted_draft_tokens"], keys["num_draft_tokens"]
    found.check_ratio("spec_accept_rate", rate, accepted, drafted, *names)
    found.check_ratio(
        "spec_accept_length",
        length,
        found.timings.get("predicted_n"),
        found.num_spec_steps,
        "completion_tokens",
        "spec_verify_ct",
    )
    found.check_counts(keys)
    reason = node.values.get("finish_reason")
    found.stop = str(reason.get("type", ""))[:100] if isinstance(reason, dict) else ""
    found.record = dict(node.values)
    return found


SGLANG = Shape("sglang", "SGLang", (("spec_verify_ct",),), _read)
