"""Which implementation of an operation runs: the naive law, fast torch, or Triton on a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

VARIABLE = "DRAFTSCOPE_KERNELS"
CHOICES = ("naive", "torch", "triton")

F = TypeVar("F", bound=Callable[..., object])


def pick(naive: F, with_torch: F, triton_module: str | None = None) -> F:
    """The implementation that the environment variable DRAFTSCOPE_KERNELS asks for.

    triton_module: the module that holds a Triton version under the name that `with_torch` has;
    None for an operation without one, which then runs in torch. It is imported at the first call
    that needs it.

    Unset or empty, the device decides on every call: Triton for a first argument on a CUDA
    device, torch otherwise. Triton versions have no gradients, so torch also runs whatever needs
    them. Every operation calls this once, when its package is imported: looking the variable up
    on each call would cost as much as a small tensor operation, and where there is no CUDA
    device the torch version itself is returned.

    Raises ValueError for a value that is not one of CHOICES and for "triton" on a machine that
    cannot run it.
    """
    name = os.environ.get(VARIABLE)
    if name and name not in CHOICES:
        raise ValueError(f"{VARIABLE}={name} is not one of {', '.join(CHOICES)}")
    if name == "triton":
        _require_triton()
    if name == "naive":
        return naive
    if triton_module is None or name == "torch" or not (name or (_has_cuda() and _has_triton())):
        return with_torch
    return _by_device(with_torch, triton_module, always=name == "triton")


def _by_device(with_torch: F, triton_module: str, *, always: bool) -> F:
    with_triton: Callable[..., object] | None = None

    @functools.wraps(with_torch)
    def run(*args: Any, **kwargs: Any) -> object:
        nonlocal with_triton
        if not (always or args[0].is_cuda) or (torch.is_grad_enabled() and _has_leaf(args)):
            return with_torch(*args, **kwargs)
        if with_triton is None:
            with_triton = getattr(importlib.import_module(triton_module), with_torch.__name__)
        return with_triton(*args, **kwargs)

    return cast(F, run)


def _has_leaf(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def _require_triton() -> None:
    if not _has_triton():
        raise ValueError(f"{VARIABLE}=triton needs the package triton: install it, or use torch")
    if not (_has_cuda() or _interpreted()):
        raise ValueError(
            f"{VARIABLE}=triton needs a CUDA device: use torch, or set TRITON_INTERPRET=1 to run "
            "the kernels slowly on the processor"
        )


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
