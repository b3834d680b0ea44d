"""suffix as a drafter: what its trees are told, what they forget, and what it says of a draft."""

from __future__ import annotations

import pytest

from engine.analysis.findings.check import find
from engine.draft.drafter import DraftRequest
from engine.draft.registry import meaning
from engine.draft.suffix import SuffixDrafter, SuffixOptions, SuffixTexts
from engine.draft.suffix_tree import SuffixLimits
from engine.options import RunOptions, SpecOptions
from tests.support.golden_runs import MTP_MODELS, decode, prompt_of, session, tokens_of

HIDDEN = None
"""It never looks at hidden rows."""


def drafter(**options) -> SuffixDrafter:
    return SuffixDrafter(SuffixOptions(max_spec_factor=4.0, min_token_prob=0.0, **options))


def ask(one: SuffixDrafter, seq: int, pos0: int, last: int, n_max: int = 8):
    return one.draft([DraftRequest(seq, pos0, last, n_max)])[0]


def test_its_own_text_is_prompt_and_output():
    one = drafter()
    one.begin(0, [1, 2, 3, 4, 1])
    draft = ask(one, 0, 5, 2, n_max=2)
    assert draft.tokens == [3, 4]
    # the text itself goes on from its newest place in no way yet
    assert draft.probs == [0.5, 1.0]
    assert (draft.top_ids, draft.top_probs) == ([[3], [4]], [[0.5], [1.0]])
    assert draft.reason == "limit"
    one.observe(0, 5, [2, 9, 2], HIDDEN)  # two drafts came true otherwise; 2 is known already
    assert ask(one, 0, 8, 9).tokens[:1] == [2]


def test_an_output_is_found_by_others_and_a_prompt_is_not():
    one = drafter()
    one.begin(0, [1, 2, 3])
    one.observe(0, 3, [7, 8, 9], HIDDEN)
    one.forget(0)
    one.begin(0, [5, 7])
    assert ask(one, 0, 2, 8).tokens == [9]
    one.begin(1, [5, 1])
    assert ask(one, 1, 2, 2).tokens == []
    assert ask(one, 1, 3, 3).reason == "no-match"


def test_a_slot_that_is_resumed_is_another_request():
    one = drafter()
    one.begin(0, [1, 2, 3, 1])
    one.resume(0, 2)
    one.observe(0, 2, [3, 1], HIDDEN)  # a part of the prompt
    one.begin(0, [1, 2, 3, 1])
    assert ask(one, 0, 4, 2, n_max=2).tokens == [3, 1]


@pytest.mark.parametrize(("max_cached", "kept"), [(0, 0), (2, 2), (-1, 6)])
def test_the_oldest_outputs_are_forgotten(max_cached, kept):
    texts = SuffixTexts(8, max_cached)
    for request in range(6):
        texts.start(request, [request])
        texts.add(request, [50, 10 + request])
    assert texts.n_cached == kept
    texts.start(99, [4])
    texts.add(99, [4, 50])
    found = texts.draft(99, SuffixLimits(1)).draft
    # of equal counts the output that is kept longest; making room for 99 took one more
    assert found.tokens == ([10 + 6 - kept + (max_cached > 0)] if kept else [])


def test_confidences_reach_the_trace_and_no_token_changes():
    name = MTP_MODELS[0]
    prompts = [prompt_of(name)] * 3  # what the first puts out is drafted for the others
    plain = tokens_of(decode(session(name), prompts, RunOptions(n_predict=24)))
    spec = SpecOptions(types=("suffix",), suffix=SuffixOptions(max_spec_factor=4.0))
    run = decode(session(name), prompts, RunOptions(n_predict=24, spec=spec, parallel=2))
    assert tokens_of(run) == plain
    assert run.summary()["draft_n_accepted"] > 20
    table = run.trace.tokens
    drafted = table.column("draft_index") >= 0
    p = table.column("draft_p")[drafted]
    assert ((p > 0) & (p <= 1)).all()
    assert (table.column("draft_top_id")[drafted][:, 0] == table.column("token_id")[drafted]).all()
    reasons = set(run.trace.drafts.texts("reason")) - {""}
    assert reasons
    assert all(meaning(reason) for reason in reasons)
    assert find(run.trace) == []
