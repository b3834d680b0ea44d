"""The short causal convolution in front of a recurrence, as a mixer by itself, or
inside a drafted block, where its weights depend on the row (DFlash2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import Argument, rows_together, run, silu, stepped, vectors
from kernels.llvm.values import I64
from kernels.pointwise.with_torch import pointwise

ConvSlotArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""x, weight, pool, read, write and bias, as causal_conv_slots describes them."""


@operation(triton="kernels.recurrence.with_triton", llvm=__name__)
def causal_conv(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    bias: Tensor | None = None,
    *,
    activate: bool = True,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over time, plus `bias` if any, then silu unless not `activate`.

    x: [B, T, C], the projected rows; weight: [C, K], tap K - 1 multiplies the current token;
    window: [B, K - 1, C], the rows before x, oldest first; bias: [C]. All f32, T >= 1, any strides.

    Returns y [B, T, C] and the history [B, K - 1 + T, C], window and x joined: the window after
    t of the tokens is history[:, t : t + K - 1]. Differentiable.

    invariant: a token's y has the same bits whatever other tokens and sequences there are.
    """
    # keeps the dtype of its inputs
    history = torch.cat((window, x), 1)
    y = _sums(history, weight, bias)
    if not activate:
        return y, history
    if invariant:
        return pointwise(functional.silu, y, invariant=True), history
    return functional.silu(y, inplace=not y.requires_grad), history


@operation(triton="kernels.recurrence.with_triton", llvm=__name__)
def causal_conv_slots(
    *inputs: *ConvSlotArguments, activate: bool = True, gate: Tensor | None = None
) -> Tensor:
    """causal_conv from and to rows of one pool of windows, whose numbers are on the device.

    inputs: x, weight, pool, read, write, bias. x, weight, bias, activate: as there. pool: f32
    [n_rows, K - 1, C], each row contiguous. read: int64 [B], the row with the window of sequence b.
    write: int64 [B, n], 1 <= n <= T; row write[b, i] receives the window n - 1 - i tokens before
    the last one. What b writes no other b' reads or writes; one of its rows may be read[b]. The
    host looks at no number. gate: of the shape of x, which it multiplies, in torch and in Triton.
    Returns y [B, T, C].
    """
    x, weight, pool, read, write, bias = inputs
    x = x if gate is None else gate * x
    y, history = torch_version(causal_conv)(x, weight, pool[read], bias, activate=activate)
    after_each = history.unfold(1, pool.shape[1], 1).transpose(2, 3)
    pool[write] = after_each[:, -write.shape[1] :]
    return y


@operation(llvm=__name__)
def fold_window(window: Tensor, columns: Tensor, n_tokens: Tensor, out: Tensor) -> Tensor:
    """The windows after some of the rows that follow them.

    window: f32 [B, K - 1, C]; columns: f32 [B, T, C]; n_tokens: int64 [B], 0 .. T, to which the
    host does not look. out: [B, K - 1, C], filled and returned; may be `window` itself.
    """
    at = n_tokens[:, None] + torch.arange(window.shape[1], device=n_tokens.device)
    history = torch.cat((window, columns), 1)
    return out.copy_(history.gather(1, at[..., None].expand(-1, -1, columns.shape[2])))


# The causal convolution token by token and tap by tap.


def causal_conv_naive(
    x: Tensor, weight: Tensor, window: Tensor, bias: Tensor | None = None, *, activate: bool = True
) -> tuple[Tensor, Tensor]:
    n_taps = weight.shape[1]
    history = torch.cat((window, x), 1)
    rows = []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, t])
        for j in range(n_taps):
            total = total + weight[:, j] * history[:, t + j]
        if bias is not None:
            total = total + bias
        rows.append(total * torch.sigmoid(total) if activate else total)
    return torch.stack(rows, 1), history


def causal_conv_slots_naive(*inputs: *ConvSlotArguments, activate: bool = True) -> Tensor:
    x, weight, pool, read, write, bias = inputs
    window = torch.stack([pool[i] for i in read.tolist()])
    y, history = causal_conv_naive(x, weight, window, bias, activate=activate)
    for b, numbers in enumerate(write.tolist()):
        for back, number in enumerate(reversed(numbers)):
            end = history.shape[1] - back
            pool[number] = history[b, end - pool.shape[1] : end]
    return y


# The causal convolution as a sum of shifted rows; PyTorch's own is slower at every length.


def _sums(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The taps' products [B, T, C] and the bias, added up in one order for every row."""
    n_tokens = history.shape[1] - weight.shape[1] + 1
    # the taps have to be contiguous rows for the vector units; free where they already are
    first, *others = weight.t().contiguous().unbind(0)
    y = history[:, :n_tokens] * first
    for j, tap in enumerate(others, 1):
        y.addcmul_(history[:, j : j + n_tokens], tap)
    return y if bias is None else y.add_(bias)


# The causal convolution on a CPU: every token from its taps, the history on the way.


def causal_conv_with_llvm(
    x: Tensor, weight: Tensor, window: Tensor, bias: Tensor | None = None, *, activate: bool = True
) -> tuple[Tensor, Tensor]:
    return _convolve(x, weight, window, None, bias, activate)


def causal_conv_slots_with_llvm(*inputs: *ConvSlotArguments, activate: bool = True) -> Tensor:
    x, weight, pool, read, write, bias = inputs
    y, history = _convolve(x, weight, pool, read, bias, activate)
    n_batch, n_new = write.shape
    window_bytes = 4 * pool.shape[1] * pool.shape[2]
    if not pool[:1].is_contiguous():
        raise ValueError("the numbers of a window do not lie side by side")
    first = history[:, x.shape[1] - n_new + 1 :]
    places = *stepped(first, 2), *stepped(pool, 1)
    run(_keep(), n_batch * n_new, window_bytes // 4, *places, write, n_new, window_bytes)
    return y


def fold_window_with_llvm(window: Tensor, columns: Tensor, n_tokens: Tensor, out: Tensor) -> Tensor:
    n_batch, width, n_channels = window.shape
    tensors = [rows_together(window), rows_together(columns), out]
    places = [number for x in tensors for number in stepped(x, 2)]
    run(_fold_llvm(n_channels, width), n_batch, width * n_channels, *places, n_tokens)
    return out


def _convolve(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    read: Tensor | None,
    bias: Tensor | None,
    activate: bool,
) -> tuple[Tensor, Tensor]:
    """read: numbers of the rows of `window` that hold those of the sequences; None for 0, 1, …"""
    n_batch, n_tokens, n_channels = x.shape
    n_taps = weight.shape[1]
    y = x.new_empty(n_batch, n_tokens, n_channels)
    history = x.new_empty(n_batch, n_taps - 1 + n_tokens, n_channels)
    x, window, taps = rows_together(x), rows_together(window), weight.t().contiguous()
    program = _program(n_channels, n_taps, read is not None, bias is not None, activate)
    ends = taps, y, history, bias, read
    sources = *stepped(x, 2), *stepped(window, 2)
    run(program, n_batch * n_tokens, n_channels, n_tokens, *sources, *ends)
    return y, history


@kernel(12)
def _program(
    code: Code,
    args: Sequence[Value],
    task: Value,
    n_channels: int,
    n_taps: int,
    numbered: bool,
    biased: bool,
    activate: bool,
) -> None:
    """A task is one token. Arguments: tokens, x, its strides, window, its strides, taps, outputs,
    the bias if there is one, the numbers of the windows if they are not those of the sequences.

    Rows of the window and of x are read where they are: the history is written by other tasks.
    """
    n_tokens, x, x_batch, x_token, window, window_batch, window_token = args[:7]
    taps, y, history, bias, numbers = args[7:]
    row_bytes, n_old = 4 * n_channels, n_taps - 1
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


@kernel(8)
def _keep(code: Code, args: Sequence[Value], task: Value) -> None:
    """A task is one window. Arguments: the first of them in the history, bytes to the next
    sequence's and to the next one, pool, bytes from row to row, the numbers of rows, how many
    a sequence has, bytes of a window."""
    history, batch_bytes, token_bytes, pool, step, numbers, n_new, n_bytes = args
    source = history + task // n_new * batch_bytes + task % n_new * token_bytes
    code.copy(pool + code.load(numbers + task * 8, I64) * step, source, n_bytes)


@kernel(10)
def _fold_llvm(code: Code, args: Sequence[Value], b: Value, n_channels: int, width: int) -> None:
    """A task is one sequence. Arguments: window, columns and out, each with two strides; how
    many columns. Rows only move to the front, so out may be the window."""
    (window, columns, out), numbers = [args[i : i + 3] for i in (0, 3, 6)], args[9]
    count = code.load(numbers + b * 8, I64)
    old, new, to = (x[0] + b * x[1] for x in (window, columns, out))
    with code.loop(0, code.integer(width)) as i:
        at = count + i
        source = code.choose(at.less(width), old + at * window[2], new + (at - width) * columns[2])
        for place, lanes in vectors(code, n_channels):
            row = code.load_first(source + place, F32X16, lanes)
            code.store_first(row, to + i * out[2] + place, lanes)


@operation(llvm=__name__)
def block_conv(x: Tensor, base: Tensor, own: Tensor) -> Tensor:
    """y[a] = sum over taps t of (base[t] + own[a, t]) * x[a - t]; rows before the first are zero.

    x: f32 [B, T, d]; base: f32 [K, d]; own: f32 [B, T, K, G], G a divisor of d: each number counts
    for d / G neighbouring channels. Any strides. Returns f32 [B, T, d]; a row's bits depend on
    itself and the K - 1 rows before it alone.
    """
    group = x.shape[2] // own.shape[3]
    y = torch.zeros_like(x)
    for tap in range(min(len(base), x.shape[1])):
        weight = base[tap] + own[:, tap:, tap].repeat_interleave(group, -1)
        y[:, tap:] += weight * x[:, : x.shape[1] - tap]
    return y


def block_conv_naive(x: Tensor, base: Tensor, own: Tensor) -> Tensor:
    """The convolution channel by channel, from its definition."""
    n_batch, n_tokens, d = x.shape
    n_taps, group = len(base), d // own.shape[3]
    y = torch.zeros_like(x)
    for b in range(n_batch):
        for a in range(n_tokens):
            for tap in range(min(n_taps, a + 1)):
                for j in range(d):
                    weight = base[tap, j] + own[b, a, tap, j // group]
                    y[b, a, j] += weight * x[b, a - tap, j]
    return y


def block_conv_with_llvm(x: Tensor, base: Tensor, own: Tensor) -> Tensor:
    """The convolution on a CPU: every row from its taps, group by group."""
    (n_batch, n_tokens, d), (n_taps, n_groups) = x.shape, own.shape[2:]
    y = x.new_empty(n_batch, n_tokens, d)
    x, own = map(rows_together, (x, own))
    program = _block_program(d, d // n_groups, n_taps)
    places: list[Argument] = [*stepped(x, 2), base, *stepped(own, 3), y]
    run(program, n_batch * n_tokens, d * n_taps, n_tokens, *places)
    return y


@kernel(10)
def _block_program(
    code: Code, args: Sequence[Value], row: Value, d: int, group: int, n_taps: int
) -> None:
    """Arguments: tokens, x and its strides, base, own and its strides, y. Strides in bytes."""
    n_tokens, x, x_b, x_t, base, own, own_b, own_t, own_k, y = args
    with code.loop(0, code.integer(d // group)) as g:
        b, a = row // n_tokens, row % n_tokens
        for at, count in vectors(code, group):
            place = g * (4 * group) + at
            total = code.variable(code.constant(F32X16, 0.0))
            for tap in range(n_taps):
                with code.when(code.integer(tap - 1).less(a)):
                    mine = code.load(own + b * own_b + a * own_t + own_k * tap + g * 4, F32)
                    weight = code.load_first(base + 4 * d * tap + place, F32X16, count)
                    values = code.load_first(x + b * x_b + (a - tap) * x_t + place, F32X16, count)
                    total.set(code.fma(weight + code.splat(mine), values, total.value))
            code.store_first(total.value, y + row * (4 * d) + place, count)
