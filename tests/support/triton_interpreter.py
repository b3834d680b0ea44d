"""Triton's interpreter without the work that it repeats.

Whenever a kernel calls another function, Triton 3.7 searches all of triton.language for what the
interpreter replaces, and replaces it again. It takes milliseconds, and was most of what a kernel
took. Once for each module in a launch is enough: a launch ends with all of it put back.
"""

from __future__ import annotations

from types import FunctionType

from triton.runtime import interpreter

_replaced: set[int] = set()
"""Modules, by their globals, that the launch under way has replaced functions for."""


class _Scope(interpreter._LangPatchScope):
    def restore(self) -> None:
        super().restore()
        _replaced.clear()


def replace_once() -> None:
    """Let each launch replace functions once, in this process from now on."""
    replace = interpreter._patch_lang

    def once(fn: FunctionType) -> interpreter._LangPatchScope:
        module = id(fn.__globals__)
        if module in _replaced:
            return _Scope()
        _replaced.add(module)
        scope: interpreter._LangPatchScope = replace(fn)
        return scope

    interpreter._LangPatchScope = _Scope
    interpreter._patch_lang = once
