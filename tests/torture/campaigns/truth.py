"""Drafted runs with anything set: the tokens of plain decoding, a trace that adds up, and findings
that accuse no one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.held_sequences import PromptCache
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, DraftRequest
from engine.options import ROLLBACK_POLICIES, CacheOptions, Prompt, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.plain import accused, ended, equal, keeps_tokens, plain
from tests.torture.run_sums import check_export, check_run
from tests.torture.settings import (
    COMPUTE,
    LOOKED_UP,
    draw_rich,
    draw_settings,
    models,
    opened,
    options_of,
)

_KINDS = ("twin", "looked up", "own", "any", "twin", "looked up")
_NEVER = 99
_PAIRS = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1])
_OWN = {"draft-eagle3", "draft-dflash", "draft-dspark"}
"""Drafters that a model with itself as its draft model has not."""
_AGREE = [("demo", name) for name in ("draft-mtp", "draft-simple", "draft-eagle3")]
_AGREE += [(f"{name}-mtp-f32", "draft-mtp") for name in ("bailingmoe3-a", "nemotron_h_moe-b")]
_AGREE += [(f"{name}-v2x-mtp-f32", "draft-mtp") for name in ("qwen35-c", "qwen35moe-d")]
"""Models and what drafts what they say."""


def _draw(random: np.random.Generator, number: int) -> Case:
    """All but one of six cases draft much that is accepted; that one is anything."""
    number, i = divmod(number, len(_KINDS))
    kind, names = _KINDS[i], models()
    name = names[(number + 5 * i) % len(names)]
    if kind == "own":
        name, drafter = _AGREE[number % len(_AGREE)]
    session = opened(name)
    case: Case = {
        "model": name,
        "compute": str(random.choice(COMPUTE)),
        "n": int(random.integers(20, 32)),
        "prompts": [_prompt(random, session) for _ in range(int(random.choice([1, 1, 2])))],
        "twin": kind == "twin",
        "wrong": [],
        "lanes": [],
        "turns": [],
    }
    if kind == "any":
        return case | _any(random, session)
    wrong = [int(random.integers(9)), int(random.integers(4, 12)), _NEVER, _NEVER]
    case["wrong"] = random.permutation(wrong).tolist()
    if kind == "twin":
        drafter = "draft-simple"
    elif kind == "looked up":
        drafter = LOOKED_UP[number % len(LOOKED_UP)]
    else:
        case["wrong"] = [_NEVER]
    case["settings"] = draw_rich(random, drafter, number)
    if kind == "own":  # they agree for a few tokens
        case["settings"]["n_max"] = 4
    if kind == "looked up":  # ids that the text consists of, and all their pairs
        case["settings"]["few"] = few = int(random.choice([1, 1, 2]))
        case["prompts"] = [(_PAIRS % few).tolist() for _ in case["prompts"]]
    return case


def _any(random: np.random.Generator, session: Session) -> Case:
    case: Case = {
        "n": int(random.integers(4, 40)),
        "prompts": [_prompt(random, session) for _ in range(int(random.choice([1, 1, 2, 4])))],
        "settings": draw_settings(random, session),
        "twin": bool(random.random() < 0.5),
    }
    if case["twin"]:
        case["settings"]["types"] = sorted({"draft-simple", *case["settings"]["types"][:1]} - _OWN)
    if random.random() < 0.25:
        case["lanes"] = sorted({_lane(random) for _ in range(2)})
    elif random.random() < 0.3:
        case["turns"] = [_turn(random, session) for _ in range(int(random.integers(1, 4)))]
    return case


def _prompt(random: np.random.Generator, session: Session) -> list[int]:
    """Ids that repeat, so that drafters which look up find something."""
    some = random.integers(0, session.config.n_vocab, int(random.integers(1, 9))).tolist()
    return (some * 4)[: int(random.integers(1, 4 * len(some) + 1))]


def _turn(random: np.random.Generator, session: Session) -> dict[str, Any]:
    """What the next prompt keeps of the text so far, from its end, and what it adds."""
    return {"back": int(random.integers(0, 12)), "more": _prompt(random, session)[:6]}


def _lane(random: np.random.Generator) -> str:
    parts = [str(random.choice(list(ROLLBACK_POLICIES)))]
    for text in ("n_rs_seq=1", "n_rs_seq=2", "split=seq", "kv=unified", "ubatch=3", "free"):
        if random.random() < 0.2 and text.split("=")[0] not in "".join(parts):
            parts.append(text)
    return ",".join(parts)


def _play(case: Case, folder: Path) -> Figures:
    session = opened(case["model"], case["compute"], twin=case["twin"])
    prompts = [Prompt(tuple(tokens)) for tokens in case["prompts"] if tokens] or [Prompt((1,))]
    options = replace(options_of(case["settings"], case["n"]), batch_invariant=True)
    if case["lanes"]:
        return _compared(session, prompts, options, case["lanes"])
    if case["turns"]:
        return _continued(session, prompts[0], options, case["turns"])
    with _spoiled(case["wrong"], session.config.n_vocab):
        figures = _drafted(session, prompts, options, folder)
    if case["wrong"] and options.spec.types:
        assert figures["drafted"], f"{', '.join(options.spec.types)} drafts nothing"
        assert figures["accepted"] or not case["twin"], "nothing of a model's own is accepted"
    return figures


@contextmanager
def _spoiled(at: list[int], n_vocab: int) -> Iterator[None]:
    """The first, second, … draft has a wrong token there, over and over, where it is so long."""
    right, places = DrafterChain.draft, cycle(at or [_NEVER])

    def draft(chain: DrafterChain, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        drafts = right(chain, requests)
        for one, i in zip(drafts.values(), places, strict=False):
            if i < len(one.tokens):
                one.tokens[i] = (one.tokens[i] + 1) % n_vocab
        return drafts

    with patch.object(DrafterChain, "draft", draft):
        yield


def _drafted(session: Session, prompts: list[Prompt], options: RunOptions, folder: Path) -> Figures:
    run = ended(session, prompts, options)
    check_run(run, options)
    check_export(run.trace, folder / "trace")
    if keeps_tokens(options):
        equal(run, [plain(session, prompt, options) for prompt in prompts])
    kinds = (options.rollback, options.split, options.kv, *options.spec.types)
    return {
        **_figures(run.trace),
        **dict.fromkeys(kinds, 1),
        "runs": 1,
        "equal": keeps_tokens(options),
        "n_max_2": options.spec.n_max >= 2,
        "n_max_4": options.spec.n_max >= 4,
    }


def _continued(session: Session, prompt: Prompt, options: RunOptions, turns: list[Any]) -> Figures:
    """A conversation over a prompt cache."""
    cache = PromptCache(CacheOptions(checkpoint_min_step=4))
    figures: Figures = {"turns": 0}
    text: tuple[int, ...] = ()
    for turn in [{"back": 0, "more": prompt.tokens}, *turns]:
        kept = text[: max(1, len(text) - turn["back"])]
        prompt = Prompt((*kept, *turn["more"]))
        if len(prompt.tokens) >= options.n_ctx:
            break
        run = session.start([prompt], options, None, cache)
        while run.step():
            pass
        check_run(run, options)
        if keeps_tokens(options):
            equal(run, [plain(session, prompt, options)])
        accused(run.trace)
        text = (*prompt.tokens, *run.results()[0].tokens)
        figures["turns"] += 1
    return figures


def _compared(
    session: Session, prompts: list[Prompt], options: RunOptions, lanes: list[str]
) -> Figures:
    """Lanes that follow a script of accepted tokens, if nothing drafts for all of them."""
    script = None if options.spec.has_model else [1, 0, 3, 2]
    spec = options.spec if options.spec.has_model else SpecOptions(n_max=options.spec.n_max)
    if script is not None:
        lanes = [lane.removesuffix(",free") for lane in lanes]
        script = [min(n, spec.n_max) for n in script]
    comparison = Comparison(
        session,
        prompts,
        replace(options, spec=spec, batch_invariant=False),
        [NOISE_LANE, *map(LaneSpec.parse, lanes)],
        draft_accept=script,
    )
    while comparison.step():
        pass
    for verdict in comparison.results():
        assert not verdict.is_beyond, f"lane {verdict.lane} is {verdict.verdict}: {verdict.error}"
    accused(comparison.trace)
    return {"lanes": len(lanes)}


def _figures(trace: TraceStore) -> Figures:
    """deep: accepted or undone are four tokens at least."""
    names = ("num_draft_tokens", "num_accepted_draft_tokens", "rollback_depth")
    drafted, accepted, undone = (trace.rounds.column(name).clip(0) for name in names)
    paths = trace.rounds.texts("rollback_path")
    return {
        "rounds": len(drafted),
        "drafted": int(drafted.sum()),
        "accepted": int(accepted.sum()),
        "rolled_back": int((undone > 0).sum()),
        "restored": sum(path.startswith("restore") for path in paths),
        "deep_accepted": bool((accepted >= 4).any()),
        "deep_undone": bool((undone >= 4).any()),
    }


def _prepare() -> None:
    with TemporaryDirectory() as folder:
        for name in models():
            options = RunOptions(n_predict=8, n_ctx=128, spec=SpecOptions(("ngram-simple",)))
            options = replace(options, batch_invariant=True)
            _drafted(opened(name), [Prompt((5, 6, 5, 6))], options, Path(folder))


CAMPAIGN = Campaign(
    "truth",
    "The tokens of plain decoding, a trace that adds up, and no finding above info.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**29,
    batch=6,
    share=3.0,
    n_least=18,
)
