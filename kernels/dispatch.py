"""The choice of an operation's implementation: naive, torch, or by device LLVM or Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

VARIABLE = "DRAFTSCOPE_KERNELS"
CHOICES = ("naive", "torch", "llvm", "triton")

F = TypeVar("F", bound=Callable[..., object])


def pick(
    naive: F,
    with_torch: F,
    triton: str | None = None,
    llvm: F | str | None = None,
    *,
    any_type: bool = False,
) -> F:
    """The implementation that the environment variable DRAFTSCOPE_KERNELS asks for.

    triton, llvm: the versions for a GPU and for a CPU; None where there is none, and torch runs.
    A string names a module that has one under the name of `with_torch` without its suffix, or
    under the name after a colon; it is imported at the first call that needs it.

    Unset or empty, the device decides on every call: Triton for a first argument on a CUDA
    device, LLVM for one of float32 (or of any_type) on the processor. Neither has gradients, so
    torch runs whatever needs them. Every operation calls this once, when its package is imported:
    looking the variable up on each call would cost as much as a small tensor operation, and where
    only torch can run, its version itself is returned.

    Raises ValueError for a value that is not one of CHOICES and for "llvm" or "triton" on a
    machine that cannot run it.
    """
    name = os.environ.get(VARIABLE)
    if name and name not in CHOICES:
        raise ValueError(f"{VARIABLE}={name} is not one of {', '.join(CHOICES)}")
    if name == "naive":
        return naive
    if name == "triton":
        _require_triton()
    if name == "llvm" and not has_llvm():
        raise ValueError(
            f"{VARIABLE}=llvm needs the package llvmlite and a torch with GNU's OpenMP: use torch"
        )
    if not (name == "triton" or (not name and _has_cuda() and has_triton())):
        triton = None
    if not uses_llvm():
        llvm = None
    if triton is None and llvm is None:
        return with_torch
    return _by_device(with_torch, triton, llvm, name == "triton", any_type)


def pick_invariant(with_torch: F, llvm: F | str | None, *, any_type: bool = False) -> F:
    """`pick` for calls whose results have the same bits whatever numbers are next to them.

    with_torch has a keyword `invariant` for that, which the function returned sets. The naive
    version and the one for a GPU do not promise it; LLVM's always has it.
    """
    run = cast(F, functools.wraps(with_torch)(functools.partial(with_torch, invariant=True)))
    return pick(run, run, None, llvm, any_type=any_type)


def pick_whole(
    naive: Callable[..., object],
    with_torch: F,
    triton: str | None = None,
    llvm: str | None = None,
    *,
    any_type: bool = False,
) -> F:
    """`pick`, and for calls with the keyword `invariant`, if with_torch has one, `pick_invariant`;
    no other version has the keyword."""
    usual = pick(cast(F, naive), with_torch, triton, llvm, any_type=any_type)
    if "invariant" not in inspect.signature(with_torch).parameters:
        return usual
    steady = pick_invariant(with_torch, llvm, any_type=any_type)

    @functools.wraps(with_torch)
    def run(*args: Any, invariant: bool = False, **kwargs: Any) -> object:
        return (steady if invariant else usual)(*args, **kwargs)

    return cast(F, run)


def operation(
    *, triton: str | None = None, llvm: str | None = None, any_type: bool = False
) -> Callable[[F], F]:
    """Decorator that makes the version in torch the whole operation: see `pick_whole`.

    In the same module the naive version, <name>_naive, may exist, and with that module as `llvm`
    the one for a CPU, <name>_with_llvm.
    """

    def whole(with_torch: F) -> F:
        own, name = with_torch.__module__, with_torch.__name__
        naive = functools.wraps(with_torch)(_when_called(own, f"{name}_naive", with_torch))
        on_cpu = f"{own}:{name}_with_llvm" if llvm == own else llvm
        return pick_whole(naive, with_torch, triton, on_cpu, any_type=any_type)

    return whole


def torch_version(run: F) -> F:
    """The version of an operation that is in torch."""
    return cast(F, getattr(run, "__wrapped__", run))


def uses_llvm() -> bool:
    """Whether operations with an LLVM version run in it on the processor."""
    return os.environ.get(VARIABLE) in (None, "", "llvm") and has_llvm()


def runs_llvm(x: Tensor) -> bool:
    """Whether an operation on numbers of any type, for which `pick` cannot choose, runs in its LLVM
    version."""
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    return x.device.type == "cpu" and uses_llvm() and not needs_gradient


def runs_triton(x: Any) -> bool:
    """Whether an operation of several kernels runs in its single-kernel version for a GPU. x: a
    tensor, or rows made of tensors, on the device in question."""
    if not (x.is_cuda or _always_triton()):
        return False
    return _always_triton() or (not os.environ.get(VARIABLE) and _has_cuda() and has_triton())


@functools.cache
def _always_triton() -> bool:
    return os.environ.get(VARIABLE) == "triton"


def _by_device(
    with_torch: F, triton: str | None, llvm: F | str | None, always_triton: bool, any_type: bool
) -> F:
    name = with_torch.__name__.removesuffix("_with_torch").removesuffix("_naive")
    with_triton = with_torch if triton is None else _when_called(triton, name)
    with_llvm = None if isinstance(llvm, str) else llvm or with_torch

    @functools.wraps(with_torch)
    def run(*args: Any, **kwargs: Any) -> object:
        nonlocal with_llvm
        if torch.is_grad_enabled() and _has_leaf(args):
            return with_torch(*args, **kwargs)
        if always_triton or args[0].is_cuda:
            return with_triton(*args, **kwargs)
        if any_type or args[0].dtype == torch.float32:
            if with_llvm is None:
                module, _, other = str(llvm).partition(":")
                with_llvm = cast(F, getattr(importlib.import_module(module), other or name))
            return with_llvm(*args, **kwargs)
        return with_torch(*args, **kwargs)

    return cast(F, run)


def _when_called(module: str, name: str, *without: Any) -> Callable[..., object]:
    """A function of a module imported at the first call. without: its default if missing."""
    found: Callable[..., object] | None = None

    def call(*args: Any, **kwargs: Any) -> object:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(module), name, *without)
        return found(*args, **kwargs)

    return call


def _has_leaf(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _require_triton() -> None:
    if not has_triton():
        raise ValueError(f"{VARIABLE}=triton needs the package triton: install it, or use torch")
    if not (_has_cuda() or _interpreted()):
        raise ValueError(
            f"{VARIABLE}=triton needs a CUDA device: use torch, or set TRITON_INTERPRET=1 to run "
            "the kernels slowly on the processor"
        )


@functools.cache
def has_llvm() -> bool:
    """Whether operations can run in LLVM here."""
    return importlib.util.find_spec("llvmlite") is not None and gnu_openmp() is not None


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def gnu_openmp() -> Path | None:
    """GNU's OpenMP, as torch includes it on Linux; None if torch uses another one."""
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return libraries[0] if libraries else None


COUNTERS = 4096


@functools.cache
def counters(device: torch.device) -> Tensor:
    """int32 zeros in which one launch at a time counts its programs, leaving zeros."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
