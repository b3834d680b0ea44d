"""The causal convolution as a sum of shifted rows; PyTorch's own is slower at every length."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.whole_vectors import pointwise


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.conv.causal_conv. Keeps the dtype of its inputs."""
    history = torch.cat((window, x), 1)
    y = _sums(history, weight, bias)
    if not activate:
        return y, history
    return functional.silu(y, inplace=not y.requires_grad), history


def causal_conv_invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv with the same bits for a row whatever rows stand beside it."""
    history = torch.cat((window, x), 1)
    y = _sums(history, weight, bias)
    return (pointwise(functional.silu, y, invariant=True) if activate else y), history


def _sums(history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The taps' products [B, T, C] and the bias, added up in one order for every row."""
    n_tokens = history.shape[1] - weight.shape[1] + 1
    # the taps have to be contiguous rows for the vector units; free where they already are
    first, *others = weight.t().contiguous().unbind(0)
    y = history[:, :n_tokens] * first
    for j, tap in enumerate(others, 1):
        y.addcmul_(history[:, j : j + n_tokens], tap)
    return y if bias is None else y.add_(bias)


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
    y, history = causal_conv(x, weight, pool[read], bias, activate=activate)
    after_each = history.unfold(1, pool.shape[1], 1).transpose(2, 3)
    pool[write] = after_each[:, -write.shape[1] :]
    return y


def fold_window(
    window: torch.Tensor, columns: torch.Tensor, n_tokens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """See kernels.recurrence.conv.fold_window."""
    at = n_tokens[:, None] + torch.arange(window.shape[1], device=n_tokens.device)
    history = torch.cat((window, columns), 1)
    return out.copy_(history.gather(1, at[..., None].expand(-1, -1, columns.shape[2])))
