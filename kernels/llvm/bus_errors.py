"""Bus errors of mapped files: a page that cannot be read becomes zeros, which is recorded.

A page of a mapped file that lies beyond the file's new end, or that its disk no longer delivers,
raises SIGBUS in the thread that reads it, which ends the process. The handler here runs no Python:
it maps zeros over the rest of the range, records this in a table and returns, so that the reader
continues. The reader must call `struck` before the result is used.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import signal
import sys

from llvmlite import ir

from kernels.llvm.object_cache import compiled, loaded
from kernels.llvm.values import I32, I64

_MOST = 64
"""Ranges guarded at a time."""
_RANGE = 3  # of a range: first address, address after the last one, whether it was struck
_POINTER = ir.PointerType()
# of siginfo_t, the same on x86-64 and AArch64
_CODE_AT, _ADDRESS_AT = 8, 16
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000


class _SigAction(ctypes.Structure):
    """struct sigaction of GNU's C library and of musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class BusErrors:
    """The handler, installed when the first range is guarded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._table = (ctypes.c_int64 * (1 + _MOST * _RANGE))()  # first: whether any was struck
        self._previous = _SigAction()
        module = _module(ctypes.addressof(self._table), ctypes.addressof(self._previous))
        self._engine = loaded(compiled(module))  # holds the handler's code
        self._ours = _SigAction(
            self._engine.get_function_address("handle"), flags=_SA_SIGINFO | _SA_ONSTACK
        )

    def guard(self, address: int, n_bytes: int) -> int | None:
        """Guard whole pages from `address`; the number of the range, None if there is no room."""
        free = (i for i in range(_MOST) if not self._table[1 + i * _RANGE])
        number = next(free, None)
        if number is None or not self._install():
            return None
        at, stop = 1 + number * _RANGE, address + -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._table[at + 1], self._table[at + 2] = stop, 0
        self._table[at] = address
        return number

    def forget(self, number: int) -> None:
        """The range is not mapped any more."""
        self._table[1 + number * _RANGE] = self._table[2 + number * _RANGE] = 0

    def struck(self) -> list[int]:
        """Numbers of the ranges that could not be read since the last call."""
        if not self._table[0]:
            return []
        self._table[0] = 0
        return [i for i in range(_MOST) if self._take(3 + i * _RANGE)]

    def _take(self, at: int) -> int:
        struck, self._table[at] = self._table[at], 0
        return struck

    def _install(self) -> bool:
        """Become the handler, also where another one was installed in the meantime."""
        now = _SigAction()
        if self._library.sigaction(signal.SIGBUS, None, ctypes.byref(now)):
            return False
        if now.handler == self._ours.handler:
            return True
        ctypes.memmove(ctypes.byref(self._previous), ctypes.byref(now), ctypes.sizeof(now))
        return not self._library.sigaction(signal.SIGBUS, ctypes.byref(self._ours), None)


@functools.cache
def bus_errors() -> BusErrors | None:
    """The one of this process; None where mapped files are not guarded."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    return BusErrors()


def _module(table: int, previous: int) -> ir.Module:
    """void handle(int signal, siginfo_t *info, void *context), of async-signal-safe calls alone.

    table: address of flag and ranges. previous: of the struct sigaction to go back to.
    """
    module = ir.Module("bus_errors")
    signature = ir.FunctionType(ir.VoidType(), [I32, _POINTER, _POINTER])
    function = ir.Function(module, signature, "handle")
    number, info, _ = function.args
    names = "entry", "head", "look", "inside", "next", "noted", "alien", "sent", "end"
    blocks = {name: function.append_basic_block(name) for name in names}
    builder = ir.IRBuilder(blocks["entry"])

    def called(name: str, result: ir.Type, *types: ir.Type) -> ir.Function:
        return ir.Function(module, ir.FunctionType(result, types), name)

    def at(address: ir.Value | int) -> ir.Value:
        value = ir.Constant(I64, address) if isinstance(address, int) else address
        return builder.inttoptr(value, _POINTER)

    def field(offset: int, type: ir.Type) -> ir.Value:
        return builder.load(builder.gep(info, [I64(offset)], source_etype=ir.IntType(8)), typ=type)

    map_pages = called("mmap", I64, I64, I64, I32, I32, I32, I64)
    set_action = called("sigaction", I32, I32, _POINTER, _POINTER)
    send = called("raise", I32, I32)

    code, address = field(_CODE_AT, I32), field(_ADDRESS_AT, I64)
    by_kernel = builder.icmp_signed(">", code, I32(0))
    builder.cbranch(by_kernel, blocks["head"], blocks["alien"])

    builder.position_at_end(blocks["head"])
    entry = builder.phi(I64)
    entry.add_incoming(I64(table + 8), blocks["entry"])
    last = I64(table + 8 * (1 + _MOST * _RANGE))
    builder.cbranch(builder.icmp_unsigned("<", entry, last), blocks["look"], blocks["alien"])

    builder.position_at_end(blocks["look"])
    start = builder.load(at(entry), typ=I64)
    stop = builder.load(at(builder.add(entry, I64(8))), typ=I64)
    holds = builder.and_(
        builder.icmp_unsigned("<=", start, address), builder.icmp_unsigned("<", address, stop)
    )
    builder.cbranch(holds, blocks["inside"], blocks["next"])

    builder.position_at_end(blocks["next"])
    entry.add_incoming(builder.add(entry, I64(8 * _RANGE)), blocks["next"])
    builder.branch(blocks["head"])

    builder.position_at_end(blocks["inside"])
    # to the end of the range: page by page, a large model would take as many signals
    page = builder.and_(address, I64(-mmap.PAGESIZE))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    rest = builder.sub(stop, page)
    arguments = [page, rest, I32(mmap.PROT_READ), I32(flags), I32(-1), I64(0)]
    mapped = builder.call(map_pages, arguments)
    builder.cbranch(builder.icmp_unsigned("==", mapped, page), blocks["noted"], blocks["alien"])

    builder.position_at_end(blocks["noted"])
    builder.store(I64(1), at(builder.add(entry, I64(16))))
    builder.store(I64(1), at(table))
    builder.ret_void()

    # Not in a guarded range: the previous handler gets it when the same instruction runs again. A
    # handler that comes back here, as Python's faulthandler does, must not cause an endless loop.
    builder.position_at_end(blocks["alien"])
    builder.call(set_action, [number, at(previous), ir.Constant(_POINTER, None)])
    builder.store(I64(signal.SIG_DFL), at(previous))
    builder.store(I32(0), at(previous + _SigAction.flags.offset))
    builder.cbranch(by_kernel, blocks["end"], blocks["sent"])

    builder.position_at_end(blocks["sent"])  # sent by another process: nothing would run again
    builder.call(send, [number])
    builder.branch(blocks["end"])

    builder.position_at_end(blocks["end"])
    builder.ret_void()
    return module
