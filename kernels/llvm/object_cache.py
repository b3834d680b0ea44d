"""Object code of kernels: compiled for this CPU, loaded into memory, and the keys by which it is
kept on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import struct
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from llvmlite import ir

from kernels import processor

if TYPE_CHECKING:
    import llvmlite.binding as llvm

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT.name
# they write kernels, or hold the tables that kernels are written from
_LIBRARIES = ("llvmlite", "gguf")


class _WithoutNameError(Exception):
    """A value that has no name to distinguish it from others of its kind."""


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


# Object files of x86-64 Linux are linked here: LLVM's linker would bring in all of LLVM, 75 MiB,
# where no kernel has to be compiled. Others are left to it. Source: System V ABI, AMD64 supplement,
# chapter 4, "Object Files".
_KIND = struct.Struct("<4s3B9xHH")  # the start of a file's header
_OURS = b"\x7fELF", 2, 1, 1, 1, 62  # 64 bits, little-endian, version 1; relocatable, x86-64
_TABLE = struct.Struct("<40xQ12xH")  # the header up to offset and number of sections
# name, type, flags, address, offset, size, link, info, alignment, size of an entry
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_RELOCATION = struct.Struct("<QIIq")  # offset, type, symbol, addend
_SYMBOLS, _RELOCATIONS, _UNWINDING = 2, 4, 0x70000001  # types of sections
_WRITTEN = 1  # a flag of sections
_ABSOLUTE = 1  # R_X86_64_64: calls and constants in code of the large model have no other


class LinkedCode:
    """An object file of x86-64 Linux in memory, good while this is kept."""

    def __init__(self, code: bytes, library: str | None) -> None:
        """library: one with functions that the code calls, next to the C library's.

        Raises ValueError for what is not linked here, OSError where the system refuses to run it.
        """
        if not sys.platform.startswith("linux") or _KIND.unpack_from(code) != _OURS:
            raise ValueError("an object file for another system")
        at, n = _TABLE.unpack_from(code)
        sections = list(_SECTION.iter_unpack(code[at : at + n * _SECTION.size]))
        if any(flags & _WRITTEN for _, _, flags, *_ in sections):
            raise ValueError("data that are written to")
        # the whole file: its sections lie in it as they have to be aligned
        self._memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[:] = code
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        (table,) = (section for section in sections if section[1] == _SYMBOLS)
        names, symbols = sections[table[6]][4], []
        for name, _, _, number, value, _ in _SYMBOL.iter_unpack(_content(code, table)):
            start = names + name
            text = code[start : code.index(0, start)].decode()
            place = self._base + sections[number][4] + value if 0 < number < n else None
            symbols.append((text, place))
        self._addresses = {name: place for name, place in symbols if place is not None}
        for section in sections:
            target = sections[section[7]]
            if section[1] != _RELOCATIONS or target[1] == _UNWINDING:  # nothing is thrown
                continue
            for offset, type_, symbol, addend in _RELOCATION.iter_unpack(_content(code, section)):
                if type_ != _ABSOLUTE:
                    raise ValueError(f"a relocation of type {type_}")
                name, place = symbols[symbol]
                value = (_outside(name, library) if place is None else place) + addend
                struct.pack_into("<Q", self._memory, target[4] + offset, value)
        execute = mmap.PROT_READ | mmap.PROT_EXEC
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(self._base), len(code), execute):
            raise OSError("memory may not be executed here")

    def get_function_address(self, name: str) -> int:
        """Of a function of the file."""
        return self._addresses[name]


def _content(code: bytes, section: tuple[int, ...]) -> bytes:
    return code[section[4] : section[4] + section[5]]


def _outside(name: str, library: str | None) -> int:
    """The address of a function of a library, or of the C library."""
    for each in (library, None):
        found = getattr(ctypes.CDLL(each), name, None)
        if found is not None:
            return ctypes.cast(found, ctypes.c_void_p).value or 0
    raise ValueError(f"{name} is nowhere to be found")
