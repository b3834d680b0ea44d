"""Sample-and-match verification, and what the target thought of every examined token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from engine.trace.records import N_TOP


def accept(
    draft: Sequence[int], pick: Callable[[int], int], end_tokens: Collection[int]
) -> list[int]:
    """The accepted list: the draft's matching prefix and one token of the target's own.

    pick(i) samples position i of the verify batch and is called once per examined position, in
    order. An end token inside the draft closes the list. Length 1 .. len(draft) + 1.
    """
    chosen: list[int] = []
    for i, drafted in enumerate(draft):
        token = pick(i)
        chosen.append(token)
        if token != drafted or (token in end_tokens and i < len(draft) - 1):
            return chosen
    chosen.append(pick(len(draft)))
    return chosen


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
    wanted = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    log_p = torch.log_softmax(logits, -1)
    of_token = log_p.gather(1, wanted)
    top = torch.topk(log_p, min(N_TOP, log_p.shape[1]))
    # a banned or infinitely unlikely token has log p = -inf and adds nothing
    entropy = -(log_p.exp() * log_p.clamp_min(-1e4)).sum(1)
    return TargetFacts(
        of_token.squeeze(1).exp().tolist(),
        ((log_p > of_token).sum(1) + 1).tolist(),
        entropy.tolist(),
        top.indices.tolist(),
        top.values.exp().tolist(),
    )
