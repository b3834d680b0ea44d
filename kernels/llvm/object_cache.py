"""Object code of kernels: compiled for this CPU, loaded into memory, and kept on disk, so that a
kernel is compiled once and not at every start.

What is read here is run as machine code. So the folder has to be the user's own, with no one else
allowed to write to it, and every file holds a hash of what follows. Without such a folder, or with
DRAFTSCOPE_KERNEL_CACHE=off, nothing is kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from llvmlite import ir

from kernels import processor
from kernels.cache_folder import cache_folder
from kernels.llvm.machine_code import LinkedCode

if TYPE_CHECKING:
    import llvmlite.binding as llvm

VARIABLE = "DRAFTSCOPE_KERNEL_CACHE"
MOST_BYTES = 64 << 20
"""Of all files together; those that were not used for longest go first."""

_SUFFIX = ".kernel"
_HEADER = b"draftscope kernel 1\n"
_HASH_BYTES = hashlib.sha256().digest_size


def kept(key: str, made: Callable[[], bytes]) -> bytes:
    """What is kept under a key, hexadecimal digits, object code as a rule; else it is made, and
    kept.

    Nothing that is wrong with the disk is an error: the kernel is compiled then.
    """
    with suppress(OSError), _folder() as folder:
        found = _read(folder, key)
        if found is not None:
            return found
    code = made()
    with suppress(OSError), _folder() as folder:
        _write(folder, key, code)
        _prune(folder)
    return code


@contextmanager
def _folder() -> Iterator[int]:
    """An open folder to reach files in. Raises OSError where there is none to be trusted."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        raise OSError("kernels are not to be kept")
    if not hasattr(os, "O_NOFOLLOW"):
        raise OSError("this system has no way to open a folder that only its owner can write to")
    path = chosen or cache_folder() / "kernels"
    os.makedirs(path, mode=0o700, exist_ok=True)
    # opened before it is looked at, and not opened again by its name
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_ours(os.fstat(folder)):
            raise PermissionError(f"{path} can be written by others")
        yield folder
    finally:
        os.close(folder)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(folder: int, key: str) -> bytes | None:
    """None for a file that is not there, not ours, damaged, or holds something else."""
    try:
        file = os.open(key + _SUFFIX, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not (stat.S_ISREG(status.st_mode) and _is_ours(status) and status.st_size < MOST_BYTES):
            return None
        whole = opened.read()
        with suppress(OSError):  # on a disk that cannot be written, none is removed either
            os.utime(file)
    return _content(whole, key)


def _content(whole: bytes, key: str) -> bytes | None:
    head = _head(key)
    digest, code = whole[len(head) :][:_HASH_BYTES], whole[len(head) + _HASH_BYTES :]
    intact = whole.startswith(head) and hashlib.sha256(code).digest() == digest
    return code if intact else None


def _head(key: str) -> bytes:
    return _HEADER + key.encode() + b"\n"


def _write(folder: int, key: str, code: bytes) -> None:
    """The whole file appears at once; two processes may write the same one."""
    part = f"{key}.{uuid.uuid4().hex}{_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(_head(key) + hashlib.sha256(code).digest() + code)
        os.replace(part, key + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def _prune(folder: int) -> None:
    """Remove the files used longest ago, those of other versions among them, beyond MOST_BYTES."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            with suppress(FileNotFoundError):  # another process has removed it
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                found.append((status.st_mtime_ns, name, status.st_size))
    total = sum(size for _, _, size in found)
    for _, name, size in sorted(found):
        if total <= MOST_BYTES:
            break
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        total -= size


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
