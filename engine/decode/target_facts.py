"""The target's softmax at the examined places: probability, rank, entropy and best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from engine.machine.device import read, upload
from engine.trace.records import N_TOP
from kernels.rows.reductions import LEAST, softmax_sums, top_k


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
    rows = range(len(tokens)) if rows is None else rows
    top, ids = top_k(logits, min(N_TOP, logits.shape[1]))
    # relative to the largest; a banned or infinitely unlikely token stays finite and adds nothing
    sums = softmax_sums(logits, top[:, 0])
    on_host = read(ids, top, (top - top[:, :1]).clamp_min_(LEAST).exp_(), sums, sums[:, :1].log())
    top_ids, largest = on_host[0].tolist(), on_host[1].tolist()
    totals, dots = on_host[3][:, :1], on_host[3][:, 1]
    top_probs = (on_host[2] / totals).tolist()
    entropy = (on_host[4][:, 0] - dots / totals[:, 0]).tolist()
    facts = TargetFacts([], [], [], [], [])
    beyond = []  # only there a row is looked through again
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if token in top_ids[row]:
            place = top_ids[row].index(token)
            facts.prob.append(top_probs[row][place])
            facts.rank.append(1 + largest[row].index(largest[row][place]))  # the first equal one
        else:
            beyond.append(i)
            facts.prob.append(0.0)
            facts.rank.append(0)
        facts.entropy.append(entropy[row])
        facts.top_ids.append(top_ids[row])
        facts.top_probs.append(top_probs[row])
    if beyond:
        at, wanted = upload([[rows[i] for i in beyond], [tokens[i] for i in beyond]], logits.device)
        asked = logits[at, wanted]
        n_larger, weight = read(
            (logits[at] > asked.unsqueeze(1)).sum(1), (asked - top[at, 0]).clamp_min_(LEAST).exp_()
        )
        for i, n, w in zip(beyond, n_larger.tolist(), weight, strict=True):
            facts.rank[i] = 1 + n
            facts.prob[i] = float(w / totals[rows[i], 0])
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
