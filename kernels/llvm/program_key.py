"""What a compiled kernel depends on, as a key: equal keys stand for equal machine code.

Found without writing the kernel, which would take as long as compiling many of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import FunctionType

from kernels import processor

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT.name
# they write kernels, or hold the tables that kernels are written from
_LIBRARIES = ("llvmlite", "gguf")


class _WithoutNameError(Exception):
    """Something that cannot be told from others of its kind by what it says of itself."""


def program_key(*parts: object) -> str | None:
    """The key of a kernel written by functions of this package, hexadecimal digits.

    parts: the functions, as they are or with arguments in functools.partial, and other arguments:
    numbers, texts, None, tuples and dataclasses of them. None if there is anything else among
    them, such as a function from elsewhere, whose code is not known here.
    """
    try:
        text = _described(parts)
    except _WithoutNameError:
        return None
    cpu, features = processor.target()
    about = (_code(), cpu, sorted(features.items()), text)
    return hashlib.sha256(repr(about).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of all source of this package: a kernel may use any of it; and the libraries."""
    digest = hashlib.sha256(repr([version(name) for name in _LIBRARIES]).encode())
    for path in sorted(_ROOT.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _described(part: object) -> str:
    if part is None or isinstance(part, (str, int, float)):
        return repr(part)
    if isinstance(part, functools.partial):
        return f"partial({_described((part.func, part.args, *sorted(part.keywords.items())))})"
    if isinstance(part, FunctionType):
        return _function(part)
    if isinstance(part, tuple):
        inside = part
    elif is_dataclass(part) and not isinstance(part, type):
        inside = tuple(getattr(part, field.name) for field in fields(part))
    else:
        raise _WithoutNameError
    return f"{type(part).__qualname__}({', '.join(map(_described, inside))})"


def _function(function: Callable[..., object]) -> str:
    """By name, and what it takes from the function around it."""
    if function.__module__.partition(".")[0] != _PACKAGE:
        raise _WithoutNameError
    around = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return f"{function.__module__}.{function.__qualname__}{_described(around)}"
