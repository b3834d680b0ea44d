"""A function of the program with a few of its words replaced: a bug as somebody might write it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any


def reworded(place: str, old: str, new: str) -> tuple[Any, str, Callable[..., Any]]:
    """The owner of a function, its name and its changed form.

    place: "module:function" or "module:Class.method". Raises ValueError unless `old` is in its
    source exactly once, so that a list of bugs does not outlive the code that they were made for.
    """
    module_name, _, path = place.partition(":")
    module = import_module(module_name)
    *owners, name = path.split(".")
    owner = getattr(module, owners[0]) if owners else module
    held = owner.__dict__[name]
    wrapper = type(held) if isinstance(held, staticmethod | property) else None
    function = held.fget if wrapper is property else held.__func__ if wrapper else held
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{place} has {source.count(old)} times {old!r}")
    source = source.replace(old, new)
    if wrapper:
        source = source.partition("\n")[2]
    # within a function of this parameter, `super()` finds its class as it does in a class
    # and under another name, so that one of the module that is called like it is still found
    source = source.replace(f"def {name}(", f"def {name}_reworded(", 1)
    body = textwrap.indent(source, "    ")
    wrapped = f"def make(__class__):\n{body}\n    return {name}_reworded\n"
    scope: dict[str, Any] = {}
    exec(compile(wrapped, f"<{place}>", "exec"), module.__dict__, scope)
    made = scope["make"](owner if owners else None)
    return owner, name, wrapper(made) if wrapper else made
