"""Which implementation of an operation runs: the naive law or the fast torch version."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

VARIABLE = "DRAFTSCOPE_KERNELS"
CHOICES = ("torch", "naive")

F = TypeVar("F", bound=Callable[..., object])


def pick(naive: F, with_torch: F) -> F:
    """The implementation that the environment variable DRAFTSCOPE_KERNELS asks for.

    Every operation calls this once, when its package is imported: looking the variable up on
    each call would cost as much as a small tensor operation. Unset or empty means "torch".

    Raises ValueError for a value that is not one of CHOICES.
    """
    name = os.environ.get(VARIABLE) or CHOICES[0]
    if name not in CHOICES:
        raise ValueError(f"{VARIABLE}={name} is not one of {', '.join(CHOICES)}")
    return naive if name == "naive" else with_torch
