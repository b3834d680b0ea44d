"""Triton's interpreter as kernels need it: products of bfloat16, and nothing replaced twice."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder


def mend() -> None:
    """Change the interpreter of this process; calls after the first change nothing.

    Triton 3.7 keeps bfloat16 as whole numbers of 16 bits, and `tl.dot` multiplies those. Whenever
    a kernel calls another function, it searches all of triton.language for what the interpreter
    replaces, and replaces it again: milliseconds, and most of what a kernel takes.
    """
    multiply, replace = InterpreterBuilder.create_dot, interpreter._patch_lang
    if multiply.__module__ == __name__:
        return
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

    InterpreterBuilder.create_dot, interpreter._patch_lang = create_dot, replace_new
