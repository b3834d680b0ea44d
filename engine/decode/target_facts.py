"""The target's softmax at the examined places: probability, rank, entropy and best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.machine.device import read, upload
from engine.trace.records import N_TOP
from kernels.rows.record import larger_than, on_host, row_record, weights


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target's raw softmax at some positions, on the host.

    prob, rank: of the token asked about at each position, rank from 1. entropy in nats.
    top_ids, top_probs: the most probable tokens there.
    """

    prob: list[float]
    rank: list[int]
    entropy: list[float]
    top_ids: list[list[int]]
    top_probs: list[list[float]]

    @property
    def ratios(self) -> list[float]:
        """Of each probability to that of the most probable token there."""
        return [p / top[0] for p, top in zip(self.prob, self.top_probs, strict=True)]


Question = tuple[torch.Tensor, np.ndarray | None, Sequence[int], Sequence[int]]
"""Logits [n, n_vocab], their record if there is one, tokens, and the row where each is asked about.
Rows after the last one asked about are not looked at."""


def target_facts(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
) -> TargetFacts:
    """Facts about `tokens`. logits: [n, n_vocab]. rows: where each token is asked about, one after
    the other if None."""
    asked = range(len(tokens)) if rows is None else rows
    if not len(tokens):
        return TargetFacts([], [], [], [], [])
    return TargetFacts(*(x.tolist() for x in all_target_facts([(logits, None, tokens, asked)])))


def all_target_facts(questions: Sequence[Question]) -> tuple[np.ndarray, ...]:
    """The fields of TargetFacts, of one question after the other, at least one. Logits are looked
    at for tokens alone that the record of their row (kernels.rows.record) does not know."""
    records = [_record(*one) for one in questions]
    starts = [0, *accumulate(map(len, records))]
    known = on_host(np.concatenate(records))
    at = np.array(
        [start + row for start, one in zip(starts, questions, strict=False) for row in one[3]]
    )
    tokens = np.array([token for one in questions for token in one[2]])
    totals = known.sums[:, 0]
    top_probs = (weights(known.values, known.values[:, :1]) / totals[:, None])[at]
    logs = totals.copy()
    torch.from_numpy(logs).log_()
    entropy = logs - known.sums[:, 1] / totals
    top_ids, largest = known.ids[at], known.values[at]
    is_it = top_ids == tokens[:, None]
    place, n = is_it.argmax(1), np.arange(len(at))
    prob = top_probs[n, place]
    rank = 1 + (largest == largest[n, place][:, None]).argmax(1)  # the first equal one
    (others,) = np.nonzero(~is_it.any(1))
    if others.size:
        own, n_larger = known.own[at], known.n_larger[at]
        every = [(one[0], row) for one in questions for row in one[3]]
        for i in others[known.asked[at[others]] != tokens[others]].tolist():
            logits, row = every[i]
            wanted = upload([[int(tokens[i])]], logits.device)
            (own[i],), (n_larger[i],) = (
                x[0] for x in read(*larger_than(logits[row : row + 1], wanted))
            )
        prob[others] = (weights(own, largest[:, 0]) / totals[at])[others]
        rank[others] = 1 + n_larger[others]
    return prob, rank, entropy[at], top_ids, top_probs


def _record(
    logits: torch.Tensor, record: np.ndarray | None, tokens: Sequence[int], rows: Sequence[int]
) -> np.ndarray:
    """Of the rows up to the last one asked about."""
    n = max(rows) + 1
    if record is not None:
        return record[:n]
    asked = [0] * n
    for row, token in zip(rows, tokens, strict=True):
        asked[row] = token
    k = min(N_TOP, logits.shape[1])
    found: np.ndarray = read(row_record(logits[:n], k, upload(asked, logits.device)))[0]
    return found
