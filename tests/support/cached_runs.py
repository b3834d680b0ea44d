"""Runs with a prompt cache that can be looked into, and what their logits were."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from math import nan
from unittest.mock import patch

import numpy as np
import torch

from engine.batch import Span
from engine.decode.held_sequences import CachedRun, PromptCache
from engine.decode.scheduler import Scheduler
from engine.memory.hybrid import HybridMemory, MemoryShelf
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions
from engine.run import Run
from engine.session import Session
from engine.trace.records import MISSING

Rows = dict[tuple[int, int], torch.Tensor]
"""By sequence and position of the token that they choose."""


class OpenCache(PromptCache):
    """Shows what the latest run left."""

    latest: CachedRun

    def put(self, kept: CachedRun) -> None:
        self.latest = kept
        super().put(kept)


@contextmanager
def poisoned():
    """All memory made meanwhile is full of NaN."""
    for_model, for_layers = HybridMemory.for_model.__func__, HybridMemory.for_layers.__func__

    def poison(make, cls, *args, **others):
        memory = make(cls, *args, **others)
        memory.poison(nan)
        return memory

    with (
        patch.object(MemoryShelf, "take", lambda self, key, make: make()),
        patch.object(HybridMemory, "for_model", classmethod(partial(poison, for_model))),
        patch.object(HybridMemory, "for_layers", classmethod(partial(poison, for_layers))),
    ):
        yield


def decode_cached(
    opened: Session, prompts: Sequence[Prompt], options: RunOptions, cache: PromptCache | None
) -> tuple[Run, Rows]:
    """A whole run on poisoned memory, and the logits that chose every emitted token."""
    rows: Rows = {}

    def watch(round_):
        places = enumerate(round_.rows[: len(round_.emitted)], round_.pos_next)
        rows.update({(round_.seq_id, pos): logits.clone() for pos, logits in places})

    with patch("engine.session.Scheduler", partial(Scheduler, watch=watch)), poisoned():
        run = opened.start(prompts, options, cache=cache)
    while run.step():
        pass
    return run, rows


def state_behind(model: HybridModel, tokens: Sequence[int]) -> list[torch.Tensor]:
    """States and windows of a sequence that was decoded in one go."""
    memory = HybridMemory.for_model(model.config, 1, len(tokens), torch.device("cpu"))
    for ubatch in memory.split([Span(0, 0, list(tokens), [])], len(tokens), "equal"):
        model.forward(ubatch, memory)
    assert memory.recurrent is not None
    return list(memory.recurrent.live(0).values())


def drafted(run: Run) -> tuple[list[list[int]], np.ndarray]:
    """Every drafted token, [position, index in the draft, id], and the drafter's confidence."""
    tokens = run.trace.tokens
    chosen = tokens.column("draft_index") != MISSING
    ids = np.stack([tokens.column(name) for name in ("pos", "draft_index", "token_id")], 1)
    return ids[chosen].tolist(), tokens.column("draft_p")[chosen]
