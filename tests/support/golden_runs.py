"""Runs on the golden models, each loaded once."""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.run import Run
from engine.run_checkpoints import RunCheckpoints
from engine.session import Session
from tests.support.golden_drafters import TARGETS, drafter_file
from tests.support.golden_files import DATA, golden_file

__all__ = [
    "DATA",
    "MODELS",
    "MTP_MODELS",
    "SAMPLED",
    "decode",
    "golden",
    "options_of",
    "prompt_of",
    "prompts_of",
    "session",
    "tokens_of",
    "tokens_table",
]

MTP_MODELS = ("qwen35-c-v2x-mtp-f32", "qwen35moe-d-v2x-mtp-f32", "qwen35-h-v2x-mtp-q8_0")
MODELS = (
    "qwen35-a-f32",
    "qwen35-b-v2x-tied-f32",
    "qwen3next-e-v2x-f32",
    "qwen3-f-f32",
    "qwen35-g-v2x-q4_k_m",
    *MTP_MODELS,
)
SAMPLED = SamplerOptions(temp=0.8, seed=11)


@cache
def session(
    name: str, draft: str | None = None, *, compute: str = "f32", device: str = "cpu"
) -> Session:
    find = drafter_file if draft in TARGETS else golden_file
    draft_file = draft and find(f"{draft}.gguf")
    return Session.open(golden_file(f"{name}.gguf"), draft_file, compute=compute, device=device)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(golden_file(f"{name}.npz")) as data:
        return dict(data)


def prompt_of(name: str) -> Prompt:
    data = golden(name)
    return Prompt(tuple(data["tokens"][: int(data["n_prompt"])].tolist()))


def prompts_of(name: str) -> list[Prompt]:
    """Five of different lengths, each with a repetition, for drafters that look something up."""
    tokens = prompt_of(name).tokens
    return [Prompt(tokens[:n] + tokens[: n // 2]) for n in (20, 7, 31, 4, 12)]


def decode(
    opened: Session,
    prompts: list[Prompt],
    options: RunOptions,
    checkpoints: RunCheckpoints | None = None,
) -> Run:
    run = opened.start(prompts, options, checkpoints=checkpoints)
    while run.step():
        pass
    return run


def options_of(n: int = 40, *types: str, n_max: int = 3, **others) -> RunOptions:
    spec = SpecOptions(types=types, n_max=n_max)
    return RunOptions(n_predict=n, spec=spec, **others)


def tokens_of(run: Run) -> list[list[int]]:
    return [result.tokens for result in run.results()]


def tokens_table(run: Run) -> dict[str, np.ndarray]:
    """The tokens table of a run: what the acceptance rule is recorded with."""
    table = run.trace.tokens
    names = ("draft_index", "draft_p", "rule_p", "rule_q", "target_p", "round", "token_id")
    return {name: table.column(name) for name in names} | {"kind": np.array(table.texts("kind"))}
