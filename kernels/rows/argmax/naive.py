"""The largest value, looked for from the front."""

from __future__ import annotations

import torch


def argmax(x: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.argmax.argmax."""
    places = [max(range(len(row)), key=row.__getitem__) for row in x.reshape(-1, x.shape[-1])]
    return torch.tensor(places, device=x.device).view(x.shape[:-1])
