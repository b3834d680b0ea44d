"""Launches that are noted, and run from a table."""

from __future__ import annotations

import threading

import torch

from kernels.llvm import Program
from kernels.llvm import program as programs
from kernels.llvm.program import KernelClock, Launch, LaunchTable, watched
from kernels.llvm.values import I64


def times_and_plus() -> Program:
    def body(code, args, first, last):
        numbers, factor, summand = args
        with code.loop(first, last) as task:
            at = numbers + task * 8
            code.store(code.load(at, I64) * factor + summand, at)

    return Program(body, 3)


def noted(program: Program, x: torch.Tensor) -> list[Launch]:
    launches: list[Launch] = []
    with watched(launches.append):
        program(x.data_ptr(), 3, 1, tasks=8, chunk=2, threads=2)
        program.alone(4, x.data_ptr(), 10, 0)
        program(x.data_ptr(), 1, -7, tasks=8, chunk=8, threads=2)
    return launches


def test_what_is_noted_is_not_run_and_the_table_runs_it_in_order():
    x = torch.arange(8)
    launches = noted(times_and_plus(), x)
    assert torch.equal(x, torch.arange(8))
    assert [launch.threads for launch in launches] == [2, 1, 1]
    table = LaunchTable(launches)
    assert len(table) == 3
    del launches
    expected = torch.arange(8)
    for _ in range(3):
        table()
        expected = expected * 3 + 1
        expected[:4] *= 10
        expected -= 7
        assert torch.equal(x, expected)


def test_no_launch_at_all():
    LaunchTable([])()


def test_other_threads_go_on_computing():
    program, x, launches = times_and_plus(), torch.ones(1, dtype=torch.int64), []

    def run() -> None:
        program.alone(1, x.data_ptr(), 5, 0)

    with watched(launches.append):
        other = threading.Thread(target=run)
        other.start()
        other.join()
    assert (x.item(), launches) == (5, [])
    run()
    assert x.item() == 25


def test_a_clock_counts_kernels_and_nothing_between_them(monkeypatch):
    program, x, clock = times_and_plus(), torch.ones(4, dtype=torch.int64), KernelClock()
    ticks = iter(range(100))
    monkeypatch.setattr(programs, "perf_counter", lambda: next(ticks))
    with clock.running():
        program(x.data_ptr(), 6, 0, tasks=4, chunk=4, threads=1)
        programs.perf_counter()
        program.alone(4, x.data_ptr(), 2, 1)
    program.alone(4, x.data_ptr(), 1, 0)
    assert clock.seconds == 2
    assert x.tolist() == [13] * 4
