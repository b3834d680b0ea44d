"""The recurrent cores of mixers: delta rule, state-space duality, short convolutions and their
gates."""

from typing import NamedTuple

from torch import Tensor


class UpdateLog(NamedTuple):
    """The rows of some tokens, from which the state after any number of them can be rebuilt:
    S_t = e^(g_t) S_(t-1) + left_t right_t^T, head by head.

    left: [B, T, heads, rows of a state]. right: [B, T, heads, columns of a state]. g: [B, T, H],
    or one for each row. What the kernel was given of them are the very tensors.
    """

    left: Tensor
    right: Tensor
    g: Tensor


FoldArguments = tuple[Tensor, UpdateLog, int | Tensor]
"""A state from before a log, the log, and how many of its tokens count: one number for all rows or
an int64 tensor [B]."""
