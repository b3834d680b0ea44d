"""The causal convolution token by token and tap by tap."""

from __future__ import annotations

import torch


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.conv.causal_conv. Keeps the dtype of its inputs."""
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
