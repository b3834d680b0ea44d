"""Who is asked, whose draft wins, who learns how it fared, and what is counted."""

from __future__ import annotations

import pytest
import torch

from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.model.layers import TargetRows
from engine.options import DRAFTERS, SpecOptions
from tests.support.golden_runs import options_of, session


class Fixed(Drafter):
    """Answers with a given draft per sequence and remembers every call."""

    def __init__(self, name, drafts):
        self.name, self.drafts, self.asked, self.heard = name, drafts, [], []

    def begin(self, seq, prompt):
        self.heard.append(("begin", seq, list(prompt)))

    def observe(self, seq, pos0, tokens, hidden):
        self.heard.append(("observe", seq, pos0, list(tokens)))

    def draft(self, requests):
        self.asked.append([r.seq for r in requests])
        return [
            Draft(list(self.drafts.get(r.seq, [])), drafter=self.name, reason="no-match")
            for r in requests
        ]

    def accept(self, seq, n_accepted, *, is_other):
        self.heard.append(("accept", seq, n_accepted, is_other))

    def forget(self, seq):
        self.heard.append(("forget", seq))


def ask(chain: DrafterChain, *seqs: int, n_max: int = 3) -> dict[int, Draft]:
    return chain.draft([DraftRequest(seq, 0, 0, n_max) for seq in seqs])


def test_the_next_drafter_is_asked_for_what_is_missing():
    first, second = Fixed("a", {0: [1]}), Fixed("b", {0: [9], 1: [2]})
    chain = DrafterChain([first, second])
    drafts = ask(chain, 0, 1, 2)
    assert {seq: (d.drafter, d.tokens) for seq, d in drafts.items()} == {
        0: ("a", [1]),
        1: ("b", [2]),
    }
    assert second.asked == [[1, 2]]
    assert [(seq, draft.drafter, draft.tokens) for seq, draft in chain.asked] == [
        (0, "a", [1]),
        (1, "a", []),
        (2, "a", []),
        (1, "b", [2]),
        (2, "b", []),
    ]
    ask(chain, 0)
    assert [draft.drafter for _, draft in chain.asked] == ["a"]


def test_a_draft_is_cut_to_the_limit():
    drafts = ask(DrafterChain([Fixed("a", {0: [1, 2, 3, 4], 1: [5]})]), 0, 1, n_max=2)
    assert (drafts[0].tokens, drafts[0].n_raw, drafts[0].reason) == ([1, 2], 4, "limit")
    assert (drafts[1].tokens, drafts[1].n_raw, drafts[1].reason) == ([5], 1, "no-match")


def test_a_cut_keeps_the_columns_of_a_draft_equally_long():
    draft = Draft([1, 2], [0.5, 0.4], [[1], [2]], [[0.5], [0.4]])
    draft.cut(1, "limit")
    assert (draft.tokens, draft.probs, draft.top_ids, draft.top_probs) == (
        [1],
        [0.5],
        [[1]],
        [[0.5]],
    )


def test_the_winner_and_the_others_learn_of_the_verification():
    first, second = Fixed("a", {0: [1]}), Fixed("b", {1: [2, 3]})
    chain = DrafterChain([first, second])
    ask(chain, 0, 1)
    chain.accept(1, 2)
    chain.accept(0, 0)
    assert first.heard == [("accept", 1, 2, True), ("accept", 0, 0, False)]
    assert second.heard == [("accept", 1, 2, False), ("accept", 0, 0, True)]


def test_everyone_hears_what_happens_to_a_sequence():
    drafters = [Fixed("a", {}), Fixed("b", {})]
    chain = DrafterChain(drafters)
    chain.observe(4, 0, [7, 8], TargetRows(torch.zeros(2, 1)))
    chain.begin(4, [7, 8])
    chain.forget(4)
    for drafter in drafters:
        assert drafter.heard == [("observe", 4, 0, [7, 8]), ("begin", 4, [7, 8]), ("forget", 4)]


def test_counters_follow_the_rules_of_llama_server():
    chain = DrafterChain([Fixed("a", {0: [1, 2, 3, 4]}), Fixed("b", {1: [5]})])
    chain.begin(0, [1])
    for accepted in (2, 0, 1):
        ask(chain, 0, 1)
        chain.accept(0, accepted)
        chain.accept(1, 1)
    a, b = chain.statistics["a"], chain.statistics["b"]
    assert {name: a[name] for name in a if name.startswith("n_")} == {
        "n_call_begin": 1,
        "n_call_draft": 3,
        "n_call_accept": 3,
        "n_gen_drafts": 3,
        "n_acc_drafts": 2,
        "n_gen_tokens": 9,
        "n_acc_tokens": 3,
    }
    assert (b["n_gen_drafts"], b["n_acc_drafts"], b["n_acc_tokens"]) == (3, 3, 3)
    assert all(a[f"{phase}_ms"] >= 0 for phase in ("begin", "draft", "accept"))


def test_a_draft_from_elsewhere_has_no_winner():
    drafter = Fixed("a", {})
    DrafterChain([drafter]).accept(0, 1)
    assert drafter.heard == [("accept", 0, 1, True)]


def test_the_order_is_fixed_whatever_the_options_say():
    named = (
        "draft-mtp",
        "suffix",
        "ngram-cache",
        "ngram-map-k4v",
        "ngram-simple",
        "ngram-mod",
        "ngram-map-k",
    )
    drafters = session("qwen35-c-v2x-mtp-f32").make_drafters(options_of(4, *named), 1, 64)
    assert [drafter.name for drafter in drafters] == [
        name for name, spec in DRAFTERS.items() if not spec.has_file
    ]


@pytest.mark.parametrize(
    ("types", "longest"),
    [
        ((), 0),
        (("draft-mtp",), 5),
        (("ngram-cache",), 8),
        (("ngram-cache", "draft-mtp"), 8),
        (("ngram-simple",), 48),
        (("ngram-mod", "ngram-map-k"), 64),
    ],
)
def test_the_longest_draft_is_that_of_the_drafters_in_use(types, longest):
    assert SpecOptions(types=types, n_max=5).longest == longest
