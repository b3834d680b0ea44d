"""Random models and settings of a run, as JSON, and what they are for the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_mod import NgramModOptions
from engine.gguf.file import GgufFile
from engine.model.drafters.config import drafter_of
from engine.options import (
    KV_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.support.golden_files import DATA
from tests.torture.gguf_parts import base_file, bases, drafter_bases

Random = np.random.Generator
Settings = dict[str, Any]
COMPUTE = ("f32", "f32", "q8", "int8", "bf16", "blocks")
LOOKED_UP = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "suffix")
_SIMPLE = "qwen35-a-f32"
"""A draft model: the golden models of the first set have one vocabulary."""


def models() -> list[str]:
    return ["demo", *bases()]


@cache
def files(name: str) -> tuple[Path, list[Path]]:
    """A model, and what drafts for it: one file for each drafter, from this tree alone."""
    if name == "demo":
        return DEMO_TARGET, [DEMO_DRAFT, DEMO_EAGLE3]
    of_model = [base_file(one) for one, target in drafter_bases().items() if target == name]
    drafts = list({_drafter(path): path for path in of_model}.values())
    if name.startswith("qwen3") and name != _SIMPLE:
        drafts.append(DATA / f"{_SIMPLE}.gguf")
    return base_file(name), drafts


def _drafter(path: Path) -> str:
    with GgufFile.open(path) as file:
        return drafter_of(file)


@cache
def opened(name: str, compute: str = "f32", *, twin: bool = False) -> Session:
    """twin: with itself as its draft model."""
    target, drafts = files(name)
    return Session.open(target, [target] if twin else drafts, compute=compute)


def draw_settings(random: Random, session: Session) -> Settings:
    """Settings of a run that is not refused, each of which may be left out. Nothing in them may
    change the tokens of plain decoding."""
    drafters = [*session.drafters, *LOOKED_UP]
    n = int(random.choice([1, 1, 1, 2, 3]))
    found: Settings = {
        "types": sorted({_pick(random, drafters) for _ in range(n)}),
        "n_max": int(random.choice([1, 2, 3, 4, 5, 7, 12])),
        "rollback": _pick(random, list(ROLLBACK_POLICIES)),
    }
    if session.drafters and random.random() < 0.6:
        found["types"] = sorted({*found["types"][:1], _pick(random, session.drafters)})
    for name, chance, values in _RARE:
        if random.random() < chance:
            found[name] = _pick(random, values)
    if found.get("n_min", 0) > found["n_max"] or {"accept", "p_min"} <= found.keys():
        found.pop("n_min", None)
    return found


def draw_rich(random: Random, drafter: str, number: int) -> Settings:
    """Settings under which a drafter drafts much and deep."""
    policies, n_max = list(ROLLBACK_POLICIES), (5, 8, 12)
    found: Settings = {
        "types": [drafter],
        "n_max": n_max[number % len(n_max)],
        "rollback": policies[number % len(policies)],
        "ignore_eos": True,
        "look_up": 1 if drafter == "ngram-simple" else 2,
    }
    for name, chance, values in _RARE:
        if name in _RICH and random.random() < chance:
            found[name] = _pick(random, values)
    return found


def _pick(random: Random, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


_RARE: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("p_min", 0.3, (0.1, 0.3, 0.7, 0.95)),
    ("n_min", 0.1, (1, 2)),
    ("verify_max", 0.1, (0, 1, 2)),
    ("n_rs_seq", 0.3, (0, 1, 2, 3, 8)),
    ("parallel", 0.4, (2, 3)),
    ("split", 0.3, SPLITS),
    ("kv", 0.4, KV_MODES),
    ("n_ubatch", 0.3, (1, 2, 3, 7, 16)),
    ("n_batch", 0.2, (4, 9, 32)),
    ("n_ctx", 0.3, (33, 40, 48, 64)),
    ("replay", 0.3, ("verify",)),
    ("checkpoint_device", 0.2, ("device",)),
    ("accept", 0.2, ("rejection",)),
    ("temp", 0.4, (0.5, 1.0, 2.5)),
    ("seed", 0.3, (0, 7, 2**31)),
    ("top_k", 0.2, (0, 1, 5)),
    ("top_p", 0.2, (0.3, 1.0)),
    ("min_p", 0.2, (0.0, 0.5)),
    ("typical_p", 0.1, (0.4,)),
    ("repeat_penalty", 0.2, (1.3,)),
    ("repeat_last_n", 0.1, (-1, 4)),
    ("presence_penalty", 0.1, (0.7,)),
    ("frequency_penalty", 0.1, (0.4,)),
    ("ignore_eos", 0.6, (True,)),
    ("look_up", 0.3, (2, 4)),
)
_RICH = ("n_rs_seq", "parallel", "split", "kv", "n_ubatch", "replay", "checkpoint_device")
_SPEC = ("types", "n_max", "n_min", "p_min", "verify_max", "accept")
_SAMPLER = ("temp", "seed", "top_k", "top_p", "min_p", "typical_p")
_SAMPLER += ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")


def options_of(settings: Settings, n_predict: int) -> RunOptions:
    """Raises OptionError for settings that contradict each other."""
    own = dict(settings)
    n_match, few = own.pop("look_up", None), own.pop("few", 0)
    sizes = {}
    if n_match is not None:
        sizes = {
            f"ngram_{name}": NgramSizes(n_match, 12) for name in ("simple", "map_k", "map_k4v")
        }
        sizes |= {"ngram_mod": NgramModOptions(n_match, 1, 12)}
    spec = {name: own.pop(name) for name in _SPEC if name in own}
    sampler = {name: own.pop(name) for name in _SAMPLER if name in own}
    spec["types"] = tuple(spec.get("types", ()))
    return RunOptions(
        n_predict=n_predict,
        spec=SpecOptions(**spec, **sizes),
        sampler=SamplerOptions(**sampler, logit_bias=tuple((i, 1e3) for i in range(few))),
        **{"n_ctx": 128, **own},
    )
