"""suffix: its tree against a naive one, what its trees learn and forget, reasons of its drafts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import find
from engine.draft.drafter import DraftRequest
from engine.draft.registry import meaning
from engine.draft.suffix import (
    StoredSequence,
    SuffixDrafter,
    SuffixOptions,
    SuffixTexts,
    SuffixTree,
)
from engine.options import RunOptions, SpecOptions
from tests.support.golden_files import DATA
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
    assert len(texts._cached) == kept
    texts.start(99, [4])
    texts.add(99, [4, 50])
    found, *_ = texts.draft(99, 1, SuffixOptions())
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


SCENARIOS = [one for one in json.loads((DATA / "suffix.json").read_text()) if not one["tree"]]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: f"depth-{one['max_tree_depth']}")
def test_drafts_are_those_of_the_published_implementation(scenario):
    texts = SuffixTexts(scenario["max_tree_depth"], scenario["max_cached_requests"])
    options = SuffixOptions(
        **{
            name: scenario[name]
            for name in ("max_spec_factor", "max_spec_offset", "min_token_prob")
        }
    )
    n_drafted = 0
    for what, name, *values in scenario["ops"]:
        request = int(name[1:])
        if what == "start":
            texts.start(request, values[0])
        elif what == "add":
            texts.add(request, values[0])
        elif what == "stop":
            texts.stop(request)
        else:
            (expected,) = values
            found, tree, _ = texts.draft(request, scenario["max_spec_tokens"], options)
            assert found.tokens == expected["tokens"]
            assert found.probs == pytest.approx(expected["probs"], abs=1e-4)
            assert found.score == pytest.approx(expected["score"], abs=1e-4)
            assert found.n_match == expected["match_len"]
            assert (tree is texts._requests[request][0]) == (expected["source"] == "local")
            n_drafted += bool(found.tokens)
    assert n_drafted > 20


def n_nodes(tree: SuffixTree) -> int:
    """Nodes in memory."""
    waiting, n = [tree._root], 0
    while waiting:
        children = waiting.pop()
        n += len(children)
        waiting += [node.children for node in children.values() if node.children]
    return n


class CountedByHand:
    """The same trie as a table of all paths, each with its count and the time it was created."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.nodes: dict[tuple[int, ...], list[int]] = {}
        self.now = 0

    def add(self, text: list[int], token: int) -> None:
        text.append(token)
        for n in range(1, min(self.depth, len(text)) + 1):
            self.now += 1
            self.nodes.setdefault(tuple(text[-n:]), [0, self.now])[0] += 1

    def remove(self, text: list[int]) -> None:
        for start in range(len(text)):
            for end in range(start + 1, min(start + self.depth, len(text)) + 1):
                path = tuple(text[start:end])
                self.nodes[path][0] -= 1
                if not self.nodes[path][0]:
                    del self.nodes[path]

    def draft(
        self, pattern: list[int], n_max: int, options: SuffixOptions
    ) -> tuple[list[int], list[float], int]:
        best: tuple[float, list[int], list[float], int] = (0.0, [], [], 0)
        for m in range(1, len(pattern)):
            path = tuple(pattern[-m:])
            if path not in self.nodes:
                break
            tokens: list[int] = []
            probs: list[float] = []
            longest = int(m * options.max_spec_factor + options.max_spec_offset + 1e-6)
            while len(tokens) < min(n_max, longest):
                ahead = [p for p in self.nodes if len(p) == len(path) + 1 and p[:-1] == path]
                if not ahead:
                    break
                chosen = min(ahead, key=lambda p: (-self.nodes[p][0], self.nodes[p][1]))
                given_ = probs[-1] if probs else 1.0
                p = given_ * self.nodes[chosen][0] / self.nodes[path][0]
                if p < options.min_token_prob:
                    break
                tokens.append(chosen[-1])
                probs.append(p)
                path = chosen
            if sum(probs) >= best[0]:
                best = (sum(probs), tokens, probs, m)
        return best[1:]


ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "add", "add", "new"]), st.integers(0, 2)),
    min_size=20,
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(ACTS, st.integers(1, 6), st.sampled_from([0.0, 0.3, 0.5]), st.sampled_from([0.5, 1.0, 3.0]))
def test_every_draft_is_that_of_counting_by_hand(acts, depth, min_prob, factor):
    """Texts over three tokens side by side in one tree; a fourth one displaces the oldest."""
    tree, table = SuffixTree(depth), CountedByHand(depth)
    texts: list[tuple[StoredSequence, list[int]]] = [(StoredSequence(), [])]
    options = SuffixOptions(max_spec_factor=factor, min_token_prob=min_prob)
    for i, (what, token) in enumerate(acts):
        if what == "new":
            texts.append((StoredSequence(), []))
            if len(texts) > 3:
                stored, text = texts.pop(0)
                tree.remove(stored)
                table.remove(text)
        stored, text = texts[i % len(texts)]
        tree.append(stored, [token])
        table.add(text, token)
        for _, other in texts:
            pattern = other[-depth:]
            found = tree.draft(pattern, 8, options)
            assert (found.tokens, found.probs, found.n_match) == table.draft(pattern, 8, options)
    for stored, _ in texts:
        tree.remove(stored)
    assert n_nodes(tree) == 0


def test_text_that_never_repeats_costs_a_node_per_token():
    tree, text = SuffixTree(24), StoredSequence()
    tree.append(text, range(1000))
    assert n_nodes(tree) == 1000
    tree.append(StoredSequence(), range(1000))
    assert n_nodes(tree) == sum(min(24, 1000 - i) for i in range(1000))


def test_the_choices_are_counts_in_order():
    tree = SuffixTree(4)
    for follower in (5, 6, 6, 7, 7, 7):
        tree.append(StoredSequence(), [1, follower, 9])
    draft = tree.draft([3, 1], 4, SuffixOptions(max_spec_factor=2.0))
    assert (draft.tokens, draft.probs, draft.reason) == ([7, 9], [0.5, 0.5], "short-match")
    choices = tree.choices([3, 1], draft, 2)
    assert choices == [[(7, 0.5), (6, 1 / 3)], [(9, 1.0)]]


@pytest.mark.parametrize(
    ("factor", "min_prob", "reason"),
    [
        (9.0, 0.1, "text-end"),
        (1.0, 0.1, "short-match"),
        (9.0, 0.7, "low-share"),
        (0.0, 0.1, "short-match"),
    ],
)
def test_why_a_draft_ends(factor, min_prob, reason):
    options = SuffixOptions(max_spec_factor=factor, min_token_prob=min_prob)
    tree = SuffixTree(4)
    tree.append(StoredSequence(), [1, 2, 3])
    tree.append(StoredSequence(), [1, 2, 4])
    assert tree.draft([8, 1], 9, options).reason == reason
    assert tree.draft([1, 8], 9, options).reason == "no-match"
