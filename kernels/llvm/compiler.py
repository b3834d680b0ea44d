"""The compiler: from a kernel's LLVM module to object code for this CPU, and into memory."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from kernels import processor


def compiled(module: ir.Module) -> bytes:
    """Object code for the processor of kernels.processor.target."""
    machine = _machine()
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


def loaded(code: bytes, *, has_threads: bool = True) -> llvm.ExecutionEngine:
    """An engine that holds object code, its functions ready to be called. has_threads: whether
    they call torch's, which is loaded for that."""
    machine = _machine()
    if has_threads:
        from kernels.dispatch import gnu_openmp

        # its threads are waiting already, warm, for the next job
        llvm.load_library_permanently(str(gnu_openmp()))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine() -> llvm.TargetMachine:
    # one for every use: an execution engine owns the machine it is made with
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = processor.target()
    flags = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=flags, opt=3, jit=True)
