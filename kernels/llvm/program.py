"""A kernel compiled for this CPU, its tasks taken in turn by torch's own threads; and launches that
were noted once, started again by one call of a compiled loop."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple, TypeVarTuple, cast

import numpy as np
from llvmlite import ir

from kernels.kernel_files import kept
from kernels.llvm.code import Code
from kernels.llvm.object_cache import compiled, loaded, program_key
from kernels.llvm.values import I32, I64, Value

Ts = TypeVarTuple("Ts")
Body = Callable[[Code, Sequence[Value], Value, Value], None]
"""Writes the tasks first .. last - 1: (code, arguments as integers, first, last)."""
Before = Callable[[Code, Sequence[Value]], None]
"""Writes what the calling thread does before any task: (code, arguments as integers)."""

_VOID, _POINTER = ir.VoidType(), ir.PointerType()
# in front of the arguments: the next task, the number of tasks, how many are taken at a time
_HEADER = 3


class Launch(NamedTuple):
    """One call of a program. job: its arguments as `run` takes them. threads: at most this many.
    holds: what the arguments point to, tensors apart."""

    program: Program
    job: bytes
    threads: int
    holds: object

    def run(self) -> None:
        """Compute."""
        self.program.run(self.job, self.threads)


class _Watching(threading.local):
    watch: Callable[[Launch], None] | None = None


_watching = _Watching()


@contextmanager
def watched(watch: Callable[[Launch], None]) -> Iterator[None]:
    """Within the context, calls of programs by this thread do nothing but tell `watch`."""
    before, _watching.watch = _watching.watch, watch
    try:
        yield
    finally:
        _watching.watch = before


class _Building(threading.local):
    seconds = 0.0
    """How long this thread has been compiling programs, or reading them from disk, in all."""


building = _Building()
_threads_building: set[int] = set()


def n_building() -> int:
    """How many threads compile a program now, or read one from disk."""
    return len(_threads_building)


class Program:
    """A kernel of n_args arguments, integers of 64 bits or addresses.

    address: of the compiled function `void run(job, threads)`, good while the program is kept.
    """

    def __init__(self, body: Body, n_args: int, before: Before | None = None) -> None:
        begun, me = perf_counter(), threading.get_ident()
        _threads_building.add(me)
        try:
            self._engine = loaded(_object_code(body, n_args, before))
        finally:
            _threads_building.discard(me)
        self.address = address = self._engine.get_function_address("run")
        building.seconds += perf_counter() - begun
        # ctypes takes as long over every argument as over all of them packed
        self._pack = struct.Struct(f"{_HEADER + n_args}q").pack
        types = ctypes.c_char_p, ctypes.c_int32
        self.run = ctypes.CFUNCTYPE(None, *types)(address)
        # other Python threads do not run meanwhile: asked to hand over every few microseconds, this
        # one would wait for them longer than it computes
        self._run_briefly = ctypes.PYFUNCTYPE(None, *types)(address)

    def __call__(
        self, *args: int, tasks: int, chunk: int, threads: int, holds: object = None
    ) -> None:
        """Runs `tasks` tasks, `chunk` at a time, on up to `threads` threads.

        Addresses have to stay valid until the call returns, and as long as `watched` may want to
        repeat it: those of tensors do, holds is what else they point to. Tasks run in any order.
        """
        job = self._pack(0, tasks, chunk, *args)
        threads = threads if tasks > chunk else 1
        if _watching.watch is None:
            self.run(job, threads)
        else:
            _watching.watch(Launch(self, job, threads, holds))

    def job(self, *args: int) -> bytes:
        """The job of one task, for who calls `address` by itself."""
        return self._pack(0, 1, 1, *args)

    def alone(self, tasks: int, *args: int) -> None:
        """All tasks on the calling thread, at the least cost per call: for work of microseconds."""
        job = self._pack(0, tasks, tasks, *args)
        if _watching.watch is None:
            self._run_briefly(job, 1)
        else:
            _watching.watch(Launch(self, job, 1, None))


def kernel(
    n_args: int, before: Before | None = None
) -> Callable[[Callable[[Code, Sequence[Value], Value, *Ts], None]], Callable[[*Ts], Program]]:
    """Makes a function that writes one task the program of all: (code, arguments as integers, task,
    *constants). Called with the constants it gives that, compiled once for each. before: see
    Before."""

    def of(write: Callable[[Code, Sequence[Value], Value, *Ts], None]) -> Callable[[*Ts], Program]:
        @functools.cache
        def program(*constants: *Ts) -> Program:
            def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
                with code.loop(first, last) as task:
                    write(code, args, task, *constants)

            return Program(body, n_args, before)

        return cast(Callable[[*Ts], Program], program)  # keys of a cache are anything hashable

    return of


def _object_code(body: Body, n_args: int, before: Before | None) -> bytes:
    def make() -> bytes:
        return compiled(_module(body, n_args, before))

    key = program_key(body, n_args, before)
    return make() if key is None else kept(key, make)


def _module(body: Body, n_args: int, before: Before | None) -> ir.Module:
    module = ir.Module("kernel")
    share = _share(module, body, n_args)
    worker = _worker(module, share, n_args)
    _entry(module, worker, n_args, before)
    return module


def _share(module: ir.Module, body: Body, n_args: int) -> ir.Function:
    """void share(args…, first, last)"""
    function = ir.Function(module, ir.FunctionType(_VOID, [I64] * (n_args + 2)), "share")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    *args, first, last = (Value(builder, arg) for arg in function.args)
    body(Code(builder), args, first, last)
    builder.ret_void()
    return function


def _worker(module: ir.Module, share: ir.Function, n_args: int) -> ir.Function:
    """void worker(job): takes tasks until there are none left."""
    function = ir.Function(module, ir.FunctionType(_VOID, [_POINTER]), "worker")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    job = function.args[0]

    def field(index: int) -> ir.Value:
        return builder.gep(job, [ir.Constant(I64, index)], source_etype=I64)

    n_tasks, chunk = (builder.load(field(i), typ=I64) for i in (1, 2))
    args = [builder.load(field(_HEADER + i), typ=I64) for i in range(n_args)]
    head, work, end = (builder.append_basic_block(name) for name in ("head", "work", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    first = builder.atomic_rmw("add", job, chunk, "monotonic")
    builder.cbranch(builder.icmp_signed("<", first, n_tasks), work, end)
    builder.position_at_end(work)
    last = builder.add(first, chunk)
    last = builder.select(builder.icmp_signed("<", last, n_tasks), last, n_tasks)
    builder.call(share, [*args, first, last])
    builder.branch(head)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def _entry(module: ir.Module, worker: ir.Function, n_args: int, before: Before | None) -> None:
    """void run(job, threads)"""
    function = ir.Function(module, ir.FunctionType(_VOID, [_POINTER, I32]), "run")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    given, threads = function.args
    fields = builder.alloca(I64, size=_HEADER + n_args)
    values = []
    for index in (ir.Constant(I64, i) for i in range(_HEADER + n_args)):
        values.append(builder.load(builder.gep(given, [index], source_etype=I64), typ=I64))
        builder.store(values[-1], builder.gep(fields, [index]))
    if before is not None:
        before(Code(builder), [Value(builder, value) for value in values[_HEADER:]])
    job = builder.bitcast(fields, _POINTER)
    signature = ir.FunctionType(_VOID, [_POINTER, _POINTER, I32, I32])
    parallel = ir.Function(module, signature, "GOMP_parallel")
    with builder.if_else(builder.icmp_signed(">", threads, ir.Constant(I32, 1))) as (many, one):
        with many:
            builder.call(parallel, [worker, job, threads, ir.Constant(I32, 0)])
        with one:
            builder.call(worker, [job])
    builder.ret_void()


class KernelClock:
    """seconds: time that this thread has spent in compiled kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the context, kernels of this thread are timed; half a microsecond each."""
        with watched(self._run):
            yield

    def _run(self, launch: Launch) -> None:
        start = perf_counter()
        launch.run()
        self.seconds += perf_counter() - start


# of an entry: the address of a program's function, that of its job, threads; each of 8 bytes
_ENTRY = 3


class LaunchTable:
    """Launches in their order, each with the very arguments that it was noted with.

    What the arguments point to has to stay where it is; only `holds` of the launches is kept.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = [(launch.program, launch.holds) for launch in launches]
        self._jobs = np.frombuffer(b"".join(launch.job for launch in launches), np.uint8)
        starts = accumulate(
            (len(launch.job) for launch in launches), initial=self._jobs.ctypes.data
        )
        self._table = np.array(
            [
                (launch.program.address, start, launch.threads)
                for launch, start in zip(launches, starts, strict=False)
            ],
            np.int64,
        ).reshape(-1, _ENTRY)
        # asked once: numpy takes longer over an address than a launch
        self._address = self._table.ctypes.data
        self._walk = _walk()

    def __len__(self) -> int:
        return len(self._table)

    def __call__(self) -> None:
        """All launches, one after the other."""
        n = len(self._table)
        self._walk(self._address, tasks=n, chunk=n, threads=1)

    def run_on(self, between: Program, args: Sequence[int], state: np.ndarray) -> None:
        """All launches and then `between`, of one task, over and over until that leaves something
        else than 0 in state[1]. state: int64 [2], among what args point to."""
        job = np.frombuffer(between.job(*args), np.uint8)
        entries = self._address, len(self._table), between.address
        addresses = job.ctypes.data, state.ctypes.data
        _walk_on()(*entries, *addresses, tasks=1, chunk=1, threads=1)


@functools.cache
def _walk() -> Program:
    """A task is one entry of the table: its program shares itself out to threads."""
    return Program(_body, 1)


@functools.cache
def _walk_on() -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        table, n, address, job, state = args
        with code.repeat(lambda: code.load(state + 8, I64).equal(0)):
            _body(code, [table], code.integer(0), n)
            code.call_at(address, job, code.constant(I32, 1))

    return Program(body, 5)


def _body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    (table,) = args
    with code.loop(first, last) as i:
        entry = table + i * (8 * _ENTRY)
        address, job, threads = (code.load(entry + 8 * field, I64) for field in range(_ENTRY))
        code.call_at(address, job, threads.resize(I32))
