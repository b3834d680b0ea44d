"""Mistakes of look-ups that happen in some rounds alone are named by what and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.audit.recorded_drafts import RecordedDraft
from engine.draft import ngram_cache, ngram_mod
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_cache import NgramCache, learn
from engine.draft.ngram_drafter import History, NgramSizes
from engine.draft.ngram_mod import NgramModOptions, NgramPool
from engine.draft.registry import DRAFTERS
from engine.draft.spec import DrafterInputs
from engine.draft.suffix import SuffixOptions, SuffixTree
from engine.memory.hybrid import LentMemories
from engine.model.layers import TargetRows
from engine.observe.drafter_diff.looked_up import LookedUp
from engine.observe.drafter_diff.records import Cause
from engine.options import RunOptions, SpecOptions

_ROWS, _N_PROMPT = TargetRows(torch.empty(0)), 80
Learns = Callable[[int, int], int | None]
Drafts = Callable[[list[int], tuple[int, int]], list[int]]


def _text(seed: int) -> list[int]:
    """Phrases that come again and again, some with another end."""
    random = np.random.default_rng(seed)
    phrases = [random.integers(3, 200, 9).tolist() for _ in range(5)]
    found: list[int] = []
    while len(found) < 600:
        one = [*phrases[int(random.integers(5))]]
        if random.random() < 0.5:
            cut = int(random.integers(1, 9))
            one[cut:] = random.integers(3, 200, 9 - cut).tolist()
        found += one
    return found


def _options(name: str) -> RunOptions:
    sizes = NgramSizes(size_n=2, size_m=5)
    spec = SpecOptions(
        types=(name,),
        ngram_simple=sizes,
        ngram_map_k=sizes,
        ngram_map_k4v=sizes,
        ngram_mod=NgramModOptions(n_match=2, n_min=0, n_max=5),
        suffix=SuffixOptions(n_max=5),
    )
    return RunOptions(spec=spec)


def _cause(name: str, learns: Learns, drafts: Drafts = lambda tokens, _: tokens) -> Cause | None:
    """What is said of a run whose drafter learns and drafts so, after the outcome before."""
    return LookedUp(_side(name, learns, drafts), _options(name)).cause()


def _side(
    name: str,
    learns: Learns,
    drafts: Drafts = lambda tokens, _: tokens,
    *,
    replays: bool = False,
    sees: Callable[[list[int]], list[int]] = lambda tokens: tokens,
    n_known: int = _N_PROMPT,
) -> Any:
    """replays: what is accepted of a draft is verified again after a rejection. sees: what the
    drafter is shown of the tokens of a round. n_known: of the prompt."""
    options, text = _options(name), _text(7)
    spec = DRAFTERS[name]
    of: Any = spec.options_of(options.spec)
    target: Any = SimpleNamespace(config=SimpleNamespace(n_vocab=300))
    lent, longest = LentMemories(), spec.longest(of)
    drafter = spec.make(DrafterInputs(target, None, of, 1, 2048, 512, False, None, lent))
    drafter.begin(0, text[:n_known])
    at, last, starts, found = _N_PROMPT, (1, 1), list[int](), list[RecordedDraft]()
    while at < len(text) - 10:
        starts.append(at)
        (made,) = drafter.draft([DraftRequest(0, at, text[at], longest)])
        tokens = drafts(made.tokens[:longest], last)
        pairs = enumerate(zip(tokens, text[at + 1 :], strict=False))
        n = next((i for i, (one, two) in pairs if one != two), len(tokens))
        again = replays and n < len(tokens)
        if tokens:
            of_round = len(starts), at, tokens, [], n, 0, 0.0, len(tokens), again
            found.append(RecordedDraft(*of_round))
            n += again
            last = n, len(tokens)
            if (known := learns(n, len(tokens))) is not None:
                drafter.accept(0, known, is_other=False)
        drafter.observe(0, at, sees(text[at : at + n + 1]), _ROWS)
        at += n + 1
    return SimpleNamespace(
        drafters=[name],
        text=text,
        n_prompt=_N_PROMPT,
        starts=starts,
        drafts=found,
        session=SimpleNamespace(model=target),
        looks_up=True,
        name="B",
        n_confirmed=lambda draft: draft.n_accepted,
    )


_RIGHT: Learns = lambda n, of: n  # noqa: E731


@pytest.mark.parametrize("n", [11, 16])
def test_the_end_of_the_prompt_may_be_missing(n: int) -> None:
    side = _side("suffix", _RIGHT, n_known=_N_PROMPT - n)
    cause = LookedUp(side, _options("suffix")).cause()
    assert cause is not None and cause.about.startswith(f"It lacks the prompt's last {n} tokens.")


@pytest.mark.parametrize(
    ("name", "learns", "words"),
    [
        ("ngram-map-k", lambda n, of: n - (n == of), "too few, only after a"),
        (
            "ngram-map-k",
            lambda n, of: n or None,
            "how many of its tokens were accepted, only after a",
        ),
        ("ngram-map-k4v", lambda n, of: 0 if 0 < n < of else n, "only after a partly acc"),
        ("ngram-mod", lambda n, of: 0 if n < of else n, "LOW_ACCEPTANCE were 1"),
    ],
)
def test_what_is_learned_after_some_outcomes_is_named(
    name: str, learns: Learns, words: str
) -> None:
    cause = _cause(name, learns)
    assert cause is not None and words in cause.about, str(cause)


@pytest.mark.parametrize(
    ("name", "drafts", "words"),
    [
        (
            "suffix",
            lambda tokens, last: tokens[: 1 if last[0] == last[1] else 9],
            "at most 1 token, only after a fully accepted draft",
        ),
        (
            "ngram-simple",
            lambda tokens, last: tokens[: 2 if 0 < last[0] < last[1] else 9],
            "at most 2 tokens, only after a partly accepted draft",
        ),
        ("ngram-mod", lambda tokens, last: tokens[last[0] == last[1] :], "lack their first token"),
    ],
)
def test_how_drafts_end_after_some_outcomes_is_named(name: str, drafts: Drafts, words: str) -> None:
    cause = _cause(name, _RIGHT, drafts)
    assert cause is not None and words in cause.about, str(cause)


@pytest.mark.parametrize(
    ("module", "changed", "stage", "words"),
    [
        (ngram_mod, {"LOW_STREAK": 2}, "drafter state", "LOW_STREAK were 2, not 5"),
        (ngram_mod, {"CHUNK": 90}, "drafter state", "CHUNK were 90, not 32"),
        *(
            (ngram_mod, {"N_ENTRIES": n, "_MASK": n - 1}, "drafter state", f"about {n} entries")
            for n in (64, 128, 512)
        ),
        (ngram_cache, {"LAX": ngram_cache.STRICT}, "candidates", "LAX were the numbers of STRICT"),
    ],
)
def test_another_number_of_a_look_up_is_named(
    module: Any, changed: dict[str, Any], stage: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = module.SPEC.name
    with monkeypatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(module, name, value)
        side = _side(drafter, _RIGHT)
    cause = LookedUp(side, _options(drafter)).cause()
    assert cause is not None and words in cause.about, str(cause)
    assert cause.stage == stage


def test_what_gives_the_same_look_ups_is_said_too() -> None:
    cause = _cause("ngram-simple", _RIGHT, lambda tokens, _: tokens[:2])
    assert cause is not None and "These would give the same drafts: " in cause.about


def test_tokens_that_follow_each_other_nowhere_are_of_another_text() -> None:
    def foreign(tokens: list[int], _: tuple[int, int]) -> list[int]:
        return [token + 200 if i else token for i, token in enumerate(tokens)]

    cause = _cause("suffix", lambda n, _: n, foreign)
    assert cause is not None and cause.stage == "drafter state"
    assert "are nowhere in the text in this order" in cause.about


def _learns_drafts(self: NgramCache, seq: int, history: History, last: int) -> Draft:
    draft = _LOOK_UP(self, seq, history, last)
    learn(self._tables[seq], [*history.part(-3), last, *draft.tokens], 4)
    return draft


def _learns_all(self: NgramCache, seq: int, history: History, last: int) -> Draft:
    self._tables[seq] = {}
    self._n_learned[seq] = 0
    return _LOOK_UP(self, seq, history, last)


_LOOK_UP = NgramCache._look_up


@pytest.mark.parametrize(
    ("look_up", "about"),
    [
        (_learns_drafts, "It learns from its own drafts, including rejected tokens."),
        (_learns_all, "It also learns n-grams that span two lookups."),
    ],
)
def test_what_a_cache_learns_otherwise_is_named(
    look_up: Callable[..., Draft], about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(NgramCache, "_look_up", look_up)
        side = _side("ngram-cache", _RIGHT)
    cause = LookedUp(side, _options("ngram-cache")).cause()
    assert cause is not None and (cause.stage, cause.about) == ("drafter state", about), str(cause)


def _keeps_the_first(self: NgramPool, tokens: list[int]) -> None:
    for end in range(self._n, len(tokens)):
        at = ngram_mod.entry_of(tokens[end - self._n : end])
        if self._entries[at] == -1:
            self._entries[at] = tokens[end]


def _newest_first(self: SuffixTree, at: Any) -> Any:
    return reversed([*_CHILDREN(self, at)])


_CHILDREN = SuffixTree._children


@pytest.mark.parametrize(
    ("name", "change", "about"),
    [
        ("ngram-mod", (NgramPool, "add", _keeps_the_first), "the first token that followed"),
        ("suffix", (SuffixTree, "_children", _newest_first), "the newest, not the oldest"),
    ],
)
def test_which_of_several_places_is_copied_is_named(
    name: str, change: Any, about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*change)
        side = _side(name, _RIGHT)
    cause = LookedUp(side, _options(name)).cause()
    assert cause is not None and cause.stage == "drafter state" and about in cause.about, str(cause)


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(
    "name", ["ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache", "suffix"]
)
def test_right_look_ups_are_not_accused(name: str, replays: bool) -> None:
    side = _side(name, _RIGHT, replays=replays)
    assert LookedUp(side, _options(name)).cause() is None


@pytest.mark.parametrize("name", ["ngram-simple", "ngram-mod"])
def test_what_is_seen_of_a_round_may_be_other_tokens(name: str) -> None:
    def again(tokens: list[int]) -> list[int]:
        return tokens[:1] * len(tokens)

    cause = LookedUp(_side(name, _RIGHT, sees=again), _options(name)).cause()
    assert cause is not None and cause.stage == "drafter state"
    assert "It sees each token of a round as its first one" in cause.about, str(cause)
