"""Batching of a verify round: which sequences share a forward pass, and how they are padded.

A recurrent layer decodes rectangles, so drafts of different lengths cannot share a pass as they
are. Either each length gets a pass of its own, or shorter drafts are padded with filler tokens,
which are ignored and rolled back like rejected ones. `group` weighs both. A verify batch that fits
one ubatch is never split, which keeps the tail together as llama.cpp #25278 requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.batch import Span, UBatch
from engine.decode.forward import Forward
from engine.memory.hybrid import HybridMemory

PASS_COST = 16
"""Tokens that take as long as starting one more pass.

A pass of n tokens takes a + b * n: a for reading all weights and launching all operations, b for
the arithmetic. On CPUs a / b was measured between 6 (0.65 B parameters, int8) and 60 (the demo
model); on a GPU, where reading weights dominates, it is higher. So short drafts share a pass
whatever their lengths, while a draft of 48 does not force four slots of one token to pad.
"""

SNAPSHOTS = "padding beyond the snapshots"
CONTEXT = "padding beyond the context"
COST = "padding costs more than a pass"
N_UBATCH = "n_ubatch"
LAST = "all tokens"

Obstacle = Callable[[int, int], str]
"""Why span i must not be padded to this width; empty if it may be."""


SpanGroup = tuple[tuple[int, ...], int, str]
"""Spans that share a pass: their indices, ascending; tokens per span, filler included; why the next
group's spans are not in it."""


def group(lengths: Sequence[int], n_ubatch: int, obstacle: Obstacle) -> list[SpanGroup]:
    """Groups in order of falling width with the least cost: PASS_COST per group plus 1 per token.

    A group is a run of neighbours in order of falling length, padded to its longest, and fits
    n_ubatch if it has several spans. Ties: fewest passes, then smallest last groups.
    """
    if len(lengths) == 1:
        return [((0,), lengths[0], LAST)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # for the first j spans: least cost, passes, and minus the start of their last group
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    best += [(PASS_COST * len(order) + sum(lengths) + 1, len(order) + 1, 0)] * len(order)
    for start in range(len(order)):
        width = lengths[order[start]]
        for stop in range(start + 1, len(order) + 1):
            newest, n_tokens = order[stop - 1], (stop - start) * width
            if stop - start > 1 and (
                n_tokens > n_ubatch or _refusal(lengths, newest, width, obstacle)
            ):
                break
            cost = best[start][0] + PASS_COST + n_tokens
            best[stop] = min(best[stop], (cost, best[start][1] + 1, -start))
    groups: list[SpanGroup] = []
    stop = len(order)
    while stop:
        start = -best[stop][2]
        width, reason = lengths[order[start]], LAST
        if groups:
            others = groups[-1][0]
            n_tokens = (stop - start + len(others)) * width
            refusals = (_refusal(lengths, i, width, obstacle) for i in others)
            reason = next(filter(None, refusals), N_UBATCH if n_tokens > n_ubatch else COST)
        groups.append((tuple(sorted(order[start:stop])), width, reason))
        stop = start
    return groups[::-1]


def verify_batches(
    forward: Forward, spans: Sequence[Span], split: str, *, rolls_back: bool = True
) -> list[tuple[list[Span], list[UBatch]]]:
    """The batches of a round, to be decoded and rolled back one after the other: spans padded to
    equal length, and their ubatches. There is one ubatch, unless a single sequence has more tokens
    than a ubatch may hold.

    split: "seq" for one sequence per pass, else "equal". Each batch is rolled back before the next
    is decoded, because a pass without a sequence may move its state and lose its snapshots.
    rolls_back: whether filler must be undone by snapshots; if not, any sequence may be padded.
    """
    memory = forward.memory
    if split == "seq":
        return [([span], forward.split([span])) for span in spans]
    if memory.is_pool or len(spans) == 1:
        return [(list(spans), forward.split(spans))]
    batches = []
    lengths = [len(span.tokens) for span in spans]
    obstacle = partial(_obstacle, memory, spans, rolls_back)
    for members, width, reason in group(lengths, forward.n_ubatch, obstacle):
        filled = [padded(spans[i], width) for i in members]
        *early, last = forward.split(filled)
        if last.reason != reason:
            last = replace(last, reason=reason)
        batches.append((filled, [*early, last]))
    return batches


def _refusal(lengths: Sequence[int], i: int, width: int, obstacle: Obstacle) -> str:
    return obstacle(i, width) if lengths[i] < width else ""


def _obstacle(
    memory: HybridMemory, spans: Sequence[Span], rolls_back: bool, i: int, width: int
) -> str:
    """Why a span must not be padded: filler needs the sequence's own cells, and snapshots of all
    tokens but the first, because a checkpoint and a replay cost more than another pass."""
    seq, recurrent = spans[i].seq, memory.recurrent
    if memory.attention.used(seq) + width > memory.attention.n_ctx:
        return CONTEXT
    if rolls_back and recurrent and recurrent.guaranteed_depth(seq, width) < width - 1:
        return SNAPSHOTS
    return ""


def padded(span: Span, width: int) -> Span:
    """The span padded to this many tokens with copies of its last one."""
    n = width - len(span.tokens)
    if not n:
        return span
    return replace(span, tokens=[*span.tokens, *[span.tokens[-1]] * n], n_padding=n)
