"""Tokens and those before them, which rows of a table they are hashed to, and what these rows give
(the per-layer embedding of qwen4exp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.dispatch import pick, uses_llvm
from kernels.rows.ngrams import naive, with_torch
from kernels.rows.ngrams.hashing import NgramHash

__all__ = ["NgramHash", "agreeing", "hash_rows", "recent_tokens"]

_LLVM = "kernels.rows.ngrams.with_llvm"
_agreeing = pick(naive.agreeing, with_torch.agreeing, None, _LLVM)
_agreeing_invariant = pick(
    with_torch.agreeing_invariant, with_torch.agreeing_invariant, None, _LLVM
)


def recent_tokens(tokens: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token and those before it, newest first, and the window continued.

    tokens: int64 [B, T], below 2^24 - 1. window: f32 [B, n - 1, 1], the tokens before them plus
    one, oldest first, 0 for none. Returns int64 [B, T, n], -1 for none, and f32 [B, n - 1 + T, 1].
    The host looks at no number.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _of(tokens, "recent_tokens")(tokens, window)
    return found


def hash_rows(context: torch.Tensor, hashing: NgramHash) -> torch.Tensor:
    """Numbers of the rows that the n-grams are hashed to which end at a token, shorter ones first.

    context: int64 [..., n] from recent_tokens. What stands behind the end of a text, or before its
    beginning, counts as that end. Products are of 64 bits without sign and wrap around; a hash is
    the XOR of an n-gram's products. Returns int64 [..., len(hashing.sizes)]. The host looks at no
    number.
    """
    rows: torch.Tensor = _of(context, "hash_rows")(context, hashing)
    return rows


def agreeing(
    key: torch.Tensor, query: torch.Tensor, value: torch.Tensor, *, invariant: bool = False
) -> torch.Tensor:
    """value times sigmoid(sign(s) sqrt(max(|s|, 1e-6))), where s = key . query / sqrt(d).

    key, query: f32 [..., n, d]; value: [..., d], for all n. Any strides. Returns [..., n, d].

    invariant: each row has the same bits whatever rows stand beside it.
    """
    return (_agreeing_invariant if invariant else _agreeing)(key, query, value)


def _of(x: torch.Tensor, name: str) -> Callable[..., Any]:
    """The version for integers, which kernels.dispatch.pick does not look at."""
    if x.device.type != "cpu" or not uses_llvm():
        return getattr(with_torch, name)
    # here, because it loads the compiler
    from kernels.rows.ngrams import with_llvm

    return getattr(with_llvm, name)
