"""This engine's side: the same work, done by a loaded model."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from engine.batch import Span
from engine.experiments.bench.against.llama_server import SpeculativeResult, SpeculativeWork
from engine.experiments.bench.against.tasks import PassWork
from engine.experiments.bench.request import Configuration, measure_request
from engine.memory.hybrid import HybridMemory
from engine.options import Prompt, RunOptions, SamplerOptions

if TYPE_CHECKING:
    from engine.model.hybrid import HybridModel
    from engine.session import Session

_UBATCH = 512


class OwnPasses:
    """Forward passes behind a context that stays the same.

    depth: its tokens, at least one. n_most: the most tokens of a work.
    """

    def __init__(self, model: HybridModel, depth: int, n_most: int) -> None:
        self._model, self._depth = model, max(depth, 1)
        random = torch.Generator().manual_seed(0)
        n_all = self._depth + n_most
        self._tokens = torch.randint(model.config.n_vocab, (n_all,), generator=random).tolist()
        self._memory = HybridMemory.for_model(model.config, 1, n_all, model.device)
        self._decode(0, self._depth, _UBATCH, all_logits=False)
        self._context = self._memory.save(0)

    @torch.inference_mode()
    def measure(self, work: PassWork) -> float:
        """Tokens per second: once untimed, then the median of the repetitions."""
        taken = []
        for _ in range(1 + work.repeats):
            start = perf_counter()
            width = 1 if work.one_by_one else _UBATCH
            self._decode(self._depth, work.n_tokens, width, all_logits=work.all_logits)
            taken.append(perf_counter() - start)
            self._memory.restore(0, self._context)
        return work.n_tokens / median(taken[1:])

    @torch.inference_mode()
    def _decode(self, start: int, n_tokens: int, width: int, *, all_logits: bool) -> None:
        stop = start + n_tokens
        for at in range(start, stop, width):
            tokens = self._tokens[at : min(at + width, stop)]
            wanted = range(len(tokens)) if all_logits else [len(tokens) - 1]
            span = Span(0, at, tokens, wanted)
            (ubatch,) = self._memory.split([span], _UBATCH, "seq")
            self._model.forward(ubatch, self._memory)


def own_request(session: Session, options: RunOptions, work: SpeculativeWork) -> SpeculativeResult:
    """The request decoded here. options: sizes, policy and the like; what the work says goes
    first. Raises what Session.start raises."""
    spec = replace(
        options.spec,
        types=("draft-mtp",),
        n_max=len(work.rates),
        p_min=0.0,
        synth_rates=work.rates,
        synth_len=None,
    )
    asked = replace(
        options,
        spec=spec,
        n_predict=work.n_predict,
        ignore_eos=True,
        sampler=replace(SamplerOptions(), temp=0.0),
    )
    done = measure_request(session, Prompt(work.prompt, ""), "", Configuration("", asked))
    drafted = done.draft_n
    return SpeculativeResult(
        done.predicted_per_second, done.draft_n_accepted / drafted if drafted else 0.0
    )
