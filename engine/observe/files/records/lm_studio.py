"""What LM Studio's SDK tells of a prediction: `stats`, and fragments of text.

What LM Studio calls ignored was never sent to the target, so that it is no drafted token here,
where ignored tokens are those behind the first that was rejected.
"""

from __future__ import annotations

from engine.observe.files.records.document import Fields, Node
from engine.observe.files.records.request import RecordedRequest
from engine.observe.files.records.shape import Shape

_ACCEPTED, _REJECTED = "acceptedDraftTokensCount", "rejectedDraftTokensCount"
_IGNORED, _TOTAL = "ignoredDraftTokensCount", "totalDraftTokensCount"


def _request_of(node: Node) -> int:
    """The counts of the prediction that a fragment is of; without any, the fragments."""
    if _ACCEPTED in node.values:
        return id(node.values)
    stats = node.owner("stats").get("stats")
    return id(stats if isinstance(stats, dict) or not node.around else node.around[-1])


def _read(node: Node) -> RecordedRequest:
    values = node.fields()
    found = RecordedRequest("lm-studio", node.place)
    if _ACCEPTED not in node.values:
        told = node.fields(node.owner("stats")).object("stats")
        if told is None:
            return _read_fragments(node, found)
        values, found.place = told, told.place
    accepted, rejected, ignored, total = (
        values.count(key) for key in (_ACCEPTED, _REJECTED, _IGNORED, _TOTAL)
    )
    found.num_accepted_draft_tokens = accepted
    if accepted is not None and rejected is not None:
        found.num_draft_tokens = accepted + rejected
        found.derived = ("num_draft_tokens", "draft_n")
        if total is not None:
            parts = accepted + rejected + (ignored or 0)
            found.check(
                parts == total,
                (_TOTAL, _ACCEPTED, _REJECTED, _IGNORED),
                f"{_TOTAL} is {total:,}, but its parts make {parts:,}",
            )
    elif accepted is not None and total is not None:
        found.check(
            accepted <= total,
            (_ACCEPTED, _TOTAL),
            f"{_ACCEPTED} is {accepted:,}, more than {_TOTAL}, {total:,}",
        )
    prompt, predicted, both = (
        values.count(f"{name}TokensCount") for name in ("prompt", "predicted", "total")
    )
    found.tell_tokens(prompt, None, predicted)
    if prompt is not None and predicted is not None and both is not None:
        found.check(
            prompt + predicted == both,
            ("promptTokensCount", "predictedTokensCount", "totalTokensCount"),
            f"totalTokensCount is {both:,}, but its parts make {prompt + predicted:,}",
        )
    speed = values.number("tokensPerSecond")
    if speed is not None:
        found.timings["predicted_per_second"] = speed
    found.stop = values.text("stopReason") or ""
    found.record = dict(values.values)
    return found


def _read_fragments(node: Node, into: RecordedRequest) -> RecordedRequest:
    """Fragments alone tell how many tokens there are."""
    fragments = node.around[-1] if node.around and isinstance(node.around[-1], list) else []
    counts = [
        Fields(one, node.file, f"{node.place} or behind", node.taken).count("tokensCount")
        for one in fragments
        if isinstance(one, dict)
    ]
    if None not in counts:
        into.tell_tokens(None, None, sum(filter(None, counts)))
    return into


LM_STUDIO = Shape(
    "lm-studio", "LM Studio", ((_ACCEPTED,), ("containsDrafted",)), _read, request_of=_request_of
)
