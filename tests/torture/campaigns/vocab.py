"""Targets and draft models whose vocabularies differ: the tokens of plain decoding, or a refusal
where they differ too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.errors import VocabularyMismatchError
from engine.options import Prompt
from engine.session import Session
from tests.support.golden_runs import session
from tests.support.vocabularies import widened
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.plain import accused, ended, equal, keeps_tokens, plain
from tests.torture.run_sums import check_run
from tests.torture.settings import draw_settings, options_of

_MODELS = ("qwen35-a-f32", "qwen3-f-f32", "qwen35-c-v2x-mtp-f32")
_MORE = (0, 1, 2, 7, 64, 127, 128, 129)
_MOST = 128


def _draw(random: np.random.Generator, number: int) -> Case:
    """Half of the models draft for themselves, so that much is accepted."""
    target, draft = (str(random.choice(_MODELS)) for _ in range(2))
    draft = target if number % 4 < 2 else draft
    more = [int(random.choice(_MORE)) for _ in range(2)]
    if number % 2:
        more[int(random.integers(2))] = 0
    n_vocab = session(target).config.n_vocab + more[0]
    high = [n_vocab - 1 - int(i) for i in random.integers(0, max(1, more[0]), 3)]
    some = [*random.integers(0, n_vocab, 3).tolist(), *high]
    settings = draw_settings(random, session(target))
    settings["types"] = sorted({*settings["types"], "draft-simple"})
    return {
        "target": target,
        "draft": draft,
        "more": {"target": more[0], "draft": more[1]},
        "n": int(random.integers(4, 30)),
        "prompts": [(some * 3)[: int(random.integers(1, 18))] for _ in range(2)],
        "settings": settings,
    }


def _play(case: Case, _: Path) -> Figures:
    target = widened(case["target"], case["more"]["target"])
    draft = widened(case["draft"], case["more"]["draft"])
    apart = abs(case["more"]["target"] - case["more"]["draft"])
    try:
        opened = Session.open(target, draft, compute="f32")
    except VocabularyMismatchError:
        assert apart > _MOST, f"{apart} tokens apart is refused"
        return {"refused": 1}
    assert apart <= _MOST, f"{apart} tokens apart is taken"
    prompts = [Prompt(tuple(tokens)) for tokens in case["prompts"] if tokens] or [Prompt((1,))]
    options = replace(options_of(case["settings"], case["n"]), batch_invariant=True)
    run = ended(opened, prompts, options)
    check_run(run, options)
    accused(run.trace)
    if keeps_tokens(options):
        equal(run, [plain(opened, prompt, options) for prompt in prompts])
    names = ("num_draft_tokens", "num_accepted_draft_tokens")
    drafted, accepted = (run.trace.rounds.column(name).clip(0).sum() for name in names)
    return {"equal": keeps_tokens(options), "drafted": int(drafted), "accepted": int(accepted)}


def _prepare() -> None:
    for name in _MODELS:
        session(name)
        for more in _MORE:
            widened(name, more)


CAMPAIGN = Campaign(
    "vocab",
    "The tokens of plain decoding up to 128 ids apart, and a refusal beyond.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**29,
    batch=6,
    n_least=12,
)
