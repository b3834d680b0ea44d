"""N-grams on a processor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid
from kernels.llvm.rows import rows, run, start, vectors
from kernels.llvm.values import I64
from kernels.rows.ngrams.hashing import LEAST, NgramHash


def recent_tokens(tokens: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rows.ngrams.recent_tokens."""
    (n_batch, n_tokens), n_old = tokens.shape, window.shape[1]
    context = tokens.new_empty(n_batch, n_tokens, n_old + 1)
    history = window.new_empty(n_batch, n_old + n_tokens, 1)
    tokens = tokens.contiguous()
    if window.stride(1) != 1:
        window = window.contiguous()
    _recent(n_old).alone(
        n_batch,
        n_tokens,
        tokens.data_ptr(),
        window.data_ptr(),
        4 * window.stride(0),
        context.data_ptr(),
        history.data_ptr(),
    )
    return context, history


def hash_rows(context: torch.Tensor, hashing: NgramHash) -> torch.Tensor:
    """See kernels.rows.ngrams.hash_rows."""
    n, heads = context.shape[-1], len(hashing.sizes)
    found = context.new_empty(*context.shape[:-1], heads)
    context = context.contiguous()
    run(_hash(hashing), context.numel() // n, heads, context.data_ptr(), found.data_ptr())
    return found


def agreeing(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.ngrams.agreeing."""
    (n, d), y = key.shape[-2:], key.new_empty(*key.shape)
    key, key_rows = rows(key)
    query, query_rows = rows(query)
    value, value_rows = rows(value)
    places = *key_rows, *query_rows, *value_rows, y.data_ptr()
    run(_agreeing(n, d), y.numel() // d, d, *places)
    return y


agreeing_invariant = agreeing


@functools.cache
def _recent(n_old: int) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """A task is one sequence. Arguments: how many tokens, they, windows and the bytes from one
        to the next, contexts, histories."""
        n_tokens, tokens, window, window_bytes, context, history = args
        with code.loop(first, last) as b:
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

    return Program(body, 6)


@functools.cache
def _hash(hashing: NgramHash) -> Program:
    return Program(functools.partial(_hash_body, hashing), 2)


def _hash_body(
    hashing: NgramHash, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """A task is one token. Arguments: contexts, numbers of rows."""
    context, found = args
    multipliers, sizes, offsets, end_id = hashing
    n, n_heads, end = len(multipliers), hashing.n_heads, code.integer(end_id)
    with code.loop(first, last) as task:
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


@functools.cache
def _agreeing(n: int, d: int) -> Program:
    return Program(functools.partial(_agreeing_body, n, d), 13)


def _agreeing_body(
    n: int, d: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: keys, queries and values in RowPlaces, the results."""
    zero, none = code.constant(F32X16, 0.0), code.constant(F32, 0.0)
    with code.loop(first, last) as row:
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
            code.store_first(
                code.load_first(value + at, F32X16, count) * opened, target + at, count
            )
