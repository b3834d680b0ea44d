"""Kernels for CPUs, compiled to machine code when they are first called, through LLVM.

A kernel is a Python function that writes its body in `Code`; `Program` compiles it for the
CPU it runs on and spreads its tasks over the threads that torch uses.
"""

from kernels.llvm.code import Code
from kernels.llvm.program import Program, kernel
from kernels.llvm.values import F32, F32X16, I8X16, Value, transposed, vector

__all__ = ["F32", "F32X16", "I8X16", "Code", "Program", "Value", "kernel", "transposed", "vector"]
