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
    """See kernels.recurrence.conv.causal_conv. Keeps the dtype of its inputs."""
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
    """See kernels.recurrence.conv.causal_conv_slots. Keeps the dtype of its inputs."""
    window = torch.stack([pool[i] for i in read.tolist()])
    y, history = causal_conv(x, weight, window, bias, activate=activate)
    for b, numbers in enumerate(write.tolist()):
        for back, number in enumerate(reversed(numbers)):
            end = history.shape[1] - back
            pool[number] = history[b, end - pool.shape[1] : end]
    return y


def fold_window(
    window: torch.Tensor, columns: torch.Tensor, n_tokens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """See kernels.recurrence.conv.fold_window."""
    width = window.shape[1]
    for b, n in enumerate(n_tokens.tolist()):
        out[b] = torch.cat((window[b], columns[b, :n]))[n : n + width].clone()
    return out
