"""Teacher forcing: logits of a model along given texts, and how far rounding moves them.

A server's logits are never ours: it rounds what a weight is multiplied with, keeps keys and values
in half precision, and adds in another order. So the text is decoded once more by models that round
as the engine of the run does, with the jitter of a peer's noise lanes. The most that they move the
logit of either of the two most probable tokens may happen to both in opposite directions: a token
whose logit is within twice that of the best one is a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from engine.batch import Span
from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.gguf.binary import check_cancelled
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV, GatheredCells
from engine.model.hybrid import HybridModel
from engine.model.parts import CellKey
from engine.observe.rescoring.identity import is_observed
from engine.progress import ReportProgress
from engine.session import Session
from engine.trace.facts import RunFacts

_LONGEST_PASS = 512
_MOST_LOGITS = 1 << 26
"""Bytes of logits that one pass may give: measures of them take several times as much."""
_SEEDS = (1, 2, 3)
_ENOUGH = 4096
"""Positions after which further texts are not measured: the largest change has been met."""
_FINE = 3
"""Jittered by no more than sums differ, as in engine.compare.peer_lane."""


class HalfCells(AttentionKV):
    """Keys and values rounded to half precision, as a server keeps them by default."""

    def update(
        self, layer: CellKey, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> GatheredCells:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_heads, dim]."""
        return super().update(layer, _rounded(k), v if v is None else _rounded(v))

    def places(self, layer: CellKey) -> None:
        """None: what is written has to be rounded."""


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.half().to(rows.dtype)


class Teacher:
    """Decodes texts of up to n_tokens tokens with several models side by side, which have the
    vocabulary and the layers in common. half: those whose attention cells are rounded."""

    def __init__(
        self, models: Sequence[HybridModel], n_tokens: int, half: Sequence[HybridModel] = ()
    ) -> None:
        self._models = [*models, *half]
        config = models[0].config
        self._memories = [
            HybridMemory.for_model(config, 1, n_tokens, model.device) for model in self._models
        ]
        for memory in self._memories[len(models) :]:
            cells = memory.attention
            memory.attention = HalfCells(cells.layers, 1, n_tokens, cells.device)
        self._n_pass = max(1, min(_LONGEST_PASS, _MOST_LOGITS // (4 * config.n_vocab)))

    @torch.inference_mode()
    def rows(
        self, tokens: Sequence[int], first: int = 0
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """After each part of a text: the index of the first row, and of every model the logits
        [n, n_vocab] after the tokens at that index, the next … Rows before `first` are left out.
        """
        for memory in self._memories:
            memory.clear(0)
        start = 0
        while start < len(tokens):
            n = _LONGEST_PASS if start + _LONGEST_PASS <= first else self._n_pass
            stop = min(start + n, len(tokens))
            wanted = range(min(max(first - start, 0), stop - start), stop - start)
            span = Span(0, start, tokens[start:stop], wanted)
            yield (
                start + wanted.start,
                [
                    self._decode(model, memory, span)
                    for model, memory in zip(self._models, self._memories, strict=True)
                ],
            )
            start = stop

    def _decode(self, model: HybridModel, memory: HybridMemory, span: Span) -> torch.Tensor:
        parts = [
            model.forward(ubatch, memory).logits
            for ubatch in memory.split([span], len(span.tokens), "equal")
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
