"""A pytest plugin: kernels are chosen as where a CUDA device is, and Triton's do nothing.

For tests on fake tensors (tests/support/fake_cuda.py), in a process of its own with
TRITON_INTERPRET=1: an operation runs what it would run on a GPU, up to the launch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from kernels import dispatch

LAUNCHED = Counter[str]()
"""How often each kernel was launched, by name."""


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    away = {str(x.device) for x in tensors} - {"cuda:0"}
    assert tensors and not away, f"{self.fn.__name__} was given tensors on {away}"
    x, *others = self.grid
    assert 0 < x < 1 << 31 and all(0 < side < 1 << 16 for side in others), self.fn.__name__
    LAUNCHED[self.fn.__name__] += 1


dispatch._has_cuda = lambda: True  # type: ignore[assignment]
GridExecutor.__call__ = _launch
