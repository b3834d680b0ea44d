"""Which sequences are verified in one forward pass, and how much filler makes them equally long.

A recurrent layer decodes rectangles, so drafts of unequal length do not fit side by side as they
are. Two ways out exist: another pass for each length, or filler tokens after the shorter drafts,
which are not looked at and are rolled back like rejected ones. `group` weighs them. A verify
batch never spreads over several ubatches as long as it fits one, so keep-tail (llama.cpp #25278)
is kept by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.batch import Span, UBatch
from engine.decode.forward import Forward
from engine.memory.hybrid import HybridMemory

PASS_COST = 16
"""Tokens that take as long as starting one more pass does.

A pass of n tokens takes a + b * n: a for reading all weights and calling all operations, b for
the arithmetic. Measured on CPUs, a / b lies between 6 (0.65 B parameters, int8) and 60 (the demo
model); on a GPU, which idles while it reads weights, it is higher still. So short drafts share
a pass whatever their lengths, and one draft of 48 does not drag four slots of one token along.
"""

SNAPSHOTS = "padding beyond the snapshots"
CONTEXT = "padding beyond the context"
COST = "padding dearer than a pass"
N_UBATCH = "n_ubatch"
LAST = "all tokens"

Obstacle = Callable[[int, int], str]
"""Why span i must not be padded to this width, empty if it may be."""


SpanGroup = tuple[tuple[int, ...], int, str]
"""Spans that share a pass: their indices, ascending, tokens of each, filler included, and why those
of the next group are not among them."""


def group(lengths: Sequence[int], n_ubatch: int, obstacle: Obstacle) -> list[SpanGroup]:
    """Groups in order of falling width whose cost, PASS_COST per group and 1 per token, is least.

    Spans of neighbouring lengths go together: each group is a run of the spans in order of
    falling length, as long as its longest. A group of several fits n_ubatch. Of equally dear ways
    the one with the fewest passes is taken, then the one whose last groups are smallest.
    """
    if len(lengths) == 1:
        return [((0,), lengths[0], LAST)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # of the first j spans in order: least cost and passes, and minus the start of their last group
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
    """The batches of a round, to be decoded and rolled back one after the other: spans, filled up
    to one length, and their ubatches: a single one, unless one sequence alone has more tokens than
    a ubatch may have.

    split: "seq" for one sequence per pass, else "equal". Rolling back before the next batch is
    decoded matters: a pass without a sequence may move its state, which then loses its snapshots.
    rolls_back: whether filler has to be undone by snapshots; else any sequence may be filled up.
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
    """Filler needs cells of the sequence's own, and snapshots after all of the batch but its
    first token, because a checkpoint and a replay would cost more than any other pass."""
    seq, recurrent = spans[i].seq, memory.recurrent
    if memory.attention.used(seq) + width > memory.attention.n_ctx:
        return CONTEXT
    if rolls_back and recurrent and recurrent.guaranteed_depth(seq, width) < width - 1:
        return SNAPSHOTS
    return ""


def padded(span: Span, width: int) -> Span:
    """A span of this many tokens, the last one repeated as filler."""
    n = width - len(span.tokens)
    if not n:
        return span
    return replace(span, tokens=[*span.tokens, *[span.tokens[-1]] * n], n_padding=n)
