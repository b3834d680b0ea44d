"""Triton's interpreter, adapted: products of bfloat16, no repeated patching, no access outside of
tensors, and the first places of NaN."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from engine.conform.cases import loads

_MOST_PLACES = 4


class OutsideMemoryError(Exception):
    """A kernel writes outside of all its tensors, which would damage the process."""


class _Bounds:
    """The address ranges of a kernel's tensors; one kernel runs at a time."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple[int, str]] = {}  # first byte: end, and which tensor
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.firsts: list[int] = []
        self.fill = np.nan  # the value read outside of all tensors

    def set(self, tensors: dict[str, Any]) -> None:
        self.parts, self.tensors = {}, {}
        for name, one in tensors.items():
            self._add(name, one)
        self.firsts = sorted(self.parts)

    def _add(self, name: str, one: Any) -> None:
        """Add a tensor, one inside a wrapper or a descriptor, or several."""
        if isinstance(one, torch.Tensor):
            held = one.untyped_storage()
            words = f"{name} {list(one.shape)}"
            self.parts[held.data_ptr()] = held.data_ptr() + held.nbytes(), words
            self.tensors[held.data_ptr()] = name, one
        elif isinstance(one, (tuple, list)):
            for each in one:
                self._add(name, each)
        elif hasattr(one, "base"):
            self._add(name, one.base)

    def outside(self, places: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray | None:
        """Which of the addresses of `size`-byte values are in no tensor; None: all are in one."""
        if not self.firsts or not places.size:
            return None
        at = bisect_right(self.firsts, int(places.min())) - 1
        if at >= 0 and int(places.max()) + size <= self.parts[self.firsts[at]][0]:
            return None
        first = np.searchsorted(self.firsts, places, "right") - 1
        ends = np.array([self.parts[x][0] for x in self.firsts])
        off = mask & ((first < 0) | (places + size > ends[first]))
        return off if off.any() else None

    def nearest(self, place: int) -> str:
        """The place of an address, in words."""
        first = min(self.parts, key=lambda x: max(x - place, place - self.parts[x][0]))
        end, words = self.parts[first]
        if place < first:
            return f"{first - place} bytes before {words}"
        return f"{place - end} bytes after the end of {words}"

    def value(self, place: int) -> str:
        """The tensor and value at an address, or what is near it."""
        if self.outside(np.array([place]), np.array([True]), 1) is not None:
            return f"what lies {self.nearest(place)}"
        name, one = self.tensors[self.firsts[bisect_right(self.firsts, place) - 1]]
        at = (place - one.data_ptr()) // one.element_size()
        if one.is_contiguous() and 0 <= at < one.numel():
            index = [int(i) for i in np.unravel_index(at, tuple(one.shape))]
            return f"{name}{index} of {list(one.shape)}"
        return f"value {at} of {name} {list(one.shape)}"


_BOUNDS = _Bounds()
_PLACES: list[str] = []


@contextmanager
def blank() -> Iterator[None]:
    """Within the context, reads outside of all tensors give zeros, not NaN."""
    _BOUNDS.fill = 0.0
    try:
        yield
    finally:
        _BOUNDS.fill = np.nan


@contextmanager
def watched() -> Iterator[list[str]]:
    """Records the first places at which kernels read NaN, or make NaN of numbers: what, and the
    file and line."""
    _PLACES.clear()
    names = ("create_masked_load", "unary_op", "binary_op", "create_dot", "create_rsqrt")
    before = {name: getattr(InterpreterBuilder, name) for name in names}
    for name, call in before.items():
        setattr(InterpreterBuilder, name, _watching(name, call))
    try:
        yield _PLACES
    finally:
        for name, call in before.items():
            setattr(InterpreterBuilder, name, call)


def _watching(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def watching(self: Any, *args: Any, **options: Any) -> Any:
        made = call(self, *args, **options)
        if len(_PLACES) == _MOST_PLACES or not np.issubdtype(made.data.dtype, np.floating):
            return made
        off = np.isnan(made.data)
        if name == "create_masked_load":
            off = off & args[1].data
        taken = [x.data for x in args if isinstance(x, TensorHandle)]
        if not off.any():
            return made
        if name == "create_masked_load":
            words = f"{_BOUNDS.value(int(args[0].data[off].flat[0]))} is read"
        elif any(np.isnan(x).any() for x in taken if np.issubdtype(x.dtype, np.floating)):
            return made
        else:
            what = getattr(args[-1], "__name__", name.removeprefix("create_"))
            same = [x[off].flat[0] for x in taken if x.shape == off.shape]
            words = f"{what} of {' and '.join(f'{x:.3g}' for x in same)}"
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith(("triton.", __name__)):
            frame = frame.f_back
        words += f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
        if words not in _PLACES:
            _PLACES.append(words)
        return made

    return watching


def mend() -> None:
    """Patch the interpreter of this process; further calls do nothing.

    Triton 3.7 stores bfloat16 as 16-bit integers, truncates where a GPU rounds to nearest, and
    `tl.dot` multiplies the integers. Whenever a kernel calls another function, it searches all of
    triton.language for functions to patch, and patches them again: milliseconds, and most of a
    kernel's time. It checks integer overflow, which only its debugging reads.
    """
    multiply, replace = InterpreterBuilder.create_dot, interpreter._patch_lang
    if multiply.__module__ == __name__:
        return
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace_fields(options, sanitize_overflow=False)
    replaced: set[int] = set()

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return multiply(self, *wide, *others)

    def replace_new(fn: FunctionType) -> Any:
        new = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core} - replaced
        if not new:
            return interpreter._LangPatchScope()
        scope = replace(fn)
        restore = scope.restore

        def put_back() -> None:
            restore()
            replaced.difference_update(new)

        replaced.update(new)
        scope.restore = put_back
        return scope

    cast = InterpreterBuilder.cast_impl

    def cast_nearest(self: Any, value: Any, wanted: Any) -> Any:
        if (value.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, value, wanted)
        rounded = torch.from_numpy(np.array(value.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    to_host = GridExecutor._init_args_hst

    def args_on_host(self: Any, args: Any, options: Any) -> Any:
        made, named = to_host(self, args, options)
        _BOUNDS.set(dict(zip(self.arg_names, made, strict=False)) | named)
        return made, named

    def masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        loads[0] += 1
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        off = _BOUNDS.outside(ptrs.data, mask.data, size)
        if off is not None:  # whatever is there, `fill` is seen instead
            mask = interpreter.TensorHandle(mask.data & ~off, tl.int1)
        made = load(self, ptrs, mask, *others)
        if off is not None and np.issubdtype(made.data.dtype, np.floating):
            made.data[off] = _BOUNDS.fill
        return made

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        off = _BOUNDS.outside(ptrs.data, mask.data, value.data.itemsize)
        if off is not None:
            place = _BOUNDS.nearest(int(ptrs.data[off].flat[0]))
            raise OutsideMemoryError(f"{int(off.sum())} values are written {place}")
        return store(self, ptrs, value, mask, *others)

    InterpreterBuilder.create_dot, interpreter._patch_lang = create_dot, replace_new
    InterpreterBuilder.cast_impl = cast_nearest
    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
    GridExecutor._init_args_hst = args_on_host
