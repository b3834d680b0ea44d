"""Every text that sampling may write after a prompt, and those that runs with rejection wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.session import Session
from tests.support import naive_sampler as naive
from tests.support.golden_runs import decode, prompt_of, session, tokens_of
from tests.support.sampler_runs import MTP

OUTCOMES = SamplerOptions(temp=1.0, top_k=3, top_p=1.0, min_p=0.0, repeat_penalty=1.3)
"""Three candidates at each position, so that few enough texts of four tokens are possible."""


@cache
def texts() -> dict[tuple[int, ...], float]:
    """`texts_behind` the golden prompt."""
    return texts_behind(session(MTP), prompt_of(MTP).tokens[:4])


def texts_behind(opened: Session, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Every text of four tokens after a prompt, and how likely plain sampling writes it."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer = {}
        for text, p in found.items():
            tokens = [*prompt, *text]
            row = opened.logits(tokens)[-1].tolist()
            for token, q in naive.chain(row, tokens, OUTCOMES).items():
                longer[*text, token] = p * q
        found = longer
    return found


def written(
    opened: Session, n: int, drafter: str = "draft-mtp", prompt: Sequence[int] = ()
) -> tuple[list[tuple[int, ...]], int, int]:
    """Texts of as many seeds after a prompt, by default the golden one; drafted tokens and how
    many of them were accepted."""
    spec = SpecOptions((drafter,), accept="rejection")
    options = RunOptions(n_predict=4, n_ctx=16, spec=spec)
    found, counts = [], [0, 0]
    start = Prompt(tuple(prompt) or prompt_of(MTP).tokens[:4])
    for seed in range(n):
        sampler = replace(OUTCOMES, seed=seed)
        run = decode(opened, [start], replace(options, sampler=sampler))
        found.append(tuple(tokens_of(run)[0]))
        for i, name in enumerate(("num_draft_tokens", "num_accepted_draft_tokens")):
            counts[i] += int(run.trace.rounds.column(name)[1:].sum())
    return found, counts[0], counts[1]
