"""Launches of programs that were noted once, started again by one call of a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kernels.llvm.code import Code
from kernels.llvm.program import Launch, Program
from kernels.llvm.values import I32, I64, Value

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

    def run(self) -> None:
        """All launches, one after the other."""
        n = len(self._table)
        self._walk(self._address, tasks=n, chunk=n, threads=1)


@functools.cache
def _walk() -> Program:
    """A task is one entry of the table: its program shares itself out to threads."""
    return Program(_body, 1)


def _body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    (table,) = args
    with code.loop(first, last) as i:
        entry = table + i * (8 * _ENTRY)
        address, job, threads = (code.load(entry + 8 * field, I64) for field in range(_ENTRY))
        code.call_at(address, job, threads.resize(I32))
