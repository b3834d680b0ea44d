"""Sample-and-match verification, and what the target thought of every examined token."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from engine.decode.sampler import Rows, Sampler
from engine.draft.drafter import Draft
from engine.trace.records import N_TOP
from engine.transfer import read, upload
from kernels.top_k import top_k

_UNLIKELY = -1e4
"""Least logit below the largest; e to the power of it is 0."""


@dataclass(slots=True)
class Acceptance:
    """What a rule made of a draft.

    tokens: the accepted list, the accepted prefix of the draft and one token of the target's own.
    judged_p, judged_q: probabilities of each examined draft token as the rule saw them, the
    target's and the drafter's (NaN where the rule does not look at it). own_p: the target's
    probability of the last of tokens.
    """

    tokens: list[int]
    judged_p: list[float] = field(default_factory=list)
    judged_q: list[float] = field(default_factory=list)
    own_p: float = math.nan


def match(draft: Draft, rows: Rows, sampler: Sampler, end_tokens: Collection[int]) -> Acceptance:
    """Sample every position; a drafted token is accepted if it is the one that was drawn.

    rows: the target's distributions at the positions of the verify batch, asked for in order.
    One random number is drawn per examined position, so the tokens are those of plain decoding.
    An end token inside the draft closes the list. Accepts 1 .. len(draft.tokens) + 1 tokens.
    """
    found = Acceptance([])
    for i, drafted in enumerate(draft.tokens):
        p = rows(i)
        token = sampler.draw(p)
        found.tokens.append(token)
        found.judged_p.append(p.of(drafted))
        found.judged_q.append(math.nan)
        if token != drafted or closes(i, token, draft, end_tokens):
            found.own_p = p.of(token)
            return found
    return with_bonus(found, rows, sampler)


def closes(i: int, token: int, draft: Draft, end_tokens: Collection[int]) -> bool:
    """Whether an accepted token ends the list before the end of its draft."""
    return token in end_tokens and i < len(draft.tokens) - 1


def with_bonus(found: Acceptance, rows: Rows, sampler: Sampler) -> Acceptance:
    """Add the token that the target chooses behind a draft that was accepted whole."""
    p = rows(len(found.tokens))
    found.tokens.append(sampler.draw(p))
    found.own_p = p.of(found.tokens[-1])
    return found


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


def target_facts(logits: torch.Tensor, tokens: Sequence[int]) -> TargetFacts:
    """Facts about `tokens`, one per row of logits [n, n_vocab]."""
    wanted = upload(tokens, logits.device).unsqueeze(1)
    top, ids = top_k(logits, min(N_TOP, logits.shape[1]))
    own, largest = logits.gather(1, wanted), top[:, :1]
    # relative to the largest; a banned or infinitely unlikely token stays finite and adds nothing
    shifted = (logits - largest).clamp_min_(_UNLIKELY)
    weights = shifted.exp()
    total = weights.sum(1, keepdim=True)
    entropy = total.log().squeeze(1) - torch.linalg.vecdot(weights, shifted) / total.squeeze(1)
    prob, n_larger, *others = (
        values.tolist()
        for values in read(
            ((own - largest).exp() / total).squeeze(1), (top > own).sum(1), entropy, ids,
            (top - largest).exp() / total,
        )
    )  # fmt: skip
    # a row is counted whole only where more than the top are larger
    beyond = [row for row, n in enumerate(n_larger) if n == top.shape[1]]
    if beyond:
        rows = upload(beyond, logits.device)
        (counts,) = read((logits[rows] > own[rows]).sum(1))
        for row, n in zip(beyond, counts.tolist(), strict=True):
            n_larger[row] = n
    return TargetFacts(prob, [n + 1 for n in n_larger], *others)
