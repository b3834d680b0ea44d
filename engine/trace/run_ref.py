"""The name of a run wherever it leaves its trace, and whether two runs were of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.trace.facts import RunFacts
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run together with the trace that holds it: ids count from 0 in every trace, so an id by
    itself names one run in each of them. Two are equal for the same run of the same store."""

    store: TraceStore
    run_id: int

    @property
    def facts(self) -> RunFacts:
        """The facts of the run in its trace. Raises KeyError for a run that the trace lacks."""
        return self.store.runs[self.run_id]

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end; the trace keeps that fact for last."""
        return "stops" in self.facts

    def sibling(self, run_id: int) -> RunRef:
        """Another run of the same trace."""
        return RunRef(self.store, run_id)

    def __str__(self) -> str:
        return f"run {self.run_id}"


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
