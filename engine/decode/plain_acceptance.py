"""A second implementation of the acceptance rules, independent of engine.decode.acceptance, to
check it against.

The sampler never sees a draft: it draws token after token, each conditioned on those chosen, and
stops where plain decoding leaves the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from engine.draft.drafter import Draft, branches
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import RowDistribution, Sampler

PlainRule = Callable[[Draft, RowDistribution, Sampler, Collection[int]], list[int]]
"""A rule that returns tokens chosen from a verify batch: 1 .. len(draft.tokens) + 1, each accepted
by the sampler. Rows are requested in order, and none after the last one chosen from."""


def draw_plainly(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> list[int]:
    """Sample as if there were no draft, up to the first token that differs from the draft or an end
    token inside it."""
    chosen: list[int] = []
    for drafted in (*draft.tokens, None):
        token = sampler.draw(rows(len(chosen)))
        chosen.append(token)
        if token != drafted or (token in end_tokens and len(chosen) < len(draft.tokens)):
            break
    return chosen


def draw_along(
    tree: Draft,
    tokens: list[int],
    rows: RowDistribution,
    sampler: Sampler,
    end_tokens: Collection[int],
) -> tuple[list[int], list[int]]:
    """Sample as if there were no tree, as long as a node holds the sampled token. tokens: starts
    with the newest token; each followed node's token is appended. Returns the chosen tokens and the
    nodes of the first branch through the followed nodes."""
    chosen, paths = list[int](), branches(tree.parents)
    while True:
        depth = len(chosen)
        token = sampler.draw(rows(depth))
        chosen.append(token)
        on = [p for p in paths if depth < len(p) and tree.tokens[p[depth]] == token]
        if not on:
            return chosen, paths[0]
        tokens.append(token)
        paths = on
        if token in end_tokens and len(chosen) < len(paths[0]):
            return chosen, paths[0]


def reject_plainly(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> list[int]:
    """Keep a drafted token x with probability min(1, p(x) / q(x)), else sample from the positive
    part of p - q and stop; after a fully accepted draft sample from p (Leviathan et al. 2023, arXiv
    2211.17192, algorithm 1). A draft without q counts as certain of its tokens."""
    chosen: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        row = rows(i)
        p = dict(zip(row.ids.tolist(), row.probs.tolist(), strict=True))
        q = {drafted: 1.0}
        if draft.q:
            q = dict(zip(draft.q[i].ids.tolist(), draft.q[i].probs.tolist(), strict=True))
        if sampler.uniform() * q.get(drafted, 0.0) >= p.get(drafted, 0.0):
            left = {token: max(0.0, mass - q.get(token, 0.0)) for token, mass in p.items()}
            ids, masses = (np.array(list(x)) for x in zip(*left.items(), strict=True))
            rest = Distribution.of_weights(ids, masses) if masses.any() else row
            return [*chosen, sampler.draw(rest)]
        chosen.append(drafted)
        sampler.accept(drafted)
        if drafted in end_tokens and len(chosen) < len(draft.tokens):
            return chosen
    return [*chosen, sampler.draw(rows(len(chosen)))]


PLAIN_RULES: dict[str, PlainRule] = {"match": draw_plainly, "rejection": reject_plainly}
"""The keys are those of engine.options.ACCEPT_RULES."""
