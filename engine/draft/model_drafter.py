"""What drafting with a model has in common: step, confidence floor, length limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from engine.draft.drafter import Draft, DraftRequest
from engine.draft.token_draws import TokenDraws
from engine.memory.batch import UBatch
from engine.options import SpecOptions
from engine.trace.records import N_TOP
from engine.transfer import read
from kernels.top_k import top_k

_N_CANDIDATES = 10


class ModelDrafter(ABC):
    """One token per step for all sequences that are still drafting.

    The candidate is the most probable token, or with `draws` one drawn from the ten most probable;
    its probability is taken over the ten largest raw logits without temperature. Below p_min the
    candidate is dropped and the sequence stops; a draft shorter than n_min is thrown away
    (llama.cpp #22506).
    """

    name: str
    n_max: int

    def __init__(self, options: SpecOptions, draws: TokenDraws | None = None) -> None:
        self.n_max, self._p_min, self._n_min = options.n_max, options.p_min, options.n_min
        self._draws = draws

    def begin(self, seq: int, prompt: Sequence[int]) -> None:  # noqa: B027 - a hook
        """What was observed of the prompt is enough."""

    def accept(self, seq: int, n_accepted: int, *, is_other: bool) -> None:  # noqa: B027 - a hook
        """What is observed afterwards is enough."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request."""
        drafts = {request.seq: Draft(drafter=self.name) for request in requests}
        alive = list(requests)
        logits = self._first(alive)
        while True:
            largest, where = top_k(logits, min(_N_CANDIDATES, logits.shape[-1]))
            on_host = read(where, largest, torch.softmax(largest, -1))
            ids, values, probs = (each.tolist() for each in on_host)
            rows = []
            for row, request in enumerate(alive):
                draft, rank = drafts[request.seq], 0
                if self._draws:
                    rank = self._draws.rank(request.seq, values[row])
                if probs[row][rank] < self._p_min:
                    draft.reason = "p_min"
                    continue
                if self._draws:
                    passed = np.array(probs[row]) >= self._p_min
                    draft.q.append(self._draws.q(ids[row], values[row], passed))
                draft.tokens.append(ids[row][rank])
                draft.probs.append(probs[row][rank])
                draft.top_ids.append(ids[row][:N_TOP])
                draft.top_probs.append(probs[row][:N_TOP])
                if len(draft.tokens) < min(request.n_max, self.n_max):
                    rows.append(row)
                elif len(draft.tokens) < self.n_max:
                    draft.reason = "limit"
            if not rows:
                break
            alive = [alive[row] for row in rows]
            logits = self._next(alive, [drafts[request.seq] for request in alive], rows)
        for draft in drafts.values():
            if len(draft.tokens) < self._n_min:
                draft.cut(0, "n_min")
        return [drafts[request.seq] for request in requests]

    def resume(self, seq: int, n_tokens: int) -> None:
        """Cut memory to these tokens; a new sequence draws random numbers of its own."""
        if self._draws:
            self._draws.forget(seq)

    def forget(self, seq: int) -> None:
        """Drop the sequence."""
        if self._draws:
            self._draws.forget(seq)

    @abstractmethod
    def _first(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        """Catch up with the target, decode `last` of every request: logits [n, n_vocab]."""

    @abstractmethod
    def _next(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], rows: Sequence[int]
    ) -> torch.Tensor:
        """Decode the newest drafted token of each; `rows` are their rows in the step before."""


def single_tokens(requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> UBatch:
    """The newest drafted token of every sequence as one ubatch, all with outputs."""
    tokens = [[draft.tokens[-1]] for draft in drafts]
    positions = [[r.pos0 + len(d.tokens)] for r, d in zip(requests, drafts, strict=True)]
    return UBatch(
        np.array(tokens),
        np.array(positions),
        tuple(request.seq for request in requests),
        np.arange(len(tokens)),
    )
