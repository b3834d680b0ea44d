"""Machine code in memory: object files of kernels, linked and made executable.

Those of x86-64 Linux are linked here: LLVM's linker would bring in all of LLVM, 75 MiB, where no
kernel has to be compiled. Others are left to it.

Source: System V ABI, AMD64 supplement, chapter 4, "Object Files".
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys

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
