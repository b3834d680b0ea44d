"""Compiles what a Triton version would launch, for a GPU that need not be there, one of them in
turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code: registers per thread, bytes of shared and of spilled memory."""

    name: str
    ptx: str
    n_bytes: int
    n_registers: int
    n_spilled: int
    n_shared: int


class _AbsentGpu:
    """The part of Triton's driver that compiling asks."""

    _numbers = itertools.count(1000)

    def __init__(self, capability: int) -> None:
        self.capability = capability
        # kernels are kept per device: a new one has none
        self.number = next(self._numbers)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(
    capability: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[list[Compiled]]:
    """Inside, launches compile for sm_`capability` and do nothing; the list says what came out,
    once for each kernel and specialisation.

    The arguments may be tensors on the processor. Output that the launches print is consumed.
    """
    compiled: list[Compiled] = []
    seen: list[Any] = []
    run: Callable[..., Any] = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        capsys.readouterr()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel in seen:
            return kernel
        seen.append(kernel)
        log = capsys.readouterr().out
        spilled = re.findall(r"(\d+) bytes spill stores", log)
        registers = re.findall(r"Used (\d+) registers", log)
        assert spilled and registers, f"no resource usage in the assembler's log: {log}"
        name, ptx, shared = kernel.metadata.name, kernel.asm["ptx"], kernel.metadata.shared
        numbers = len(kernel.asm["cubin"]), int(registers[0]), int(spilled[0])
        compiled.append(Compiled(name, ptx, *numbers, shared))
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(triton.knobs.compilation, "always_compile", True)
        before = driver._active
        driver.set_active(_AbsentGpu(capability))
        try:
            yield compiled
        finally:
            driver._active = before


# by GPU, the shared memory that a block can have at most, in bytes; from the CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability"
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


_gpus = itertools.cycle(SHARED)


def in_turn(name: str, values: Sequence[object]) -> pytest.MarkDecorator:
    """Each value of a parameter for the next of the GPUs, over all tests: a kernel takes seconds
    to compile."""
    cases = [(next(_gpus), value) for value in values]
    return pytest.mark.parametrize(("compiled", name), cases, indirect=["compiled"])
