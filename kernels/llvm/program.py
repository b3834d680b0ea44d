"""A kernel compiled for this processor, its tasks taken in turn by torch's own threads."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from kernels.llvm.code import I32, I64, Code, Value

Body = Callable[[Code, Sequence[Value], Value, Value], None]
"""Writes the tasks first .. last - 1: (code, arguments as integers, first, last)."""

_VOID, _POINTER = ir.VoidType(), ir.PointerType()
# in front of the arguments: the next task, the number of tasks, how many are taken at a time
_HEADER = 3


class Program:
    """A kernel of n_args arguments, integers of 64 bits or addresses."""

    def __init__(self, body: Body, n_args: int) -> None:
        self._engine = _compile(_module(body, n_args))
        address = self._engine.get_function_address("run")
        # all in one block of memory: ctypes takes its time over every argument
        self._pack = struct.Struct(f"{_HEADER + n_args + 1}q").pack
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)

    def __call__(self, *args: int, tasks: int, chunk: int, threads: int) -> None:
        """Runs `tasks` tasks, `chunk` at a time, on up to so many threads.

        Addresses have to stay valid until the call returns. Tasks run in any order.
        """
        threads = threads if tasks > chunk and _has_threads() else 1
        self._run(self._pack(0, tasks, chunk, *args, threads))


def _module(body: Body, n_args: int) -> ir.Module:
    module = ir.Module("kernel")
    share = _share(module, body, n_args)
    worker = _worker(module, share, n_args)
    _entry(module, worker, n_args)
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


def _entry(module: ir.Module, worker: ir.Function, n_args: int) -> None:
    """void run(packed): header, arguments and the number of threads"""
    function = ir.Function(module, ir.FunctionType(_VOID, [_POINTER]), "run")
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    def field(of: ir.Value, index: int) -> ir.Value:
        return builder.gep(of, [ir.Constant(I64, index)], source_etype=I64)

    packed, n_fields = function.args[0], _HEADER + n_args
    # the caller's memory must not change
    fields = builder.bitcast(builder.alloca(I64, size=n_fields), _POINTER)
    for index in range(n_fields):
        builder.store(builder.load(field(packed, index), typ=I64), field(fields, index))
    threads = builder.trunc(builder.load(field(packed, n_fields), typ=I64), I32)
    if _has_threads():
        signature = ir.FunctionType(_VOID, [_POINTER, _POINTER, I32, I32])
        parallel = ir.Function(module, signature, "GOMP_parallel")
        with builder.if_else(builder.icmp_signed(">", threads, ir.Constant(I32, 1))) as (many, one):
            with many:
                builder.call(parallel, [worker, fields, threads, ir.Constant(I32, 0)])
            with one:
                builder.call(worker, [fields])
    else:
        builder.call(worker, [fields])
    builder.ret_void()


def _compile(module: ir.Module) -> llvm.ExecutionEngine:
    machine = _machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = machine.triple
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # kernels are written in vectors and unrolled as they should be
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


def _machine() -> llvm.TargetMachine:
    # one for every program: an execution engine owns the machine it is made with
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )


@functools.cache
def has_feature(name: str) -> bool:
    """Whether this processor has the instructions that LLVM calls `name`."""
    return bool(llvm.get_host_cpu_features().get(name, False))


@functools.cache
def _has_threads() -> bool:
    """Whether torch brings GNU's OpenMP: its threads then wait already, warm, for the next job."""
    for library in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        llvm.load_library_permanently(str(library))
        return True
    return False
