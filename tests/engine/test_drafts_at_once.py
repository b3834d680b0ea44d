"""A whole draft of the MTP head as one pass of its memory: the drafts that its steps make."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from engine.draft import draft_mtp
from engine.draft.draft_mtp import DraftMtp
from engine.memory.hybrid import HybridMemory
from engine.model.mtp import DraftHead, MtpHead
from engine.options import Prompt
from engine.run import Run
from kernels.dispatch import uses_llvm
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session
from tests.support.recorded_runs import assert_same

MTP = "qwen35-c-v2x-mtp-f32"

pytestmark = pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")


@pytest.fixture
def at_once(monkeypatch) -> list[bool]:
    """For every draft of one sequence whether it was made at once."""
    made, original = list[bool](), DraftMtp._at_once

    def watched(self, request):
        draft = original(self, request)
        made.append(draft is not None)
        return draft

    monkeypatch.setattr(DraftMtp, "_at_once", watched)
    return made


def by_steps(name: str, prompts: list[Prompt], options) -> Run:
    with patch.object(HybridMemory, "takes_parts", lambda self, n_tokens: False):
        return decode(session(name), prompts, options)


@pytest.mark.parametrize("n_max", [1, 2, 3, 6])
@pytest.mark.parametrize("name", [MTP, "qwen35-h-v2x-mtp-q8_0"])
@pytest.mark.thinned(8)
def test_drafts_are_those_of_steps(name, n_max, at_once):
    # beyond the cells that are allocated at first
    options = options_of(280, "draft-mtp", n_max=n_max, rollback="planes", sampler=SAMPLED)
    found = decode(session(name), [prompt_of(name)], options)
    assert sum(at_once) > len(at_once) / 2
    assert_same(found, by_steps(name, [prompt_of(name)], options))


@pytest.mark.parametrize("others", [{"kv": "unified"}, {"batch_invariant": True}])
def test_sequences_that_share_memory(others, at_once):
    """The second sequence drafts alone, after the first, once that has ended."""
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[:4]), Prompt(tokens)]
    options = options_of(60, "draft-mtp", rollback="ring", parallel=2, **others)
    runs = [session(MTP).start(prompts, options)]
    for _ in range(6):
        runs[0].step()
    runs[0].cancel(0)
    while runs[0].step():
        pass
    assert sum(at_once) > 5
    alone = by_steps(MTP, prompts[1:], options)
    assert runs[0].results()[1].tokens == alone.results()[0].tokens


def test_where_two_tokens_are_equally_probable_steps_decide(at_once, monkeypatch):
    options = options_of(60, "draft-mtp", rollback="planes")
    expected = by_steps(MTP, [prompt_of(MTP)], options)
    draft, calls = MtpHead.draft, list[int]()

    def other_choice(self, *args):
        tokens, logits, ids = draft(self, *args)
        tokens = tokens.clone()
        calls.append(1)
        if len(calls) % 3 == 0:
            tokens[-1] += 1 if tokens[-1] == 0 else -1
        return tokens, logits, ids

    monkeypatch.setattr(MtpHead, "draft", other_choice)
    monkeypatch.setattr(draft_mtp, "LargestLogits", DraftHead)  # candidates in no order
    assert_same(decode(session(MTP), [prompt_of(MTP)], options), expected)
    assert at_once.count(False) >= len(calls) // 3 > 2


def test_what_looks_between_steps_is_not_made_at_once(at_once):
    spec = options_of(20, "draft-mtp", rollback="planes")
    floor = replace(spec, spec=replace(spec.spec, p_min=0.3))
    decode(session(MTP), [prompt_of(MTP)], floor)
    assert not at_once
