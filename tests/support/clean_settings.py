"""Random settings of clean runs and comparisons: any family, compute mode, drafter and sampler."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.draft.registry import DRAFTERS, model_drafters
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions, StateTypes
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.support.golden_drafters import TARGETS, drafter_file, drafters
from tests.support.golden_files import golden_file, second_set, with_mtp
from tests.support.golden_runs import MODELS
from tests.support.grammar_runs import LETTERS, SUMS, rules_file, schema_file

DEMO = "demo"
MODES = ("f32", "bf16", "int8", "int8x2", "q8", "blocks")
TEXTS = (
    "import os",
    "class Stack:",
    "def main():\n    ",
    "def read_file(path):",
    "for i in range(10):\n    print(",
    "class Node:\n    def __init__(self",
    "def quicksort(arr):",
    "try:\n    value = int(text)\nexcept",
)
_LOOKUPS = tuple(name for name in DRAFTERS if name not in model_drafters())
_KINDS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}


def models() -> list[str]:
    """Every model that can be found, of all families, and the demo model."""
    return [*dict.fromkeys((*MODELS, *second_set())), DEMO]


def pick(random: np.random.Generator, choices: Sequence[Any]) -> Any:
    """One of the choices, as it is."""
    return choices[int(random.integers(len(choices)))]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What drafts for a model. file: that it needs beyond the model's, "" = none."""

    types: tuple[str, ...] = ()
    file: str = ""


def drafters_of(name: str) -> list[Drafted]:
    """Everything that can draft for a model: its head, files for it, a model, look-ups."""
    found = [Drafted((lookup,)) for lookup in _LOOKUPS]
    if name == DEMO:
        found += [Drafted(("draft-simple",), str(DEMO_DRAFT))] * 2
        found += [Drafted(("draft-eagle3",), str(DEMO_EAGLE3))] * 2
    else:
        # a model that drafts for itself is nearly always right, another one nearly never
        found += [Drafted(("draft-simple",), _path(of)) for of in (name, MODELS[0])]
    found += [
        Drafted((_KINDS[file.split("-")[0].rstrip("2")],), str(drafter_file(f"{file}.gguf")))
        for file in drafters("")
        if TARGETS[file] == name
    ]
    if name == DEMO or with_mtp([name]):
        head = Drafted(("draft-mtp",))
        found += [head, head, Drafted((_LOOKUPS[0], "draft-mtp"))]
    return found


def _path(name: str) -> str:
    return str(DEMO_TARGET if name == DEMO else golden_file(f"{name}.gguf"))


@lru_cache(maxsize=24)
def opened(name: str, compute: str, draft: str = "") -> Session:
    return Session.open(_path(name), draft or None, compute=compute)


def prompt_for(session: Session, name: str, random: np.random.Generator) -> Prompt:
    if name == DEMO:
        return session.prompt(str(pick(random, TEXTS)))
    n = int(random.integers(3, 25))
    return Prompt(tuple(random.integers(0, 376, n).tolist()))


@cache
def _grammars() -> list[SamplerOptions]:
    folder = Path(tempfile.mkdtemp(prefix="clean-grammars-"))
    rules = [(folder / name, text) for name, text in (("letters", LETTERS), ("sums", SUMS))]
    for place, _ in rules:
        place.mkdir()
    return [schema_file(folder), *(rules_file(place, text) for place, text in rules)]


def sampler(random: np.random.Generator) -> SamplerOptions:
    """Greedy or not, with penalties, filters or a grammar."""
    seed = int(random.integers(1000))
    found = SamplerOptions(seed=seed)
    if random.random() < 0.25:
        grammar = pick(random, _grammars())
        found = replace(grammar, seed=seed)
    if random.random() < 0.5:
        found = replace(found, temp=float(pick(random, (0.5, 1.0, 1.5))))
        found = replace(found, top_k=int(pick(random, (0, 5, 40))))
        found = replace(found, min_p=float(pick(random, (0.0, 0.05))))
    if random.random() < 0.25:
        n = int(pick(random, (4, 64, -1)))
        found = replace(found, repeat_penalty=float(pick(random, (1.1, 2.0))), repeat_last_n=n)
    if random.random() < 0.1:
        found = replace(found, presence_penalty=0.5, frequency_penalty=0.25)
    return found


def spec(random: np.random.Generator, drafted: Drafted, temp: float) -> SpecOptions:
    """How these drafters draft, and how their drafts are judged."""
    p_min, n_max = float(pick(random, (0.0, 0.0, 0.3))), int(random.integers(1, 9))
    accept = "rejection" if temp > 0 and random.random() < 0.3 else "match"
    return SpecOptions(types=drafted.types, n_max=n_max, p_min=p_min, accept=accept)


def state_types(random: np.random.Generator) -> StateTypes:
    """Mostly f32."""
    if random.random() < 0.8:
        return StateTypes()
    return StateTypes(*(str(pick(random, ("f32", "bf16", "f16"))) for _ in range(3)))


def options(random: np.random.Generator, drafted: Drafted) -> RunOptions:
    """Options of a run with these drafters."""
    sampled = sampler(random)
    return RunOptions(
        n_predict=int(random.integers(12, 49)),
        n_ctx=192,
        sampler=sampled,
        spec=spec(random, drafted, sampled.temp),
        state_types=state_types(random),
        ignore_eos=not sampled.has_grammar and random.random() < 0.8,
    )
