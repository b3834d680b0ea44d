"""Linking object files: what LLVM's own linker computes, and what is left to it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
from llvmlite import ir

from kernels.llvm import object_cache
from kernels.llvm.object_cache import LinkedCode

F64, POINTER = ir.DoubleType(), ir.PointerType()
AS_F64 = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
HERE = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not HERE, reason="object files of x86-64 Linux are linked")


def module(writes: bool = False) -> ir.Module:
    """half(x) = cos(x) * 0.3, of a function and a number outside of it; `total` counts calls."""
    made = ir.Module("made")
    function = ir.Function(made, ir.FunctionType(F64, [F64]), "half")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    cos = ir.Function(made, ir.FunctionType(F64, [F64]), "cos")
    result = builder.fmul(builder.call(cos, function.args), F64(0.3))
    if writes:
        total = ir.GlobalVariable(made, F64, "total")
        total.initializer = F64(0.5)
        result = builder.fadd(builder.load(total, typ=F64), result)
        builder.store(result, total)
    builder.ret(result)
    return made


def test_functions_and_constants_are_linked_as_llvm_does():
    code = object_cache.compiled(module())
    ours, theirs = LinkedCode(code, None), object_cache._linked_by_llvm(code, None)
    half, other = (AS_F64(one.get_function_address("half")) for one in (ours, theirs))
    for x in (0.0, 1.0, -2.5):
        assert half(x) == other(x) != 0


def test_what_has_data_to_write_to_is_left_to_llvm():
    code = object_cache.compiled(module(writes=True))
    with pytest.raises(ValueError, match="written"):
        LinkedCode(code, None)
    engine = object_cache.loaded(code, has_threads=False)
    half = AS_F64(engine.get_function_address("half"))
    assert (half(0.0), half(0.0)) == (0.8, 1.1)


def test_a_function_that_is_nowhere_is_an_error():
    made = module()
    made.get_global("cos").name = "no_such_function"
    with pytest.raises(ValueError, match="no_such_function"):
        LinkedCode(object_cache.compiled(made), None)


def test_other_systems_are_left_to_llvm():
    code = object_cache.compiled(module())
    with pytest.raises(ValueError, match="another system"):
        LinkedCode(code[:18] + b"\xb7" + code[19:], None)  # AArch64


def test_llvm_is_not_loaded_where_kernels_are_kept(tmp_path):
    script = """
import sys, torch
from kernels import norm
x = norm.rms_norm(torch.ones(2, 64), torch.ones(64), 1e-5)
print("llvmlite.binding" in sys.modules)
"""
    environment = {"DRAFTSCOPE_KERNEL_CACHE": str(tmp_path), "DRAFTSCOPE_KERNELS": "llvm"}
    loaded = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert loaded == ["True\n", "False\n"]
