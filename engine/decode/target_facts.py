"""The target's softmax at the examined places: probability, rank, entropy and best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from engine.machine.device import read, upload
from engine.trace.records import N_TOP
from kernels.rows.record import asked_about, on_host, row_record


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

    def part(self, start: int, stop: int) -> TargetFacts:
        """The facts at positions start..stop."""
        return TargetFacts(
            self.prob[start:stop],
            self.rank[start:stop],
            self.entropy[start:stop],
            self.top_ids[start:stop],
            self.top_probs[start:stop],
        )


def target_facts(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
) -> TargetFacts:
    """Facts about `tokens`. logits: [n, n_vocab]. rows: where each token is asked about, one after
    the other if None."""
    (record,) = read(row_record(logits, min(N_TOP, logits.shape[1])))
    return facts_in(record, logits, tokens, range(len(tokens)) if rows is None else rows)


def facts_in(
    record: np.ndarray, logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int]
) -> TargetFacts:
    """`target_facts` by what is known of the logits' rows (kernels.rows.record); they are looked at
    for tokens alone that the record does not know."""
    known = on_host(record)
    top_ids, largest = known.ids.tolist(), known.values.tolist()
    totals = known.sums[:, 0]
    top_probs = (known.weights / totals[:, None]).tolist()
    entropy = (known.log - known.sums[:, 1] / totals).tolist()
    facts = TargetFacts([], [], [], [], [])
    beyond = []  # only there a row is looked through again
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        prob, rank = 0.0, 0
        if token in top_ids[row]:
            place = top_ids[row].index(token)
            prob = top_probs[row][place]
            rank = 1 + largest[row].index(largest[row][place])  # the first equal one
        elif known.asked.size and known.asked[row] == token:
            prob, rank = float(known.weight[row] / totals[row]), 1 + int(known.n_larger[row])
        else:
            beyond.append(i)
        facts.prob.append(prob)
        facts.rank.append(rank)
        facts.entropy.append(entropy[row])
        facts.top_ids.append(top_ids[row])
        facts.top_probs.append(top_probs[row])
    if beyond:
        at, wanted = upload([[rows[i] for i in beyond], [tokens[i] for i in beyond]], logits.device)
        top = upload(known.values[[rows[i] for i in beyond], :1], logits.device)
        n_larger, weights = read(*asked_about(logits[at], wanted.unsqueeze(1), top))
        for i, n, weight in zip(beyond, n_larger[:, 0].tolist(), weights[:, 0], strict=True):
            facts.rank[i], facts.prob[i] = 1 + n, float(weight / totals[rows[i]])
    return facts


def all_target_facts(
    asked: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]],
) -> list[TargetFacts]:
    """`target_facts` of each of these arguments, for all rows at once: the same values."""
    if not asked:
        return []
    # rows after the last one asked about are not looked at
    used = [logits[: max(rows) + 1] for logits, _, rows in asked]
    starts = [0, *accumulate(map(len, used))]
    shifted = [start + row for start, one in zip(starts, asked, strict=False) for row in one[2]]
    all_tokens = [token for _, tokens, _ in asked for token in tokens]
    found = target_facts(used[0] if len(used) == 1 else torch.cat(used), all_tokens, shifted)
    ends = [0, *accumulate(len(tokens) for _, tokens, _ in asked)]
    return [found.part(start, end) for start, end in pairwise(ends)]
