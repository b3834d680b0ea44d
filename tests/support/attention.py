"""Versions of attention, called with the defaults of kernels.attention.attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class WithDefaults:
    """The functions of a version; scale and sinks may be left out."""

    def __init__(self, version: Any) -> None:
        self._version = version

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        function = getattr(self._version, name)

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: Tensor,
            scale: float | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            scale = q.shape[3] ** -0.5 if scale is None else scale
            return function(q, k, v, mask, scale, sinks)

        return run
