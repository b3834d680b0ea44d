"""Batches and their split into ubatches.

A batch holds new tokens of each sequence, in one run per sequence. A ubatch is a rectangle of it,
n_seqs x n_seq_tokens, that one forward pass decodes. The rules of the equal split are those of
llama.cpp's hybrid memory, including *keep-tail* (PR #25278): the last `keep` tokens of a sequence
stay in one ubatch, because only that ubatch's states can be rolled back to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.machine.device import Uploads


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence, at positions pos0, pos0 + 1, …

    seq: memory sequence. outputs: indices into `tokens` whose logits are needed. n_padding: number
    of filler tokens at the end, which make spans equally long.
    """

    seq: int
    pos0: int
    tokens: Sequence[int]
    outputs: Sequence[int]
    n_padding: int = 0


@dataclass(frozen=True, slots=True)
class UBatch:
    """One forward pass: `n_seqs` sequences with `n_seq_tokens` tokens each.

    It lives on the host, where memory and drafters read it; memory uploads it to the model's
    device. tokens, positions: int64 [n_seqs, n_seq_tokens]. outputs: int64 [n_outputs], flat row
    indices (sequence-major) whose logits are needed. seq_ids: memory sequences, in row order.
    n_padding: number of filler tokens.
    """

    tokens: np.ndarray
    positions: np.ndarray
    seq_ids: tuple[int, ...]
    outputs: np.ndarray
    reason: str = ""
    n_padding: int = 0

    @property
    def n_seqs(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def n_seq_tokens(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def last_position(self) -> int:
        """The highest position; positions ascend in each row."""
        return int(max(self.positions[:, -1].tolist()))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays of UBatchTensors, on the host."""
        return self.tokens, self.positions, self.outputs

    def on(self, device: torch.device) -> UBatchTensors:
        """The ubatch's arrays on a device, all in one upload."""
        return UBatchTensors(*Uploads().put(self.arrays, device)[1])


class UBatchTensors(NamedTuple):
    """A ubatch's arrays as tensors on the model's device, of the same shapes."""

    tokens: Tensor
    positions: Tensor
    outputs: Tensor


GreedyTokens = tuple[int, Collection[int]]
"""Tokens that may be decoded one by one, each the most probable one after the last: the most of
them, including the first, which is known; and the stop tokens."""


def split_equal(spans: Sequence[Span], n_ubatch: int, *, keep: int = 0) -> list[UBatch]:
    """Rectangles with equally many tokens per sequence, at most n_ubatch tokens each.

    keep: the last `keep` tokens of each sequence share one ubatch wherever they fit.
    """
    if len(spans) == 1 and 0 < (n := len(spans[0].tokens)) <= n_ubatch:
        return [make_ubatch(spans, (0,), (0,), n, "all tokens")]
    done = [0] * len(spans)
    found: list[UBatch] = []
    while True:
        chosen = _side_by_side(spans, done, n_ubatch)
        if not chosen:
            return found
        left = [len(spans[i].tokens) - done[i] for i in chosen]
        n = min(min(left), n_ubatch // len(chosen))
        reason = _reason(n, left)
        if keep:
            n_kept = _prefix_keeping_tail(left, n, keep)
            if n_kept < len(chosen):
                reason = "keep-tail"
                chosen, left = chosen[: max(n_kept, 1)], left[: max(n_kept, 1)]
            if n_kept == 0:
                n = left[0] if left[0] <= n_ubatch else max(1, min(n_ubatch, left[0] - keep))
        found.append(make_ubatch(spans, chosen, [done[i] for i in chosen], n, reason))
        for i in chosen:
            done[i] += n


def split_simple(spans: Sequence[Span], n_ubatch: int) -> list[UBatch]:
    """Up to n_ubatch tokens per ubatch, each in a row of its own, so that spans of unequal length
    share a pass.

    Only for memories without a recurrent part: the order of rows does not matter to cells.
    """
    rows = [(i, start) for i, span in enumerate(spans) for start in range(len(span.tokens))]
    found = []
    for first in range(0, len(rows), n_ubatch):
        part = rows[first : first + n_ubatch]
        reason = "all tokens" if first + len(part) == len(rows) else "n_ubatch"
        chosen, starts = [i for i, _ in part], [at for _, at in part]
        found.append(make_ubatch(spans, chosen, starts, 1, reason))
    return found


def split_seq(spans: Sequence[Span], n_ubatch: int) -> list[UBatch]:
    """One sequence per ubatch, cut at n_ubatch tokens."""
    found = []
    for i, span in enumerate(spans):
        for start in range(0, len(span.tokens), n_ubatch):
            n = min(n_ubatch, len(span.tokens) - start)
            ends = start + n == len(span.tokens)
            reason = "one sequence" if ends else "n_ubatch"
            found.append(make_ubatch(spans, (i,), (start,), n, reason))
    return found


def make_ubatch(
    spans: Sequence[Span], chosen: Sequence[int], starts: Sequence[int], n_tokens: int, reason: str
) -> UBatch:
    """The ubatch of n_tokens tokens from a start in each chosen span (indices). reason: why the
    split ended there."""
    tokens: list[list[int]] = []
    positions: list[list[int]] = []
    outputs: list[int] = []
    n_padding = 0
    for row, (i, start) in enumerate(zip(chosen, starts, strict=True)):
        span, stop = spans[i], start + n_tokens
        tokens.append(list(span.tokens[start:stop]))
        positions.append(list(range(span.pos0 + start, span.pos0 + stop)))
        base = row * n_tokens - start
        outputs.extend(base + o for o in span.outputs if start <= o < stop)
        n_padding += max(0, stop - max(start, len(span.tokens) - span.n_padding))
    return UBatch(
        np.array(tokens, np.int64),
        np.array(positions, np.int64),
        tuple(spans[i].seq for i in chosen),
        np.array(outputs, np.int64),
        reason,
        n_padding,
    )


def _side_by_side(spans: Sequence[Span], done: list[int], n_ubatch: int) -> list[int]:
    chosen: list[int] = []
    for i, span in enumerate(spans):
        if done[i] == len(span.tokens):
            continue
        chosen.append(i)
        if len(chosen) == n_ubatch:
            break
    return chosen


def _reason(n: int, left: list[int]) -> str:
    if all(n == other for other in left):
        return "all tokens"
    return "shortest sequence" if n == min(left) else "n_ubatch"


def _prefix_keeping_tail(left: list[int], n: int, keep: int) -> int:
    count = 0
    for tokens in left:
        if tokens - n and tokens - n < keep:
            break
        count += 1
    return count
