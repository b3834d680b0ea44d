"""Runs without faults: no rule accuses them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from engine.analysis.findings.check import recorded
from engine.options import KV_MODES, ROLLBACK_POLICIES, Prompt, SamplerOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.all_pairs import all_pairs
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session
from tests.support.round_rows import serious

MTP = "qwen35-c-v2x-mtp-f32"
SAMPLERS = (SamplerOptions(), SAMPLED)
TEXTS = ("def quicksort(arr):", "import os\n\ndef read_file(path):", "while True:\n    line = ")


@cache
def demo() -> Session:
    return Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")


@pytest.mark.parametrize(
    ("policy", "kv", "sampler", "ignore_eos"),
    all_pairs(list(ROLLBACK_POLICIES), KV_MODES, SAMPLERS, (False, True)),
)
@pytest.mark.thinned(16)
def test_golden(policy: str, kv: str, sampler: SamplerOptions, ignore_eos: bool) -> None:
    tokens = prompt_of(MTP).tokens
    options = options_of(
        40,
        "draft-mtp",
        n_max=5,
        rollback=policy,
        kv=kv,
        sampler=sampler,
        parallel=3,
        ignore_eos=ignore_eos,
    )
    prompts = [Prompt(tokens[:n]) for n in (20, 7, 31, 20)]
    assert serious(recorded(decode(session(MTP), prompts, options).trace)) == []
    verified = replace(options, replay="verify", parallel=1)
    assert serious(recorded(decode(session(MTP), prompts[:1], verified).trace)) == []


@pytest.mark.parametrize(
    ("policy", "drafter", "sampler"),
    all_pairs(list(ROLLBACK_POLICIES), ("draft-mtp", "draft-simple"), SAMPLERS),
)
@pytest.mark.thinned(16)
def test_demo(policy: str, drafter: str, sampler: SamplerOptions) -> None:
    options = options_of(40, drafter, rollback=policy, sampler=sampler, parallel=3, ignore_eos=True)
    run = decode(demo(), [demo().prompt(text) for text in TEXTS], options)
    assert serious(recorded(run.trace)) == []


@pytest.mark.parametrize("name", ["qwen3-f-f32", "qwen35-a-f32"])
def test_without_drafts(name: str) -> None:
    trace = decode(session(name), [prompt_of(name)], options_of(40)).trace
    assert recorded(trace) == []


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
def test_stale_logits_are_found_without_lanes(sampler: SamplerOptions) -> None:
    options = options_of(
        60, "draft-mtp", n_max=5, sampler=sampler, faults=("stale-logits",), ignore_eos=True
    )
    trace = decode(session(MTP), [prompt_of(MTP)], options).trace
    (finding,) = (f for f in recorded(trace) if f.severity == "error")
    assert finding.rule == "stale-logits"
    # the first rejection whose wrong row gave a token that the right row could not have given
    tokens = trace.tokens
    replaced = [kind == "replacement" for kind in tokens.texts("kind")]
    ranks, rounds = tokens.column("target_rank")[replaced], tokens.column("round")[replaced]
    if sampler.temp <= 0:
        assert finding.round == rounds[ranks > 1][0]
    assert finding.round in rounds
