"""Bugs put into the code that rolls back: comparisons, findings or the text must notice each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.acceptance_rules import RULES
from engine.decode.prompt_cache import PromptCache
from engine.errors import DraftscopeError
from engine.findings.check import recorded
from engine.graphs import VARIABLE
from engine.options import CacheOptions, Prompt, RunOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from engine.trace.store import TraceStore
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of
from tests.support.mutations import MODEL, MUTATIONS, mutate, outcome
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.mutants_list import REWORDED, Reworded
from tests.torture.reworded import reworded

_NAMES = [*(m.name for m in MUTATIONS), *(m.name for m in REWORDED)]
_CLEAN = ("exact", "within")
_NOTICED = ("compare", "finding", "text", "error")
Text = list[list[int]]


def _draw(random: np.random.Generator, number: int) -> Case:
    return {"name": _NAMES[number % len(_NAMES)]}


def _play(case: Case, _: Path) -> Figures:
    """Without a bug nothing is noticed; then with it."""
    os.environ[VARIABLE] = "off"
    name = case["name"]
    figures = dict.fromkeys(("mutants", "unseen", *(f"by_{how}" for how in _NOTICED)), 0.0)
    how, unseen = _old(name) if name in {m.name for m in MUTATIONS} else _new(name)
    figures |= {"mutants": 1, "unseen": bool(unseen)}
    assert not (how and unseen), f"{name} is noticed by {how}, and was called unobservable"
    assert how or unseen, f"nobody notices: {name}"
    return figures | ({f"by_{how}": 1, "caught": 1} if how else {})


def _old(name: str) -> tuple[str, str]:
    mutation = next(m for m in MUTATIONS if m.name == name)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutation)
        findings, verdict = outcome(mutation)
    if any(finding.severity != "info" for finding in findings):
        return "finding", ""
    return "" if verdict in (*_CLEAN, "same text") else "compare", ""


def _new(name: str) -> tuple[str, str]:
    mutant = next(m for m in REWORDED if m.name == name)
    clean = {policy: _clean(policy) for policy in mutant.policies}
    with pytest.MonkeyPatch.context() as patch:
        owner, name, changed = reworded(mutant.place, mutant.old, mutant.new)
        patch.setattr(owner, name, changed)
        if name in RULES:  # that table has the functions themselves
            patch.setitem(RULES, name, changed)
        return _noticed(mutant, clean), mutant.unseen


@cache
def _clean(setting: str) -> list[Text]:
    """The texts of all plays without a bug, which nothing accuses."""
    plays = list(_plays(setting))
    for i, (how, _) in enumerate(plays):
        assert not how, f"play {i} under {setting} is accused without a bug, by {how}"
    return [text for _, text in plays]


def _noticed(mutant: Reworded, clean: dict[str, list[Text]]) -> str:
    """What notices a bug that is switched on; empty if nothing does."""
    for policy in mutant.policies:
        expected = iter(clean[policy])
        try:
            for how, text in _plays(policy):
                if how:
                    return how
                if text != next(expected):
                    return "text"
        except (DraftscopeError, ValueError, LookupError, AssertionError, RuntimeError):
            return "error"
    return ""


def _plays(setting: str) -> Iterator[tuple[str, Text]]:
    """What notices something, and the texts: a comparison of one sequence and of three, runs of
    one, of uneven drafts side by side, of more prompts than slots, and a conversation."""
    tokens = prompt_of(MODEL).tokens
    lane = LaneSpec.parse(setting)
    for n_seqs in () if lane.free else (1, 3):
        yield _compared(setting, [Prompt(tokens[: 14 - 3 * i]) for i in range(n_seqs)])
    options = options_of(24, "draft-mtp", n_max=4, ignore_eos=True, **lane.changes)
    yield _ran(decode(session(MODEL), [Prompt(tokens[:14])], options))
    uneven = SpecOptions(("draft-mtp",), n_max=4, p_min=0.8)
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(4)]
    yield _ran(decode(session(MODEL), prompts[:3], replace(options, spec=uneven, parallel=3)))
    yield _ran(decode(session(MODEL), prompts, replace(options, parallel=2)))
    looked_up = SpecOptions(("ngram-simple",), n_max=4)
    yield _ran(decode(session(MODEL), prompts[:2], replace(options, spec=looked_up, parallel=2)))
    yield from _talked(replace(options, n_ctx=96, n_ubatch=8, n_predict=6), tokens)


def _compared(setting: str, prompts: list[Prompt]) -> tuple[str, Text]:
    options = options_of(16, n_max=4, parallel=len(prompts), ignore_eos=True)
    lanes = [NOISE_LANE, LaneSpec.parse(setting)]
    comparison = Comparison(session(MODEL), prompts, options, lanes, draft_accept=[1, 0, 3, 2, 4])
    while comparison.step():
        pass
    how = "compare" if comparison.results()[-1].is_beyond else ""
    return _accused(comparison.trace) or how, []


def _ran(run: Run) -> tuple[str, Text]:
    return _accused(run.trace), tokens_of(run)


def _talked(options: RunOptions, tokens: Sequence[int]) -> Iterator[tuple[str, Text]]:
    """Prompts that share less and less with those before them, then texts cut back by one token
    more each time, with another behind it and without."""
    cache = PromptCache(CacheOptions(checkpoint_min_step=5))
    opened, text = session(MODEL), []
    for prompt in (tokens[:24], tokens[:22], (*tokens[:18], *tokens[:9]), tokens[:24], tokens[:24]):
        run, text = _answered(opened, prompt, options, cache)
        yield _ran(run)
    # the end of a prompt once more, as a slot would have it that counts what it processed twice
    run, text = _answered(opened, (*text[:24], *text[20:24], *text[24:]), options, cache)
    yield _ran(run)
    for n_cut in range(1, 7):
        run, text = _answered(opened, (*text[:-n_cut], tokens[n_cut]), options, cache)
        yield _ran(run)
    for n_cut in range(1, 5):
        run, text = _answered(opened, text[:-n_cut], options, cache)
        yield _ran(run)


def _answered(
    opened: Session, prompt: Sequence[int], options: RunOptions, cache: PromptCache
) -> tuple[Run, list[int]]:
    run = opened.start([Prompt(tuple(prompt))], options, None, cache)
    while run.step():
        pass
    return run, [*prompt, *tokens_of(run)[0]]


def _accused(trace: TraceStore) -> str:
    found = (f for f in recorded(trace) if f.severity != "info")
    return "finding" if any(f.rule not in _TRUE for f in found) else ""


_TRUE = ("concurrency-lost", "drafter-mute")
"""Findings above info that are true of what is played."""


def _prepare() -> None:
    session(MODEL)


CAMPAIGN = Campaign(
    "mutants",
    "Every bug is noticed by a comparison, a finding, an error or the text, or cannot be.",
    _draw,
    _play,
    _prepare,
    seconds=90.0,
    n_bytes=2**29,
    batch=8,
    share=1.5,
    n_least=8,
    n_all=len(_NAMES),
)
