"""How far apart two right arithmetics put the two best tokens, measured on the text in question.

A server's logits are never ours: it rounds what a weight is multiplied with, keeps keys and values
in half precision, adds in another order, and in another one for another width of the batch. So the
text is decoded once more by models that round as the engine of the run does, jittered like the
lanes of a peer's noise. What they move the logit of either of the two most probable tokens by, at
most, may happen to both in opposite directions: a token whose logit lies no further behind the best
one than twice that is a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.gguf.binary import check_cancelled
from engine.model.hybrid import HybridModel
from engine.observe.rescoring.identity import is_observed
from engine.observe.rescoring.teacher_forcing import Teacher
from engine.progress import ReportProgress
from engine.session import Session
from engine.trace.facts import RunFacts

_SEEDS = (1, 2, 3)
_ENOUGH = 4096
"""Positions behind which further texts are not measured: the largest change has been met."""
_FINE = 3
"""Jittered by no more than sums differ, as in engine.compare.peer_lane."""


def noise_of_gaps(
    session: Session,
    facts: RunFacts,
    texts: Sequence[Sequence[int]],
    progress: ReportProgress,
    cancelled: Callable[[], bool],
) -> float:
    """How much rounding may change the gap between the two best logits, over all positions of the
    texts, or of the first of them.

    facts: of the run whose tokens are judged. Raises Cancelled, and what loading a model raises.
    """
    n_before = np.cumsum([0, *map(len, texts)])
    texts = [text for text, n in zip(texts, n_before.tolist(), strict=False) if n < _ENOUGH]
    models, n_longest = _models_like(session, facts), max(map(len, texts))
    if is_observed(facts):
        teacher = Teacher([session.model], n_longest, half=models)
    else:
        teacher = Teacher([session.model, *models], n_longest)
    worst = 0.0
    total = sum(map(len, texts))
    done = 0
    for tokens in texts:
        for _, (mine, *others) in teacher.rows(tokens):
            check_cancelled(cancelled)
            best = torch.topk(mine, 2)
            for logits in others:
                moved = logits.to(mine.device).gather(1, best.indices) - best.values
                worst = max(worst, float(moved.abs().max()))
            done += len(mine)
            progress(done, total, "measuring what rounding does")
    return 2 * worst


def _models_like(session: Session, facts: RunFacts) -> list[HybridModel]:
    """Models with the arithmetic of the engine that made the run, a little off in several ways."""
    if not is_observed(facts):
        compute = facts.compute or session.compute
        model = session.model_in(compute)
        jitters = [JITTER.get(model.compute, JITTER_ROUNDED)] * len(_SEEDS)
    else:
        model = session.model_as_llama_cpp()
        rounds = set(session.info.quant_mix) != {"F32"}
        fine = JITTER["f32"]
        jitters = [JITTER_ROUNDED if rounds and seed != _FINE else fine for seed in _SEEDS]
    return [model.jittered(amount, seed) for amount, seed in zip(jitters, _SEEDS, strict=True)]
