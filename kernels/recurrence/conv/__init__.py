"""The short causal convolution in front of a recurrence, or as a mixer by itself."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.recurrence.conv import naive, with_torch

_LLVM = "kernels.recurrence.conv.with_llvm"
_run = pick(naive.causal_conv, with_torch.causal_conv, "kernels.recurrence.conv.with_triton", _LLVM)
_slots = pick(naive.causal_conv_slots, with_torch.causal_conv_slots, None, _LLVM)
_fold = pick(naive.fold_window, with_torch.fold_window, None, _LLVM)
_invariant = pick(with_torch.causal_conv_invariant, with_torch.causal_conv_invariant, None, _LLVM)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution over time, plus `bias` if any, then silu unless not `activate`.

    x: [B, T, C], the projected rows; weight: [C, K], tap K - 1 multiplies the current token;
    window: [B, K - 1, C], the rows before x, oldest first; bias: [C]. All f32, T >= 1, any strides.

    Returns y [B, T, C] and the history [B, K - 1 + T, C], window and x joined: the window after
    t of the tokens is history[:, t : t + K - 1]. Differentiable.

    invariant: a token's y has the same bits whatever tokens and sequences stand beside it.
    """
    return (_invariant if invariant else _run)(x, weight, window, bias, activate=activate)


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
    """causal_conv from and to rows of one pool of windows, whose numbers are on the device.

    x, weight, bias, activate: as there. pool: f32 [n_rows, K - 1, C], each row contiguous. read:
    int64 [B], the row with the window of sequence b. write: int64 [B, n], 1 <= n <= T; row
    write[b, i] receives the window n - 1 - i tokens before the last one. What b writes no other b'
    reads or writes; one of its rows may be read[b]. The host looks at no number. Returns y
    [B, T, C].
    """
    return _slots(x, weight, pool, read, write, bias, activate=activate)


def fold_window(
    window: torch.Tensor, columns: torch.Tensor, n_tokens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The windows after some of the rows that follow them.

    window: f32 [B, K - 1, C]; columns: f32 [B, T, C]; n_tokens: int64 [B], 0 .. T, to which the
    host does not look. out: [B, K - 1, C], filled and returned; may be `window` itself.
    """
    return _fold(window, columns, n_tokens, out)
