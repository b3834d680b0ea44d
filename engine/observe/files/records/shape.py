"""What tells the records of an engine from those of another, and who reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from engine.observe.files.records.document import Node
from engine.observe.files.records.request import RecordedRequest


def of_same_request(node: Node) -> Hashable:
    """The same for all chunks of a stream that have counts: those of the last chunk are all."""
    name: str | None = None
    for one in (node.values, *reversed(node.around)):
        if isinstance(one, list):
            return (id(one), name) if name is not None else id(node.values)
        if name is None and isinstance(one.get("id"), str):
            name = one["id"]
    return id(node.values)


@dataclass(frozen=True, slots=True)
class Shape:
    """The records of one engine, recognised by keys and never by the name of a file.

    name: for --as. title: for messages. signs: sets of keys, any of which an object has that is
    such a record. without: keys that such an object never has. read: one such
    object of a file; None where rounds are told by streams.
    """

    name: str
    title: str
    signs: tuple[tuple[str, ...], ...]
    read: Callable[[Node], RecordedRequest] | None = None
    without: tuple[str, ...] = ()
    request_of: Callable[[Node], Hashable] = of_same_request
    """Stands for the request, where several such objects may be of one; the last one counts."""

    def sign_of(self, values: dict[str, Any]) -> tuple[str, ...]:
        """The keys by which an object is such a record; empty if it is none."""
        if any(key in values for key in self.without):
            return ()
        return next((sign for sign in self.signs if all(key in values for key in sign)), ())

    def may_be_in(self, data: bytes) -> bool:
        """Whether bytes, or their beginning, look like a file of such records."""
        return not any(_has_key(key, data) for key in self.without) and any(
            all(_has_key(key, data) for key in sign) for sign in self.signs
        )


def _has_key(key: str, data: bytes) -> bool:
    # inside of a JSON text the quotes would be escaped
    return re.search(rb'"%s"\s*:' % key.encode(), data) is not None


def read_usage(node: Node, reply: dict[str, Any], into: RecordedRequest) -> None:
    """Take `model` and the counts of `usage` of an OpenAI reply into a request, and check their
    sum."""
    about = node.fields(reply)
    into.model = about.text("model") or ""
    found = about.object("usage")
    if found is None:
        return
    prompt, completion, total = (
        found.count(key) for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    details = found.object("prompt_tokens_details")
    cached = details.count("cached_tokens") if details is not None else None
    choices = reply.get("choices")
    is_one = not isinstance(choices, list) or len(choices) < 2  # else the sum of several
    into.tell_tokens(prompt, cached, completion if is_one else None)
    if prompt is not None and completion is not None and total is not None:
        into.check(
            prompt + completion == total,
            ("usage.prompt_tokens", "usage.completion_tokens", "usage.total_tokens"),
            f"prompt_tokens and completion_tokens make {prompt + completion:,}, "
            f"but total_tokens is {total:,}",
        )
