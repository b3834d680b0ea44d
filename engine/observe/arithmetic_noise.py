"""How far apart two right arithmetics put the two best tokens, measured on the text in question.

A server's logits are never ours: it rounds what a weight is multiplied with, adds in another order,
and in another one for another width of the batch. So the text is decoded once more by models that
round as the engine of the run does, jittered like the lanes of a peer's noise, and what that moves
the gap between the two most probable tokens by, at most, is what noise can do. A token that lies no
further behind the best one is a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.gguf.binary import check_cancelled
from engine.model.hybrid import HybridModel
from engine.observe.teacher import Teacher
from engine.progress import ReportProgress
from engine.session import Session
from engine.trace.writer import this_engine

_SEEDS = (1, 2, 3)
_FINE = 3
"""Jittered by no more than sums differ, as in engine.compare.peer_lane."""


def noise_of_gaps(
    session: Session,
    facts: Mapping[str, Any],
    texts: Sequence[Sequence[int]],
    progress: ReportProgress,
    cancelled: Callable[[], bool],
) -> float:
    """The largest change of the gap between the two best logits over all positions of the texts.

    facts: of the run whose tokens are judged. Raises Cancelled, and what loading a model raises.
    """
    models = [session.model, *_models_like(session, facts)]
    teacher, worst = Teacher(models, max(map(len, texts))), 0.0
    total = sum(map(len, texts))
    done = 0
    for tokens in texts:
        for _, (mine, *others) in teacher.rows(tokens):
            check_cancelled(cancelled)
            top = torch.topk(mine.double(), 2)
            gap = top.values[:, 0] - top.values[:, 1]
            for logits in others:
                pair = logits.to(mine.device).double().gather(1, top.indices)
                moved = (pair[:, 0] - pair[:, 1] - gap).abs()
                worst = max(worst, float(moved.max()))
            done += len(mine)
            progress(done, total, "measuring what rounding does")
    return worst


def _models_like(session: Session, facts: Mapping[str, Any]) -> list[HybridModel]:
    """Models with the arithmetic of the engine that made the run, a little off in several ways."""
    source = facts.get("source")
    if not isinstance(source, dict) or source.get("engine") == this_engine().engine:
        compute = str(facts.get("compute", session.compute))
        model = session.model_in(compute)
        jitters = [JITTER.get(model.compute, JITTER_ROUNDED)] * len(_SEEDS)
    else:
        model = session.model_as_llama_cpp()
        rounds = set(session.info.quant_mix) != {"F32"}
        fine = JITTER[model.compute]
        jitters = [JITTER_ROUNDED if rounds and seed != _FINE else fine for seed in _SEEDS]
    return [model.jittered(amount, seed) for amount, seed in zip(jitters, _SEEDS, strict=True)]
