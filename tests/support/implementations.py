"""Implementations of the operations of one module, each under the names of the operations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kernels.dispatch import torch_version
from tests.support import exact_kernels


class Implementation:
    """`.rms_norm` is the module's `rms_norm_with_llvm`, for the suffix "with_llvm"; without such a
    function there or, for "naive", among those that are exact, the version in torch."""

    def __init__(self, module: ModuleType, suffix: str) -> None:
        self._module, self._suffix = module, suffix

    def __getattr__(self, name: str) -> Any:
        own = f"{name}_{self._suffix}"
        found = getattr(self._module, own, None) or getattr(exact_kernels, own, None)
        return found or torch_version(getattr(self._module, name))


def implementations(module: ModuleType, *suffixes: str) -> list[Implementation]:
    """One for each suffix of functions of the module: "naive", "with_torch", "with_llvm"."""
    return [Implementation(module, suffix) for suffix in suffixes]
