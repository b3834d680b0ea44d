"""Between host and device: one upload that does not wait, and the one place that does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

Values = np.ndarray | torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


def upload(values: Values, device: torch.device) -> torch.Tensor:
    """Host values as a tensor on a device; whole numbers in lists become int64.

    The device is not waited for: a CUDA device copies from pinned memory when it gets there. On
    the processor arrays and tensors are shared, not copied.
    """
    host = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
    if device.type == "cpu":
        return host
    return pinned(host).to(device, non_blocking=True)


def pinned(host: torch.Tensor) -> torch.Tensor:
    """A copy in memory that a CUDA device can read by itself; freed when it has done so."""
    return host.pin_memory()


def read(*tensors: torch.Tensor) -> list[np.ndarray]:
    """The values of tensors of one device, on the host.

    Waits for the device, which is why everything that is wanted should come in one call: it is
    one transfer. That goes through float64, so whole numbers must be below 2^53.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    together = torch.cat([tensor.flatten().double() for tensor in tensors])
    stops = accumulate(tensor.numel() for tensor in tensors)
    parts = np.split(together.cpu().numpy(), list(stops)[:-1])
    return [
        part.astype(torch.empty(0, dtype=tensor.dtype).numpy().dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
