"""Tokens and those before them, which rows of a table they are hashed to, and what these rows give
(the per-layer embedding of qwen4exp)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import addresses, run, sigmoid, start, vectors
from kernels.llvm.values import I64
from kernels.pointwise.with_torch import pointwise


@operation(llvm=__name__, any_type=True)
def recent_tokens(tokens: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Each token and those before it, newest first, and the window continued.

    tokens: int64 [B, T], below 2^24 - 1. window: f32 [B, n - 1, 1], the tokens before them plus
    one, oldest first, 0 for none. Returns int64 [B, T, n], -1 for none, and f32 [B, n - 1 + T, 1].
    The host looks at no number.
    """
    history = torch.cat((window, (tokens + 1).to(torch.float32)[..., None]), 1)
    newest_last = history[..., 0].unfold(1, window.shape[1] + 1, 1)
    return newest_last.flip(-1).to(torch.int64) - 1, history


@operation(llvm=__name__, any_type=True)
def hash_rows(context: Tensor, hashing: NgramHash) -> Tensor:
    """Numbers of the rows to which the n-grams that end at a token are hashed, shorter ones first.

    context: int64 [..., n] from recent_tokens. Anything older than the end of a text, or than the
    first token, counts as that end. Products are of 64 bits without sign and wrap around; a hash is
    the XOR of an n-gram's products. Returns int64 [..., len(hashing.sizes)]. The host reads no
    number.
    """

    of = functools.partial(_constants, device=context.device)
    cut = (context < 0) | (context == hashing.end_id)
    cut[..., 0] = False  # a token that is the end itself still follows what came before it
    tokens = torch.where(cut.cumsum(-1) > 0, hashing.end_id, context)
    products = (tokens * of(hashing.multipliers)).unbind(-1)
    mixed, found = products[0], []
    for product in products[1:]:
        mixed = mixed ^ product
        found.extend([mixed] * hashing.n_heads)
    sizes, numbers = of(hashing.sizes), torch.stack(found, -1)
    # a negative number means 2^64 more
    more = of(tuple(2**64 % size for size in hashing.sizes)) * (numbers < 0)
    return (numbers.remainder(sizes) + more).remainder(sizes) + of(hashing.offsets)


@operation(llvm=__name__)
def agreeing(key: Tensor, query: Tensor, value: Tensor, *, invariant: bool = False) -> Tensor:
    """value times sigmoid(sign(s) sqrt(max(|s|, 1e-6))), where s = key . query / sqrt(d).

    key, query: f32 [..., n, d]; value: [..., d], for all n. Any strides. Returns [..., n, d].

    invariant: each row has the same bits whatever the other rows are.
    """
    score = (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
    score = score.sign() * score.abs().clamp_min(LEAST).sqrt()
    return pointwise(torch.sigmoid, score, invariant=invariant) * value.unsqueeze(-2)


LEAST = 1e-6
"""Smaller magnitudes of a score count as this one."""


class NgramHash(NamedTuple):
    """multipliers: a factor below 2^64 for each token, newest first, n of them. sizes, offsets: of
    the range of rows of each head; as many heads for every length from 2 to n, shorter ones first.
    end_id: the token that ends a text."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end_id: int

    @property
    def n_heads(self) -> int:
        """Of one length."""
        return len(self.sizes) // (len(self.multipliers) - 1)


# The formula as it reads.


def agreeing_naive(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    score = (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
    score = score.sign() * score.abs().clamp(min=LEAST) ** 0.5
    return value.unsqueeze(-2) / (1 + torch.exp(-score))


# The formulas on whole tensors.


@functools.cache
def _constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers below 2^64 as int64 with the same bits; kept, as a recorded pass uploads nothing."""
    return torch.tensor([(x ^ 2**63) - 2**63 for x in numbers]).to(device)


# N-grams on a CPU.


def recent_tokens_with_llvm(tokens: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    (n_batch, n_tokens), n_old = tokens.shape, window.shape[1]
    context = tokens.new_empty(n_batch, n_tokens, n_old + 1)
    history = window.new_empty(n_batch, n_old + n_tokens, 1)
    tokens = tokens.contiguous()
    if window.stride(1) != 1:
        window = window.contiguous()
    _recent(n_old).alone(
        n_batch,
        n_tokens,
        *addresses(tokens, window),
        4 * window.stride(0),
        *addresses(context, history),
    )
    return context, history


def hash_rows_with_llvm(context: Tensor, hashing: NgramHash) -> Tensor:
    n, heads = context.shape[-1], len(hashing.sizes)
    found = context.new_empty(*context.shape[:-1], heads)
    run(_hash(hashing), context.numel() // n, heads, context, found)
    return found


def agreeing_with_llvm(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    (n, d), y = key.shape[-2:], key.new_empty(*key.shape)
    run(_agreeing_llvm(n, d), y.numel() // d, d, (key, query, value), y)
    return y


@kernel(6)
def _recent(code: Code, args: Sequence[Value], b: Value, n_old: int) -> None:
    """A task is one sequence. Arguments: how many tokens, they, windows and the bytes from one
    to the next, contexts, histories."""
    n_tokens, tokens, window, window_bytes, context, history = args
    kept = history + b * (n_tokens + n_old) * 4
    for i in range(n_old):
        code.store(code.load(window + b * window_bytes + 4 * i, F32), kept + 4 * i)
    with code.loop(0, n_tokens) as t:
        token = code.load(tokens + (b * n_tokens + t) * 8, I64) + 1
        newest = kept + (t + n_old) * 4
        code.store(token.to_float(signed=True), newest)
        target = context + (b * n_tokens + t) * (8 * (n_old + 1))
        for back in range(n_old + 1):
            held = code.load(newest - 4 * back, F32).to_integer(I64)
            code.store(held - 1, target + 8 * back)


@kernel(2)
def _hash(code: Code, args: Sequence[Value], task: Value, hashing: NgramHash) -> None:
    """A task is one token. Arguments: contexts, numbers of rows."""
    context, found = args
    multipliers, sizes, offsets, end_id = hashing
    n, n_heads, end = len(multipliers), hashing.n_heads, code.integer(end_id)
    source, target = context + task * (8 * n), found + task * (8 * len(sizes))
    mixed = code.load(source, I64) * _signed(multipliers[0])
    is_cut = code.integer(0).less(0)
    for back in range(1, n):
        token = code.load(source + 8 * back, I64)
        is_cut = is_cut | token.less(0) | token.equal(end)
        mixed = mixed ^ (code.choose(is_cut, end, token) * _signed(multipliers[back]))
        for head in range((back - 1) * n_heads, back * n_heads):
            code.store(mixed % sizes[head] + offsets[head], target + 8 * head)


def _signed(factor: int) -> int:
    """The same 64 bits with a sign."""
    return (factor ^ 2**63) - 2**63


@kernel(13)
def _agreeing_llvm(code: Code, args: Sequence[Value], row: Value, n: int, d: int) -> None:
    """Arguments: keys, queries and values in RowPlaces, the results."""
    zero, none = code.constant(F32X16, 0.0), code.constant(F32, 0.0)
    key, query = start(args[:4], row), start(args[4:8], row)
    value, target = start(args[8:12], row // n), args[12] + row * (4 * d)
    total = code.variable(zero)
    for at, count in vectors(code, d):
        a, b = (code.load_first(side + at, F32X16, count) for side in (key, query))
        total.set(code.fma(a, b, total.value))
    score = code.sum(total.value) / d**0.5
    size = code.choose(score.less(0.0), none - score, score)
    root = code.sqrt(code.larger(code.constant(F32, LEAST), size))
    root = code.choose(score.less(0.0), none - root, root)
    # the sign of zero is zero
    root = code.choose(none.less(size), root, score)
    opened = code.splat(sigmoid(code, root))
    for at, count in vectors(code, d):
        code.store_first(code.load_first(value + at, F32X16, count) * opened, target + at, count)
