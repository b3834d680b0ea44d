"""Planted mistakes are named first, runs without one are not accused, and what cannot be compared
is refused. tests.support.drafter_diff_campaign plays all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.audit.recorded_drafts import RecordedDraft
from engine.draft import ngram_cache
from engine.draft.model_drafter import ModelDrafter
from engine.errors import OptionError, UnsupportedModelError
from engine.observe.drafter_diff.diff import DrafterDiff, PairDiff, drafter_diff
from engine.observe.drafter_diff.records import (
    NEAR_CHOICE,
    RULE,
    Cause,
    _dropped,
    length_causes,
    prompt_cause,
)
from engine.observe.drafter_diff.sides import sides_of
from engine.observe.drafter_diff.target_choices import TargetChoices
from engine.observe.files.importing import import_file
from engine.options import Prompt, SamplerOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET
from tests.support.acceptance_campaign import Records
from tests.support.captures import SHARED
from tests.support.drafter_diff_campaign import kinds, opened, play_clean, play_planted
from tests.support.golden_runs import decode, options_of, prompt_of, session
from tests.support.observed_texts import CAPTURED_TARGET


@pytest.mark.parametrize("name", ["before the norm", "stale row", "other cut", "counts late"])
@pytest.mark.thinned(4)
def test_a_planted_mistake_is_named_first(name: str) -> None:
    played = play_planted(name, 1)
    assert played.right, str(played)
    assert played.says_which, str(played)
    cause = played.found.first
    assert cause is not None
    if cause.mended is not None and cause.recorded is not None:
        assert cause.mended[0] / cause.mended[1] != cause.recorded[0] / cause.recorded[1]


@pytest.mark.parametrize(
    "name",
    ["other mask", "prompt cut", "newest rejected", "other anchor", "no window", "8-bit offsets"],
)
@pytest.mark.skipif("dflash" not in kinds(), reason="the drafters are next to the tree")
@pytest.mark.thinned(5)
def test_a_mistake_of_a_block_is_named(name: str) -> None:
    played = play_planted(name, 4)
    assert played.right and played.says_which, str(played)


@pytest.mark.parametrize(
    "name", ["scaled rows", "first dropped", "stale when whole", "few cells", "fused rows normed"]
)
@pytest.mark.thinned(5)
def test_a_mistake_that_no_one_listed_is_named_by_its_stage(name: str) -> None:
    played = play_planted(name, 1)
    assert played.right and played.says_which, str(played)


@pytest.mark.parametrize("name", ["only the prompt", "second choice"])
@pytest.mark.thinned(4)
def test_a_mistake_of_a_look_up_is_named(name: str) -> None:
    played = play_planted(name, 9119)
    assert played.right and played.says_which, str(played)


@pytest.mark.parametrize(
    "name",
    [
        *("half rolled back", "cut too far", "cut too far in rows", "read as padding"),
        *("earliest match", "judged counts"),
    ],
)
@pytest.mark.thinned(5)
def test_a_mistake_in_one_place_is_named_by_it(name: str) -> None:
    played = play_planted(name, 3)
    assert played.right and played.says_which, str(played)


@pytest.mark.parametrize("name", ["n_max", "no first token", "never the last"])
def test_some_are_seen_without_a_model(name: str) -> None:
    played = play_planted(name, 3, blind=True)
    assert played.right, str(played)


@pytest.mark.parametrize("blind", [False, True])
def test_runs_without_a_mistake_are_not_accused(blind: bool) -> None:
    played = play_clean(2, blind=blind)
    assert played.right, str(played)
    assert all(pair.n_contexts > 5 for pair in played.found.pairs)


@pytest.mark.parametrize(
    ("n_else", "accused"), [((7, 4), ""), ((8, 3), ""), ((9, 1), "B"), ((5, 0), "B")]
)
def test_what_the_texts_of_both_have_is_rounding(
    n_else: tuple[int, int], accused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_side = dict(zip("BA", n_else, strict=True))

    def stale_choice(self: TargetChoices) -> Cause | None:
        name = self._side.name
        return Cause(RULE, name, NEAR_CHOICE, "position 9") if name == "B" else None

    monkeypatch.setattr(TargetChoices, "stale_choice", stale_choice)
    of_side = property(lambda self: (by_side[self._side.name], 24))
    monkeypatch.setattr(TargetChoices, "n_else", of_side)
    for pair in play_clean(2).found.pairs:
        assert [one.side for one in pair.causes] == [*accused]
        assert any("closer together" in one.fact for one in pair.missing) == (not accused)


def about_look_ups(name: str, values: Iterable[Any]) -> str:
    """What the first cause between runs of ngram-cache with two values of a name says."""
    target, runs = opened("mtp"), []
    head = "def area(w, h):\n    return w * h\n\n"
    prompt = target.prompt(f"{head}def cost(w, h):\n    return w * h * 2\n\ndef area(w, h):\n")
    options = replace(options_of(220, "ngram-cache"), ignore_eos=True)
    for value in values:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ngram_cache, name, value)
            run = decode(target, [prompt], options)
        runs.append(RunRef(run.trace, run.run_id))
    first = drafter_diff(*runs, target).first
    assert first is not None and (first.stage, first.side) == ("candidates", "B")
    return first.about


def test_what_another_sequence_taught_a_look_up_is_no_mistake() -> None:
    played = play_clean(78005)  # some drafts go on as the other sequence did
    assert played.kind == "suffix" and len(played.found.pairs) == 2
    assert played.right, str(played)


def test_look_ups_of_fewer_tokens_are_named() -> None:
    likely = ngram_cache.most_likely
    about = about_look_ups("most_likely", [partial(_of_the_last, likely, n) for n in (4, 2)])
    assert "n-grams of at most 2 tokens" in about


def test_a_constant_of_a_look_up_is_named() -> None:
    lax = ngram_cache.LAX
    about = about_look_ups("LAX", [lax, tuple((0, share) for _, share in lax)])
    assert "no minimum number of observations" in about


def _of_the_last(likely: Any, n: int, find: Any, tail: Any, *more: Any) -> Any:
    return likely(find, tail[-n:], *more)


def test_p_min_of_all_tokens_is_named() -> None:
    """The confidence of a token is its probability among all, not among the ten best."""
    target, runs = opened("mtp"), []
    for step in (ModelDrafter._step, _of_all_tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafter, "_step", step)
            options = options_of(120, "draft-mtp")
            spec = replace(options.spec, p_min=0.8, n_max=5)
            prompt = target.prompt("There was a small dog who lived in a")
            run = decode(target, [prompt], replace(options, spec=spec))
        runs.append(RunRef(run.trace, run.run_id))
    first = drafter_diff(*runs, target).first
    assert first is not None and (first.stage, first.side) == ("candidates", "B")
    assert "probability over the whole vocabulary" in first.about


def _of_all_tokens(self: Any, requests: Any, logits: torch.Tensor, of: Any = None) -> Any:
    made = _STEP(self, requests, logits, of)
    total = torch.logsumexp(logits, -1, keepdim=True)
    return made._replace(probs=(made.values - total).exp())


_STEP = ModelDrafter._step


@pytest.mark.parametrize(
    ("reasons", "words", "stage"),
    [
        ({"", "non-finite"}, "NaN or infinite", "target rows"),
        ({""}, "context is full", "target rows"),
        ({"", "limit"}, "its context is full", "drafter state"),
        ({"", "state-behind"}, "its state does not match the text", "drafter state"),
    ],
)
def test_why_a_drafter_stops_drafting_is_said(reasons: set[str], words: str, stage: str) -> None:
    drafts = [RecordedDraft(i, 2 * i, [5], [], 1, 0, 0.0, 1 + i % 2) for i in range(20)]
    a, b = (
        SimpleNamespace(name=name, drafts=own, plain=plain, n_prompt=0, prompt=(), text=[5] * 60)
        for name, own, plain in (("A", drafts, []), ("B", drafts[:9], range(18, 40, 2)))
    )
    for side in (a, b):
        side.looks_up, side.reasons = False, reasons if side is b else set()
        side.knows_all = "limit" in reasons  # as this engine's runs
    both: Any = a, b
    (cause,) = _dropped(*both, 50)
    assert (cause.stage, cause.side, cause.place) == (stage, "B", "position 18")
    assert words in cause.about
    b.plain, b.reasons = range(18, 22, 2), set()
    assert not [*_dropped(*both, 50)]
    b.plain = range(18, 28, 2)
    assert [one.stage for one in _dropped(*both, 50)] == ["candidates"]


def test_drafts_may_be_shorter_only_after_a_rejection() -> None:
    """Not by a floor on the probability, though a token that is left out is less sure."""
    top = [{5: 0.4}, {5: 0.5}, {5: 0.6}]
    kept = [3 if i % 3 else i % 2 for i in range(24)]
    own = [RecordedDraft(i, 4 * i, [5] * 3, top, n, 0, 0.0, 3) for i, n in enumerate(kept)]
    cut = [
        two._replace(tokens=[5] * 2, tops=top[:2], n_drafted=2) if one.n_accepted < 2 else two
        for one, two in pairwise([own[1], *own])
    ]
    a, b = (
        SimpleNamespace(name=name, drafts=drafts, plain=[], text=[5] * 200, n_prompt=0)
        for name, drafts in (("A", own), ("B", cut))
    )
    for side in (a, b):
        side.prompt, side.reasons, side.looks_up, side.knows_all = (), set(), False, True
        side.has_lengths, side.always_drafts, side.n_beyond = True, True, 0
        side.advance = lambda _: None
    both: Any = a, b
    pairs: Any = [*zip(own, cut, strict=True)]
    (cause,) = length_causes(*both, pairs)
    assert cause.about == "B drafts fewer tokens than A, only after a rejection."
    b.drafts = [*cut[:-1], cut[-1]._replace(n_drafted=2, tokens=[5] * 2)]
    (cause,) = length_causes(*both, [*zip(own, b.drafts, strict=True)])  # type: ignore[arg-type]
    assert "another p_min" in cause.about


@pytest.mark.parametrize(("n_accepted", "words"), [(1, "fully accepted"), (0, "without acc")])
def test_after_which_drafts_there_is_none_is_said(n_accepted: int, words: str) -> None:
    top = [{5: 0.4}]
    own = [RecordedDraft(i, 2 * i, [5], top, i % 3 == 2, 0, 0.0, 1) for i in range(40)]
    if not n_accepted:
        own = [one._replace(n_accepted=1 - one.n_accepted) for one in own]
    plain = [one.pos0 for last, one in pairwise(own) if last.n_accepted == n_accepted]
    a, b = (
        SimpleNamespace(name=name, drafts=drafts, plain=none, n_prompt=0, prompt=(), text=[5] * 99)
        for name, drafts, none in (
            ("A", own, []),
            ("B", [one for one in own if one.pos0 not in plain], plain),
        )
    )
    for side in (a, b):
        side.looks_up, side.reasons, side.has_rejected = False, {""}, True
    both: Any = a, b
    (cause,) = _dropped(*both, 90)
    assert (cause.stage, cause.side) == ("candidates", "B") and words in cause.about, str(cause)
    b.plain = plain[1:]
    assert "only after" not in next(_dropped(*both, 90)).about


@pytest.mark.parametrize(
    ("always", "words"), [(True, ", up to position 14, A does in all"), (False, "")]
)
def test_rounds_without_a_draft_are_said_where_the_other_begins_its_own_elsewhere(
    always: bool, words: str
) -> None:
    sides = [
        SimpleNamespace(
            name=name,
            drafts=[RecordedDraft(i, at, [5], [], 1, 0, 0.0, 1) for i, at in enumerate(starts)],
            plain=plain,
            looks_up=False,
            always_drafts=always,
        )
        for name, starts, plain in (
            ("A", range(5, 90, 6), ()),
            ("B", range(16, 90, 3), range(10, 16, 2)),
        )
    ]
    for side in sides:
        side.n_prompt, side.prompt, side.text = 0, (), [5] * 99
    both: Any = sides
    found = [*_dropped(*both, 90)]
    assert [words in one.about for one in found] == [True] * always


def test_of_several_sequences_a_cause_that_explains_its_drafts_is_the_first() -> None:
    vague = Cause("target rows", "B", "Rows are wrong.", explains=False)
    causes = vague, Cause("target rows", "B", "Rows are zeros."), Cause("counting", "B", "Twice.")
    pairs = [PairDiff(i, i, (1, 2), (1, 2), 1, 9, 9, (one,), ()) for i, one in enumerate(causes)]
    for some, first in ((pairs, causes[1]), (pairs[::2], vague)):
        found = DrafterDiff(tuple(some), True).first
        assert found is not None and found.about.startswith(first.about[:-1])


def test_runs_that_have_only_sums_are_refused() -> None:
    records = Records(np.random.default_rng(1), 3)
    known = RunRef(records.play(20, lambda *_: 0.5), 0)
    empty = TraceStore()
    empty.begin_run({})
    for pair in ((known, known), (known, RunRef(empty, 0))):
        with pytest.raises(OptionError) as error:
            drafter_diff(*pair)
        assert error.value.remedy


def test_runs_of_two_vocabularies_are_refused_and_few_drafts_are_said_to_be_few() -> None:
    target, refs = opened("mtp"), []
    for text in ("import os", "import os"):
        run = decode(target, [target.prompt(text)], options_of(9, "draft-mtp"))
        refs.append(RunRef(run.trace, run.run_id))
    for model in (None, target):
        (pair,) = drafter_diff(*refs, model).pairs
        assert not pair.causes and any("too few" in one.fact for one in pair.missing)
    pieces = refs[1].store.pieces
    for i in [*pieces][:2]:  # as special tokens that one engine shows
        pieces[i] = b"<other>"
    assert drafter_diff(*refs).first is None
    pieces.update((i, b"x" + text) for i, text in [*pieces.items()])
    for model in (None, target):
        with pytest.raises(OptionError, match="different vocabularies"):
            drafter_diff(*refs, model)


def test_a_prompt_is_compared_by_its_text_where_one_side_knows_no_ids() -> None:
    target = opened("mtp")
    run = decode(target, [target.prompt("import os")], options_of(9, "draft-mtp"))
    side = sides_of("A", RunRef(run.trace, run.run_id))[0]
    others = {"import os": None, "def f(": "The prompts differ."}
    for text, about in others.items():
        asked: Any = SimpleNamespace(prompt=text, messages=[])
        found = prompt_cause(side, replace(side, name="B", prompt=None, asked=asked))
        assert (found.about if found else None) == about


def test_runs_of_two_drafters_are_refused() -> None:
    name = "qwen35-c-v2x-mtp-f32"
    refs = []
    for drafter in ("draft-mtp", "suffix"):
        run = decode(session(name), [prompt_of(name)], options_of(24, drafter))
        refs.append(RunRef(run.trace, run.run_id))
    with pytest.raises(OptionError, match="different drafters: draft-mtp and suffix"):
        drafter_diff(*refs)


def test_a_run_of_another_model_is_refused() -> None:
    name = "qwen35-c-v2x-mtp-f32"
    run = decode(session(name), [prompt_of(name)], options_of(6, "draft-mtp"))
    ref = RunRef(run.trace, run.run_id)
    with pytest.raises(UnsupportedModelError):
        drafter_diff(ref, ref, opened("mtp"))


def test_a_run_of_another_model_is_refused_where_its_prompt_is_another_one_too() -> None:
    refs = []
    for own, prompt in (
        (opened("mtp"), opened("mtp").prompt("import os")),
        (session("qwen35-c-v2x-mtp-f32"), prompt_of("qwen35-c-v2x-mtp-f32")),
    ):
        run = decode(own, [prompt], options_of(24, "draft-mtp"))
        refs.append(RunRef(run.trace, run.run_id))
    # in another compute mode the size of its weights does not show it
    with pytest.raises(
        UnsupportedModelError, match="The text of B was not generated by this model"
    ):
        drafter_diff(*refs, opened("mtp", "bf16"))


def test_a_copy_of_the_model_is_no_other_one(tmp_path: Path) -> None:
    options, prompt, runs = options_of(24, "draft-mtp"), opened("mtp").prompt("import os"), []
    for name in ("first", "second"):
        copy = tmp_path / name / "model.gguf"
        copy.parent.mkdir()
        shutil.copy(DEMO_TARGET, copy)
        run = decode(Session.open(copy, compute="f32"), [prompt], options)
        assert run.trace.runs[run.run_id].model["content"] is None
        runs.append(RunRef(run.trace, run.run_id))
    assert drafter_diff(*runs, opened("mtp")).first is None


@pytest.mark.skipif(not SHARED.exists(), reason="captures are next to the tree")
def test_a_server_and_this_engine_draft_alike() -> None:
    target, store = Session.open(CAPTURED_TARGET, compute="f32"), TraceStore()
    (run_id,) = import_file(store, SHARED / "mtp.json.gz")
    theirs = RunRef(store, run_id)
    side = sides_of("theirs", theirs, target)[0]
    assert side.prompt is not None
    options = options_of(len(side.ids), "draft-mtp")
    run = decode(target, [Prompt(side.prompt)], options)
    found = drafter_diff(theirs, RunRef(run.trace, run.run_id), target)
    assert found.first is None
    assert found.pairs[0].n_equal >= 45


def test_servers_that_accept_by_other_rules_differ_in_their_rule_and_no_draft_is_blamed() -> None:
    """Our run as that of a server whose log shows candidates of which the best is always taken, and
    as one whose drafter draws."""
    runs = []
    for temp in (1.0, 1.0, 0.0):
        run = decode(
            opened("mtp"),
            [opened("mtp").prompt("def add(a, b):")],
            replace(
                options_of(64, "draft-mtp"), sampler=SamplerOptions(temp=temp, seed=2, top_k=40)
            ),
        )
        ref = RunRef(run.trace, run.run_id)
        request = {"seq_ids": [0], "settings": {"temperature": temp, "top_k": 40}}
        del ref.facts["options"]
        ref.facts["requests"] = [request]
        runs.append(ref)
    shown, drawing, cold = runs
    drawing.facts.accept_rule = "rejection"
    assert [one.rule.name for run in runs for one in sides_of("A", run)] == [
        "match",
        "rejection",
        "match",
    ]
    for model in (None, opened("mtp")):
        first = drafter_diff(shown, drawing, model).first
        assert first is not None and first.stage == "acceptance rule"
        assert "rule match in A, rejection in B" in first.about
    (pair,) = drafter_diff(shown, drawing, opened("mtp")).pairs
    assert any("samples its tokens" in one.fact for one in pair.missing)
    cold.facts.accept_rule = "rejection"
    assert drafter_diff(cold, cold, opened("mtp")).first is None
