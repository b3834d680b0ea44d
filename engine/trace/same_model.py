"""Whether two runs were of one model, by the identities that their facts hold."""

from __future__ import annotations

from typing import Any


def same_model(one: Any, other: Any) -> bool:
    """Whether two identities (GgufFile.identity, perhaps with `draft`) mean one model.

    The heads of the files have to be equal. Of the tensors, `content` decides where it is known
    of both; elsewhere the file's name and the time of its last change do.
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return bool(one == other)
    names = ["size", "sha256"]
    names += ["content"] if one.get("content") and other.get("content") else ["name", "modified_ns"]
    drafts = one.get("draft"), other.get("draft")
    return all(one.get(name) == other.get(name) for name in names) and (
        drafts == (None, None) or same_model(*drafts)
    )
