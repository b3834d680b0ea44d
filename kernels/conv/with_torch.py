"""The causal convolution as a sum of shifted rows; PyTorch's own is slower at every length."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.conv.causal_conv. Keeps the dtype of its inputs.

    Every row adds up in the same order, so its bits do not depend on the rows beside it.
    """
    n_tokens = x.shape[1]
    history = torch.cat((window, x), 1)
    # the taps have to be contiguous rows for the vector units; free where they already are
    first, *others = weight.t().contiguous().unbind(0)
    y = history[:, :n_tokens] * first
    for j, tap in enumerate(others, 1):
        y.addcmul_(history[:, j : j + n_tokens], tap)
    return functional.silu(y, inplace=not y.requires_grad), history
