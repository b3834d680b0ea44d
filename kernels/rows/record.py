"""The record of rows of logits: all that a round wants to know of each one, in one small matrix,
so that it comes to the host in one copy. The host decides nothing, so it can be part of a recorded
pass (engine.machine.graphs).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.dispatch import runs_triton
from kernels.rows.reductions import LEAST, argmax, softmax_sums, top_k


class RowRecord(NamedTuple):
    """What is known of n rows, on the host.

    ids int32, values (logits) and weights f32 [n, k]: of the largest, the largest first. sums f32
    [n, 2]: see softmax_sums; log f32 [n]: of the first sum. Where a token was asked about in every
    row, int32 [n], else empty: best: the lowest index of the largest logit; asked: the token;
    n_larger: how many logits are larger than its own; weight f32 [n]: its own. A weight is e to the
    power of the distance from the largest.
    """

    ids: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    sums: np.ndarray
    log: np.ndarray
    best: np.ndarray
    asked: np.ndarray
    n_larger: np.ndarray
    weight: np.ndarray


def row_record(logits: torch.Tensor, k: int, asked: torch.Tensor | None = None) -> torch.Tensor:
    """The parts of a RowRecord side by side, those of f32 by their bits: int32 [n, width].

    logits: f32 [n, n_vocab], n_vocab >= k. asked: int64 [n], None: nothing is asked.
    """
    if runs_triton(logits):
        from kernels.rows import with_triton

        if k <= with_triton.MOST_TOP:
            return with_triton.row_record(logits, k, asked)
    top, ids = top_k(logits, k)
    # relative to the largest; a banned or infinitely unlikely token stays finite and adds nothing
    largest = top[:, :1]
    sums = softmax_sums(logits, top[:, 0])
    parts = [ids, top, _weights(top, largest), sums, sums[:, :1].log()]
    if asked is not None:
        asked = asked.unsqueeze(1)
        parts += [argmax(logits).unsqueeze(1), asked, *asked_about(logits, asked, largest)]
    as_int = [x.view(torch.int32) if x.is_floating_point() else x.int() for x in parts]
    return torch.cat(as_int, 1)


def asked_about(
    logits: torch.Tensor, asked: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many logits of each row [n, n_vocab] are larger than that of its token, and the token's
    weight, both [n, 1]. asked: int64 [n, 1]; largest: f32 [n, 1], the row's largest logit."""
    own = logits.gather(1, asked)
    return (logits > own).sum(1, keepdim=True), _weights(own, largest)


def on_host(record: np.ndarray) -> RowRecord:
    """The values of `row_record`, int32 [n, width], or some of its rows."""
    n_asked, floats = (4 if record.shape[1] % 3 else 0), record.view(np.float32)
    k = (record.shape[1] - n_asked - 3) // 3
    best, asked, n_larger, _ = record[:, -4:].T if n_asked else np.empty((4, 0), np.int32)
    return RowRecord(
        record[:, :k],
        floats[:, k : 2 * k],
        floats[:, 2 * k : 3 * k],
        floats[:, 3 * k : 3 * k + 2],
        floats[:, 3 * k + 2],
        best,
        asked,
        n_larger,
        floats[:, -1] if n_asked else floats[:0, -1],
    )


def _weights(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return (x - largest).clamp_min_(LEAST).exp_()
