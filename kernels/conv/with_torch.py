"""The causal convolution as a sum of shifted rows; PyTorch's own is slower at every length."""

from __future__ import annotations

import torch

from kernels.pointwise import pointwise

# up to here fewer operations win, above it fewer bytes
SHORT = 4


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.conv.causal_conv. Keeps the dtype of its inputs."""
    n_tokens, n_taps = x.shape[1], weight.shape[1]
    history = torch.cat((window, x), 1)
    if n_tokens <= SHORT:
        y = (history.unfold(1, n_taps, 1) * weight).sum(-1)
    else:
        # the taps have to be contiguous rows for the vector units
        taps = weight.t().contiguous()
        y = history[:, :n_tokens] * taps[0]
        for j in range(1, n_taps):
            y = torch.addcmul(y, history[:, j : j + n_tokens], taps[j])
    return torch.nn.functional.silu(y), history


def causal_conv_invariant(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv in one form for every length; products and sums rounded one by one."""
    history = torch.cat((window, x), 1)
    taps = weight.t().contiguous()
    y = history[:, : x.shape[1]] * taps[0]
    for j in range(1, weight.shape[1]):
        y += history[:, j : j + x.shape[1]] * taps[j]
    return pointwise(torch.nn.functional.silu, y, invariant=True), history
