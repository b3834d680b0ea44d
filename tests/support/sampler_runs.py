"""What runs with all samplers, and runs by rejection, are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from engine.options import ROLLBACK_POLICIES, Prompt, SamplerOptions
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of

MTP = "qwen35-c-v2x-mtp-f32"
PAIRS = (
    (MTP, None, "draft-mtp"),
    ("qwen35moe-d-v2x-mtp-f32", None, "draft-mtp"),
    ("qwen3next-e-v2x-f32", "qwen3next-e-v2x-f32", "draft-simple"),
)
SAMPLERS = {
    "penalties, greedy": SamplerOptions(repeat_penalty=1.3, presence_penalty=3.0, repeat_last_n=20),
    "all": SamplerOptions(
        temp=0.9,
        top_k=30,
        typical_p=0.95,
        top_p=0.9,
        min_p=0.02,
        seed=5,
        repeat_penalty=1.2,
        repeat_last_n=-1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=((11, 1.5), (300, -2.0)),
    ),
    "few tokens": SamplerOptions(
        temp=0.7,
        top_k=8,
        repeat_penalty=1.3,
        frequency_penalty=0.5,
        repeat_last_n=9,
        logit_bias=tuple((token, 20.0) for token in range(40, 48)),
    ),
}
WAYS = [(policy, "trust") for policy in ROLLBACK_POLICIES] + [("checkpoint", "verify")]


def prompts_of(name: str) -> list[Prompt]:
    tokens = prompt_of(name).tokens
    return [Prompt(tokens[:n]) for n in (20, 7, 31)]


@cache
def plain(name: str, draft: str | None, sampler: SamplerOptions) -> list[list[int]]:
    options = replace(options_of(20), sampler=sampler)
    return tokens_of(decode(session(name, draft), prompts_of(name), options))
