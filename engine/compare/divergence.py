"""Divergence of a lane from the reference lane in logits, recurrent states and cells, and its rows
in the trace.

Several lanes are compared with one reference, so its part of every measure is computed once.
Fidelity is the divergence of a compute mode from f32 over the model's own greedy text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import Cancelled, OptionError
from engine.memory.hybrid import HybridMemory
from engine.options import RunOptions
from engine.session import Session
from engine.trace.facts import FidelityFacts
from engine.trace.records import MISSING
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """Measures at n positions; every list has n entries.

    max_abs: largest |a - b|. nmse: mean((a - b)^2) / mean(a^2), the measure of llama.cpp's backend
    tests. kl: KL(reference || lane) of the softmaxes, nats. rank: of the chosen token among the
    lane's logits, from 1. top2_gap: of the reference's two largest logits. A lane with non-finite
    logits gives NaN.
    """

    max_abs: list[float]
    nmse: list[float]
    kl: list[float]
    top1_equal: list[bool]
    rank: list[int]
    top2_gap: list[float]

    def at(self, i: int) -> LogitsDifference:
        """The measures at position i, as lists of one."""
        return LogitsDifference(*([getattr(self, field.name)[i]] for field in fields(self)))


class ReferenceLogits:
    """The reference's logits [n, n_vocab] and the n tokens chosen from them."""

    def __init__(self, logits: Tensor, chosen: Sequence[int]) -> None:
        self._a = a = logits.double()
        self._rows = a
        self._chosen = torch.tensor(chosen, device=a.device).unsqueeze(1)
        self._power = a.square().mean(1)
        self._log_p = torch.log_softmax(a, 1)
        self._p = self._log_p.exp()
        self._top1 = a.argmax(1)
        top = torch.topk(a, 2).values
        self._top2_gap: list[float] = (top[:, 0] - top[:, 1]).tolist()

    def difference(self, lane: Tensor) -> LogitsDifference:
        """Measures of a lane's logits [n, n_vocab], in float64."""
        b = lane.to(self._a)
        error = self._a - b
        # rounding leaves a tiny negative sum for equal logits
        kl = (self._p * (self._log_p - torch.log_softmax(b, 1))).sum(1).clamp_min(0.0)
        of_chosen = b.gather(1, self._chosen)
        return LogitsDifference(
            error.abs().amax(1).tolist(),
            _ratio(error.square().mean(1), self._power).tolist(),
            kl.tolist(),
            (self._top1 == b.argmax(1)).tolist(),
            ((b > of_chosen).sum(1) + 1).tolist(),
            self._top2_gap,
        )

    def row_of(self, lane: Tensor, limit: float) -> int | None:
        """The row that a lane's logits [n_vocab] equal, with an NMSE up to `limit`."""
        error = (self._rows - lane.to(self._rows)).square().mean(1)
        nmse = _ratio(error, self._power)
        best = int(nmse.argmin())
        return best if float(nmse[best]) <= limit else None


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """Difference of one sequence in two memories that hold the same tokens.

    state, conv: largest relative error |a - b| / |a| of the states and convolution windows per
    recurrent layer; infinite if not finite, NaN if a layer has none. n_cells: attention cells that
    only one of them has, or beyond one per position; cells are the same in all attention layers.
    """

    layers: tuple[int, ...]
    state: list[float]
    conv: list[float]
    n_cells: int

    def first_wrong(self, limit: float) -> int | None:
        """The first layer with a state or window error above `limit`."""
        errors = zip(self.layers, self.state, self.conv, strict=True)
        return next((i for i, state, conv in errors if state > limit or conv > limit), None)


class ReferenceMemory:
    """The reference's memory of a sequence, as its next token would read it."""

    def __init__(self, memory: HybridMemory, seq: int = 0) -> None:
        self._positions = memory.attention.positions(seq)
        self.layers: tuple[int, ...] = ()
        if memory.recurrent is not None:
            self._layout = memory.recurrent.layout
            self.layers = self._layout.layers
            # the reference decodes on, and live() does not copy its rows
            self._states = {key: t.clone() for key, t in memory.recurrent.live(seq).items()}
            self._sizes = _norms(self._states.values())

    def difference(
        self, lane: HybridMemory, seq: int = 0, beside: Sequence[int] = ()
    ) -> MemoryDifference:
        """Difference of a sequence in another memory; pending rollbacks count as done.

        beside: sequences of the next pass, including this one; none = it alone. States are compared
        as such a pass would read them.
        """
        seqs = beside or (seq,)
        n_cells = cells_that_differ(self._positions, lane.attention.positions(seq))
        if not self.layers or lane.recurrent is None:
            return MemoryDifference((), [], [], n_cells)
        theirs = lane.inputs(seqs)[seqs.index(seq)]
        apart = _norms(theirs[key] - mine for key, mine in self._states.items())
        ratios = _ratio(apart, self._sizes).nan_to_num(math.inf, math.inf)
        errors = dict(zip(self._states, ratios.tolist(), strict=True))
        state, conv = (self._layout.worst(errors, windows=windows) for windows in (False, True))
        return MemoryDifference(self.layers, state, conv, n_cells)


def cells_that_differ(reference: np.ndarray, lane: np.ndarray) -> int:
    """Cells of either lane without a counterpart in the other, from the position of each cell."""
    low = min(reference.min(initial=0), lane.min(initial=0))
    length = int(max(reference.max(initial=0), lane.max(initial=0)) - low) + 1
    counts = [np.bincount(positions - low, minlength=length) for positions in (reference, lane)]
    return int(np.abs(counts[0] - counts[1]).sum())


def _norms(states: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of each, float64."""
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in states])


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, with 0 / 0 = 0."""
    return torch.where(error == 0, error, error / size)


Compared = tuple[int, int, int, Sequence[int], LogitsDifference, MemoryDifference | None]
"""For a round of a sequence: round number, seq_id, first position, tokens chosen from there on,
differences of the logits at each, and of the memories before the last position."""


class DivergenceRows:
    """Writes a lane's rows of the tables `divergence` and `states`."""

    def __init__(self, trace: TraceStore, run_id: int, lane: str) -> None:
        self._trace, self._run_id, self._lane = trace, run_id, lane

    def append(self, *compared: *Compared) -> None:
        """Add a row per chosen token; the last one holds the difference of the memories."""
        number, seq_id, first_pos, chosen, logits, memories = compared
        n = len(chosen)
        state = conv = math.nan
        cells = MISSING
        if memories:
            cells = memories.n_cells
            if memories.layers:
                state, conv = _largest(memories.state), _largest(memories.conv)
                self.states(number, seq_id, first_pos + n - 2, memories)
        no_state = [math.nan] * (n - 1)
        columns: dict[str, list[Any]] = {
            **self._key(n, number, seq_id),
            "pos": list(range(first_pos, first_pos + n)),
            "token_id": list(chosen),
            **{one.name: getattr(logits, one.name) for one in fields(logits)},
            "state_error": [*no_state, state],
            "conv_error": [*no_state, conv],
            "cells_differ": [*[MISSING] * (n - 1), cells],
        }
        self._trace.divergence.extend(columns)

    def states(self, number: int, seq_id: int, pos: int, memories: MemoryDifference) -> None:
        """Add a row per recurrent layer, for states whose last position is pos."""
        n = len(memories.layers)
        self._trace.states.extend(
            {
                **self._key(n, number, seq_id),
                "pos": [pos] * n,
                "layer": list(memories.layers),
                "state_error": memories.state,
                "conv_error": memories.conv,
            }
        )

    def _key(self, n: int, number: int, seq_id: int) -> dict[str, list[Any]]:
        return {
            "run_id": [self._run_id] * n,
            "lane": [self._lane] * n,
            "round": [number] * n,
            "seq_id": [seq_id] * n,
        }


def _largest(errors: Sequence[float]) -> float:
    """The largest, NaN if there is none."""
    return max((error for error in errors if not math.isnan(error)), default=math.nan)


N_TOKENS = 128
"""Tokens generated for the measurement."""
_BLOCK = 16
"""Positions compared at once: each takes megabytes per vocabulary in float64."""


def greedy_text(
    session: Session, text: str, n_tokens: int, cancelled: Callable[[], bool] = lambda: False
) -> list[int]:
    """The prompt's tokens and the model's greedy continuation. Raises Cancelled."""
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

    Raises OptionError for fewer than two tokens, and ModelFileError if a model's file has changed,
    so that the two may differ.
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
