"""What a kernel becomes on a processor that is not at hand."""

from __future__ import annotations

import llvmlite.binding as llvm

from kernels.llvm.program import Body, _module


def assembly(body: Body, n_args: int, features: str) -> str:
    """The instructions of a program for x86 with features in LLVM's words, such as "+avx2,+fma"."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="x86-64", features=features, opt=1)
    parsed = llvm.parse_assembly(str(_module(body, n_args, None)))
    parsed.triple = machine.triple
    return machine.emit_assembly(parsed)
