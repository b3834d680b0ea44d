"""The causal convolution as a sum of shifted rows; PyTorch's own is slower at every length."""

from __future__ import annotations

import torch

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
