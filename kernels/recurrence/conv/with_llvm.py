"""The causal convolution on a processor: every token from its taps, the history on the way."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import silu
from kernels.llvm.rows import run, vectors
from kernels.llvm.values import I64


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.conv.causal_conv."""
    return _convolve(x, weight, window, None, bias, activate)


causal_conv_invariant = causal_conv


def causal_conv_slots(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> torch.Tensor:
    """See kernels.recurrence.conv.causal_conv_slots."""
    y, history = _convolve(x, weight, pool, read.contiguous(), bias, activate)
    (n_batch, n_new), write = write.shape, write.contiguous()
    window_bytes = 4 * pool.shape[1] * pool.shape[2]
    if not pool[:1].is_contiguous():
        raise ValueError("the numbers of a window do not lie side by side")
    run(
        _keep(),
        n_batch * n_new,
        window_bytes // 4,
        history.data_ptr() + 4 * (x.shape[1] - n_new + 1) * pool.shape[2],
        4 * history.stride(0),
        4 * pool.shape[2],
        pool.data_ptr(),
        4 * pool.stride(0),
        write.data_ptr(),
        n_new,
        window_bytes,
    )
    return y


def fold_window(
    window: torch.Tensor, columns: torch.Tensor, n_tokens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """See kernels.recurrence.conv.fold_window."""
    n_batch, width, n_channels = window.shape
    counts = n_tokens.contiguous()
    tensors = [_in_rows(window), _in_rows(columns), out]
    places = [(x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1)) for x in tensors]
    run(
        _fold(n_channels, width),
        n_batch,
        width * n_channels,
        *(number for place in places for number in place),
        counts.data_ptr(),
    )
    return out


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    read: torch.Tensor | None,
    bias: torch.Tensor | None,
    activate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """read: numbers of the rows of `window` that hold those of the sequences; None for 0, 1, …"""
    n_batch, n_tokens, n_channels = x.shape
    n_taps = weight.shape[1]
    y = x.new_empty(n_batch, n_tokens, n_channels)
    history = x.new_empty(n_batch, n_taps - 1 + n_tokens, n_channels)
    x, window, taps = _in_rows(x), _in_rows(window), weight.t().contiguous()
    bias = None if bias is None else bias.contiguous()
    x_batch, x_token, _ = x.stride()
    window_batch, window_token, _ = window.stride()
    run(
        _program(n_channels, n_taps, read is not None, bias is not None, activate),
        n_batch * n_tokens,
        n_channels,
        n_tokens,
        x.data_ptr(),
        4 * x_batch,
        4 * x_token,
        window.data_ptr(),
        4 * window_batch,
        4 * window_token,
        taps.data_ptr(),
        y.data_ptr(),
        history.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if read is None else read.data_ptr(),
    )
    return y, history


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _program(n_channels: int, n_taps: int, numbered: bool, biased: bool, activate: bool) -> Program:
    body = functools.partial(_body, n_channels, n_taps, numbered, biased, activate)
    return Program(body, 12)


def _body(
    n_channels: int,
    n_taps: int,
    numbered: bool,
    biased: bool,
    activate: bool,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """A task is one token. Arguments: tokens, x, its strides, window, its strides, taps, outputs,
    the bias if there is one, the numbers of the windows if they are not those of the sequences.

    Rows of the window and of x are read where they are: the history is written by other tasks.
    """
    n_tokens, x, x_batch, x_token, window, window_batch, window_token = args[:7]
    taps, y, history, bias, numbers = args[7:]
    row_bytes, n_old = 4 * n_channels, n_taps - 1
    with code.loop(first, last) as task:
        batch, token = task // n_tokens, task % n_tokens
        number = code.load(numbers + batch * 8, I64) if numbered else batch
        tokens, old = x + batch * x_batch, window + number * window_batch
        kept = history + batch * (n_tokens + n_old) * row_bytes
        inputs = []
        for tap in range(n_taps):
            at = token + tap
            in_x = tokens + (at - n_old) * x_token
            inputs.append(code.choose(at.less(n_old), old + at * window_token, in_x))
        target, copy = y + task * row_bytes, kept + (token + n_old) * row_bytes
        for at, count in vectors(code, n_channels):
            row = total = code.constant(F32X16, 0.0)
            for tap, source in enumerate(inputs):
                row = code.load_first(source + at, F32X16, count)
                factor = code.load_first(taps + row_bytes * tap + at, F32X16, count)
                total = code.fma(row, factor, total)
            code.store_first(row, copy + at, count)
            if biased:
                total += code.load_first(bias + at, F32X16, count)
            code.store_first(silu(code, total) if activate else total, target + at, count)
        # the first token's task brings the window over
        none, all_ = code.integer(0), code.integer(n_old)
        with code.loop(0, code.choose(token.less(1), all_, none)) as i:
            for at, count in vectors(code, n_channels):
                row = code.load_first(old + i * window_token + at, F32X16, count)
                code.store_first(row, kept + i * row_bytes + at, count)


@functools.cache
def _keep() -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """A task is one window. Arguments: the first of them in the history, bytes to the next
        sequence's and to the next one, pool, bytes from row to row, the numbers of rows, how many
        a sequence has, bytes of a window."""
        history, batch_bytes, token_bytes, pool, step, numbers, n_new, n_bytes = args
        with code.loop(first, last) as task:
            source = history + task // n_new * batch_bytes + task % n_new * token_bytes
            code.copy(pool + code.load(numbers + task * 8, I64) * step, source, n_bytes)

    return Program(body, 8)


@functools.cache
def _fold(n_channels: int, width: int) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """A task is one sequence. Arguments: window, columns and out, each with two strides; how
        many columns. Rows only move to the front, so out may be the window."""
        (window, columns, out), numbers = [args[i : i + 3] for i in (0, 3, 6)], args[9]
        with code.loop(first, last) as b:
            count = code.load(numbers + b * 8, I64)
            old, new, to = (x[0] + b * x[1] for x in (window, columns, out))
            with code.loop(0, code.integer(width)) as i:
                at = count + i
                source = code.choose(
                    at.less(width), old + at * window[2], new + (at - width) * columns[2]
                )
                for place, lanes in vectors(code, n_channels):
                    row = code.load_first(source + place, F32X16, lanes)
                    code.store_first(row, to + i * out[2] + place, lanes)

    return Program(body, 10)
