"""The short causal convolution in front of a recurrence, or as a mixer by itself."""

from __future__ import annotations

import torch

from kernels.conv import naive, with_torch
from kernels.dispatch import pick

_LLVM = "kernels.conv.with_llvm"
_run = pick(naive.causal_conv, with_torch.causal_conv, "kernels.conv.with_triton", _LLVM)
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
