"""Object code of kernels: compiled for this CPU, loaded into memory, and the keys by which it is
kept on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from llvmlite import ir

from kernels import processor
from kernels.llvm.machine_code import LinkedCode

if TYPE_CHECKING:
    import llvmlite.binding as llvm

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT.name
# they write kernels, or hold the tables that kernels are written from
_LIBRARIES = ("llvmlite", "gguf")


class _WithoutNameError(Exception):
    """Something that does not say of itself what distinguishes it from others of its kind."""


def program_key(*parts: object) -> str | None:
    """The key of a kernel written by functions of this package, hexadecimal digits.

    parts: the functions, as they are or with arguments in functools.partial, and other arguments:
    numbers, texts, None, tuples, lists and dataclasses of them. None if there is anything else
    among them, such as a function from elsewhere, whose code is not known here.
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
    if isinstance(part, (tuple, list)):
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


def compiled(module: ir.Module) -> bytes:
    """Object code for the processor of kernels.processor.target."""
    llvm, machine = _llvm(), _machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = machine.triple
    # Kernels are written in vectors and unrolled as they should be: variables into registers is
    # all they need. The usual passes would take most of the time and change nothing.
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    options = llvm.create_pipeline_tuning_options()
    passes.run(parsed, llvm.create_pass_builder(machine, options))
    code: bytes = machine.emit_object(parsed)
    return code


def loaded(code: bytes, *, has_threads: bool = True) -> LinkedCode | llvm.ExecutionEngine:
    """What holds object code in memory, its functions ready to be called. has_threads: whether
    they call torch's, which is loaded for that."""
    library = None
    if has_threads:
        from kernels.dispatch import gnu_openmp

        # its threads are waiting already, warm, for the next job
        library = str(gnu_openmp())
    try:
        return LinkedCode(code, library)
    except (ValueError, OSError):
        return _linked_by_llvm(code, library)


def _linked_by_llvm(code: bytes, library: str | None) -> llvm.ExecutionEngine:
    llvm = _llvm()
    if library is not None:
        llvm.load_library_permanently(library)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine() -> llvm.TargetMachine:
    # one for every use: an execution engine owns the machine it is made with
    llvm = _llvm()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = processor.target()
    flags = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=flags, opt=3, jit=True)


def _llvm() -> ModuleType:
    """Imported when something has to be compiled: it takes 75 MiB."""
    return import_module("llvmlite.binding")
