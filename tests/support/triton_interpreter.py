"""Triton's interpreter without the work that it repeats.

Whenever a kernel calls another function, Triton 3.7 searches all of triton.language for what the
interpreter replaces, and replaces it again. It takes milliseconds, and was most of what a kernel
took. Once for each module in a launch is enough: a launch ends with all of it put back.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from triton.runtime import interpreter


def replace_once() -> None:
    """Let each launch replace the functions of a module once, in this process from now on."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # modules of this launch, by their globals

    def replace_new(fn: FunctionType) -> interpreter._LangPatchScope:
        module = id(fn.__globals__)
        if module in done:
            return interpreter._LangPatchScope()
        done.add(module)
        return replace(fn)

    def launch_anew(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        done.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_new, launch_anew
