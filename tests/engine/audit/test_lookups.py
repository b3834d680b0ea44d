"""The audit of drafts that are looked up: bugs that leave the text right are seen and named."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from engine.analysis.findings.check import find, recorded
from engine.audit.run_audit import audit_of
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_mod import NgramModOptions
from engine.draft.registry import DRAFTERS
from engine.options import Prompt, RunOptions, SpecOptions
from engine.run import Run
from tests.support.draft_audits import audited
from tests.support.golden_runs import SAMPLED, decode, prompt_of, session
from tests.torture.reworded import reworded

MODEL = "qwen35-c-v2x-mtp-f32"
LOOKUPS = [name for name, spec in DRAFTERS.items() if not spec.needs]
_FOLLOW = "engine.decode.scheduler:Scheduler._follow"


def options_for(*types: str, n: int = 1, slots: int = 1, n_predict: int = 12) -> RunOptions:
    sizes = NgramSizes(n, 4)
    spec = SpecOptions(
        types=types,
        n_max=3,
        ngram_simple=sizes,
        ngram_map_k=sizes,
        ngram_map_k4v=sizes,
        ngram_mod=NgramModOptions(n, 1, 4),
    )
    return RunOptions(n_predict=n_predict, parallel=slots, spec=spec)


def prompts_of(n: int) -> list[Prompt]:
    tokens = prompt_of(MODEL).tokens
    ids = tuple(range(min(session(MODEL).config.n_vocab, 384)))
    return [Prompt(ids[i:] + tokens[i : i + 9] * 4) for i in range(n)]


def play(options: RunOptions, n_prompts: int = 1) -> Run:
    return decode(session(MODEL), prompts_of(n_prompts), options)


def rules(run: Run, options: RunOptions) -> set[str]:
    drafts = [asdict(one) for one in audited(session(MODEL), run, options)]
    run.trace.runs[run.run_id]["audit"] = {"drafts": drafts}
    return {f.rule for f in find(run.trace, [run.run_id]) if "draft" in f.rule}


@pytest.mark.parametrize("name", LOOKUPS)
def test_clean_drafts_are_found_again(name):
    options = replace(options_for(name, slots=2), sampler=SAMPLED, rollback="checkpoint")
    run = play(options, 3)
    if name != "ngram-cache":  # which needs to have seen a token twice
        assert run.trace.rounds.column("num_draft_tokens").max() > 0
    assert not rules(run, options)


def test_clean_drafts_of_a_chain_are_found_again():
    options = options_for("draft-mtp", *LOOKUPS, slots=3)
    assert not rules(play(options, 3), options)


PLANTED = {
    "learns rejected tokens": (
        "suffix",
        _FOLLOW,
        "round_.decoded",
        "round_.tokens",
        "drafter-not-rewound",
        1,
        1,
    ),
    "learns its own drafts": (
        "suffix",
        "engine.draft.suffix:SuffixDrafter._draft",
        "if not found.tokens:",
        "self._texts.add(request, found.tokens)\n    if not found.tokens:",
        "draft-not-reproduced",
        1,
        1,
    ),
    "goes on from an older token": (
        "ngram-simple",
        "engine.decode.sequences:DecodingSequence.draft_request",
        "self.last, limit)",
        "(self.emitted[-2:])[0], limit)",
        "drafter-behind",
        1,
        1,
    ),
    "mixes sequences": (
        "ngram-simple",
        "engine.draft.ngram_drafter:NgramDrafter.draft",
        "self._histories[request.seq]",
        "self._histories[min(self._histories)]",
        "drafter-of-other-text",
        3,
        3,
    ),
    "keeps the text before": (
        "ngram-map-k",
        "engine.draft.chain:DrafterChain.forget",
        "drafter.forget(seq)",
        "pass",
        "drafter-of-other-text",
        1,
        3,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_named(bug, monkeypatch):
    drafter, place, old, new, finds, slots, n_prompts = PLANTED[bug]
    owner, name, changed = reworded(place, old, new)
    monkeypatch.setattr(owner, name, changed)
    options = options_for(drafter, slots=slots)
    assert rules(play(options, n_prompts), options) == {finds}


@pytest.mark.parametrize("bug", [None, "learns rejected tokens"])
def test_the_audit_of_a_run_looks_up_again_without_a_draft_model(bug, monkeypatch):
    options, opened, prompts = options_for("suffix"), session(MODEL), prompts_of(1)
    if bug:
        owner, name, changed = reworded(*PLANTED[bug][1:4])
        monkeypatch.setattr(owner, name, changed)
    run = opened.start(prompts, options, audit=audit_of(opened, prompts, options))
    while run.step():
        pass
    found = {one.rule for one in recorded(run.trace) if "draft" in one.rule}
    assert found == ({PLANTED[bug][4]} if bug else set())
