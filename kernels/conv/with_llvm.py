"""The causal convolution on a processor: every token from its taps, the history on the way."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import silu
from kernels.llvm.rows import run, vectors


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.conv.causal_conv."""
    n_batch, n_tokens, n_channels = x.shape
    n_taps = weight.shape[1]
    y = x.new_empty(n_batch, n_tokens, n_channels)
    history = x.new_empty(n_batch, n_taps - 1 + n_tokens, n_channels)
    x, window, taps = _in_rows(x), _in_rows(window), weight.t().contiguous()
    bias = None if bias is None else bias.contiguous()
    x_batch, x_token, _ = x.stride()
    window_batch, window_token, _ = window.stride()
    run(
        _program(n_channels, n_taps, bias is not None, activate),
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
    )
    return y, history


causal_conv_invariant = causal_conv


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _program(n_channels: int, n_taps: int, biased: bool, activate: bool) -> Program:
    return Program(functools.partial(_body, n_channels, n_taps, biased, activate), 11)


def _body(
    n_channels: int,
    n_taps: int,
    biased: bool,
    activate: bool,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """A task is one token. Arguments: tokens, x, its strides, window, its strides, taps, outputs,
    the bias if there is one.

    Rows of the window and of x are read where they are: the history is written by other tasks.
    """
    n_tokens, x, x_batch, x_token, window, window_batch, window_token, taps, y, history, bias = args
    row_bytes, n_old = 4 * n_channels, n_taps - 1
    with code.loop(first, last) as task:
        batch, token = task // n_tokens, task % n_tokens
        tokens, old = x + batch * x_batch, window + batch * window_batch
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
