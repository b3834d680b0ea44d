"""How far a compute mode is from f32, over the model's own greedy text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.compare.divergence import ReferenceLogits
from engine.errors import Cancelled, OptionError
from engine.options import RunOptions
from engine.session import Session
from engine.trace.facts import FidelityFacts
from engine.trace.store import TraceStore

N_TOKENS = 128
"""Tokens generated to measure on."""
_BLOCK = 16
"""Positions compared at once: in float64 a vocabulary takes megabytes for each."""


def greedy_text(
    session: Session, text: str, n_tokens: int, cancelled: Callable[[], bool] = lambda: False
) -> list[int]:
    """The prompt's tokens and those that the model continues them with. Raises Cancelled."""
    prompt = session.prompt(text)
    room = session.context([prompt], RunOptions()) - len(prompt.tokens)
    options = RunOptions(n_predict=max(1, min(n_tokens, room)), ignore_eos=True)
    run = session.start([prompt], options, TraceStore())
    while run.step():
        if cancelled():
            raise Cancelled
    return [*prompt.tokens, *run.results()[0].tokens]


def measure_fidelity(session: Session, reference: Session, tokens: list[int]) -> FidelityFacts:
    """Compare the logits of every token but the last. reference: the same model in f32.

    Raises OptionError for fewer than two tokens, and ModelFileError where either model is not
    that of the file any more, so that they may be two.
    """
    if len(tokens) < 2:
        raise OptionError("Fidelity needs two tokens or more.", "Give a longer text.")
    session.check_unchanged()
    reference.check_unchanged()
    asked, chosen = tokens[:-1], tokens[1:]
    mine, exact = (torch.from_numpy(one.logits(asked)) for one in (session, reference))
    parts = [
        ReferenceLogits(exact[i : i + _BLOCK], chosen[i : i + _BLOCK]).difference(
            mine[i : i + _BLOCK]
        )
        for i in range(0, len(asked), _BLOCK)
    ]
    nmse, kl, top1 = (
        float(np.mean([value for part in parts for value in getattr(part, name)]))
        for name in ("nmse", "kl", "top1_equal")
    )
    worst = max(float(np.max(part.max_abs)) for part in parts)
    return FidelityFacts(session.compute, len(asked), nmse, kl, top1, worst)
