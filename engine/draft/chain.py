"""Drafters in use, asked in a fixed priority; the first non-empty draft of a sequence wins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.draft.drafter import Draft, Drafter, DraftRequest


class DrafterChain:
    """Drafters in priority order. All of them are told what the target decoded."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Pass on what the target decoded for good."""
        for drafter in self._drafters:
            drafter.observe(seq, pos0, tokens, hidden)

    def draft(self, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """Drafts by sequence; a sequence without one is absent."""
        drafts: dict[int, Draft] = {}
        for drafter in self._drafters:
            waiting = [request for request in requests if request.seq not in drafts]
            if not waiting:
                break
            for request, draft in zip(waiting, drafter.draft(waiting), strict=True):
                if draft.tokens:
                    drafts[request.seq] = draft
        return drafts

    def forget(self, seq: int) -> None:
        """A sequence has ended."""
        for drafter in self._drafters:
            drafter.forget(seq)
