"""Drafted runs with anything set: the tokens of plain decoding, a trace that adds up, and findings
that accuse nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.prompt_cache import PromptCache
from engine.errors import ContextFullError, OptionError
from engine.options import ROLLBACK_POLICIES, CacheOptions, Prompt, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.plain import accused, ended, equal, keeps_tokens, plain
from tests.torture.run_sums import check_run
from tests.torture.settings import COMPUTE, draw_settings, models, opened, options_of


def _draw(random: np.random.Generator, number: int) -> Case:
    names = models()
    name = names[number % len(names)]
    session = opened(name)
    prompts = [_prompt(random, session) for _ in range(int(random.choice([1, 1, 2, 4])))]
    case = {
        "model": name,
        "compute": str(random.choice(COMPUTE)),
        "n": int(random.integers(4, 40)),
        "prompts": prompts,
        "settings": draw_settings(random, session),
        "lanes": [],
        "turns": [],
    }
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


def _play(case: Case, _: Path) -> Figures:
    session = opened(case["model"], case["compute"])
    prompts = [Prompt(tuple(tokens)) for tokens in case["prompts"] if tokens]
    try:
        options = replace(options_of(case["settings"], case["n"]), batch_invariant=True)
        prompts = prompts or [Prompt((1,))]
        if case["lanes"]:
            return _compared(session, prompts, options, case["lanes"])
        if case["turns"]:
            return _continued(session, prompts[0], options, case["turns"])
        return _drafted(session, prompts, options)
    except (OptionError, ContextFullError):
        return {"refused": 1}


def _drafted(session: Session, prompts: list[Prompt], options: RunOptions) -> Figures:
    run = ended(session, prompts, options)
    check_run(run, options)
    if keeps_tokens(options):
        equal(run, [plain(session, prompt, options) for prompt in prompts])
    return {**_figures(run.trace), "equal": keeps_tokens(options)}


def _continued(session: Session, prompt: Prompt, options: RunOptions, turns: list[Any]) -> Figures:
    """A conversation over a prompt cache."""
    cache = PromptCache(CacheOptions(checkpoint_min_step=4))
    figures: Figures = {"turns": 0}
    text: tuple[int, ...] = ()
    for turn in [{"back": 0, "more": prompt.tokens}, *turns]:
        kept = text[: max(1, len(text) - turn["back"])]
        prompt = Prompt((*kept, *turn["more"]))
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
    drafted, accepted = (
        trace.rounds.column(f"num_{name}_tokens") for name in ("draft", "accepted_draft")
    )
    return {
        "rounds": len(drafted),
        "drafted": int(drafted[drafted > 0].sum()),
        "accepted": int(accepted[accepted > 0].sum()),
        "rolled_back": int((trace.rounds.column("rollback_depth") > 0).sum()),
    }


def _prepare() -> None:
    for name in models():
        session = opened(name)
        options = RunOptions(n_predict=8, n_ctx=128, spec=SpecOptions(("ngram-simple",)))
        _drafted(session, [Prompt((5, 6, 5, 6))], replace(options, batch_invariant=True))


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
)
