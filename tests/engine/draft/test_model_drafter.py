"""Limits and confidence of a draft, with a scripted model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Span
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.model_drafter import ModelDrafter
from engine.memory.hybrid import HybridMemory
from engine.options import RunOptions, SpecOptions
from tests.support.drafter_diff_campaign import opened


class Scripted(ModelDrafter):
    """Step i proposes token 10 * seq + i with the confidence of `script[i]`."""

    name = "scripted"

    def __init__(self, script: list[float], options: SpecOptions) -> None:
        super().__init__(SimpleNamespace(options=options, draws=None))
        self.script = script
        self.widths: list[int] = []

    def _first(self, requests):
        return self._logits([r.seq for r in requests], 0)

    def _next(self, requests, n_drafted, tokens, rows):
        assert len(rows) == len(requests)
        # the best tokens of the step before
        assert tokens.tolist() == [10 * r.seq + n_drafted - 1 for r in requests]
        return self._logits([r.seq for r in requests], n_drafted)

    def _logits(self, seqs, i):
        self.widths.append(len(seqs))
        p = self.script[i]
        logits = torch.full((len(seqs), 60), -1e9)
        for row, seq in enumerate(seqs):
            logits[row, :12] = math.log((1 - p) / 9) - 50  # beyond the ten largest: no part in p
            logits[row, 40:49] = math.log((1 - p) / 9)
            logits[row, 10 * seq + i] = math.log(p)
        return logits


def draft(script: list[float], **options) -> tuple[list[Draft], Scripted]:
    drafter = Scripted(script, SpecOptions(**options))
    limit = options.get("n_max", 3)
    requests = [DraftRequest(0, 5, 1, limit), DraftRequest(1, 9, 1, max(1, limit - 2))]
    return drafter.draft(requests), drafter


def test_each_sequence_stops_at_its_own_limit():
    (one, two), drafter = draft([0.9, 0.8, 0.7], n_max=3)
    assert one.tokens == [0, 1, 2] and two.tokens == [10]
    assert one.probs == pytest.approx([0.9, 0.8, 0.7])
    assert drafter.widths == [2, 1, 1]
    assert one.top_ids[0][0] == 0 and len(one.top_ids[0]) == 5
    assert one.drafter == "scripted"
    assert (one.reason, two.reason) == ("", "limit")


def test_p_min_is_a_floor_for_each_token():
    (one, _), _ = draft([0.9, 0.5, 0.4, 0.9], n_max=4, p_min=0.45)
    assert one.tokens == [0, 1]
    assert one.reason == "p_min"


def test_too_short_a_draft_is_thrown_away():
    (one, two), _ = draft([0.9, 0.8, 0.3], n_max=3, n_min=2, p_min=0.5)
    assert one.tokens == [0, 1]
    assert two == Draft(drafter="scripted", n_raw=1, reason="n_min")


def test_a_limit_above_the_drafters_own_changes_nothing():
    drafter = Scripted([0.9, 0.8, 0.7], SpecOptions(n_max=2))
    (draft,) = drafter.draft([DraftRequest(0, 5, 1, 48)])
    assert (draft.tokens, draft.reason) == ([0, 1], "")


@pytest.mark.parametrize("kind", ["simple", "mtp", "eagle3"])
def test_a_text_that_has_ended_leaves_nothing(kind: str) -> None:
    session, name = opened(kind), f"draft-{kind}"
    options = RunOptions(spec=SpecOptions(types=(name,), n_max=3))
    texts = [
        session.prompt(text).tokens for text in ("def main():\n    x = 1\n", "import os\nimport")
    ]
    (used,), (fresh,) = (session.make_drafters(options, 1, 128) for _ in range(2))
    memory = HybridMemory.for_model(session.config, 1, 128, session.model.device)

    def drafted(drafter: Any, tokens: Sequence[int]) -> Draft:
        memory.clear(0)
        (ubatch,) = memory.split([Span(0, 0, tokens[:-1], [])], 128, "equal")
        rows = session.model.forward(ubatch, memory, taps=drafter.taps).rows[0]
        drafter.observe(0, 0, tokens[:-1], rows)
        (draft,) = drafter.draft([DraftRequest(0, len(tokens) - 1, tokens[-1], 3)])
        return draft

    drafted(used, texts[0])
    assert used.held(0)
    used.forget(0)
    assert not used.held(0)
    both = [drafted(drafter, texts[1]) for drafter in (used, fresh)]
    assert both[0].tokens == both[1].tokens and both[0].probs == both[1].probs
