"""Programs written in Code, against the same in Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.llvm import F32, F32X16, I8X16, Program, vector
from kernels.llvm.values import F16, I8, I32, I64


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("tasks", [0, 1, 7, 64])
def test_every_task_runs_once_with_the_arguments(threads, chunk, tasks):
    def body(code, args, first, last):
        counts, step = args
        with code.loop(first, last) as task:
            at = counts + task * 8
            code.store(code.load(at, I64) + task * step + 1, at)

    program = Program(body, 2)
    counts = torch.zeros(64, dtype=torch.int64)
    for _ in range(2):
        program(counts.data_ptr(), 5, tasks=tasks, chunk=chunk, threads=threads)
    expected = torch.where(torch.arange(64) < tasks, 2 * (torch.arange(64) * 5 + 1), 0)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_something_is_done_once_before_all_tasks(threads):
    def before(code, args):
        shared, _ = args
        code.store(code.load(shared, I64) + 7, shared)

    def body(code, args, first, last):
        shared, out = args
        with code.loop(first, last) as task:
            code.store(code.load(shared, I64) + task, out + task * 8)

    program = Program(body, 2, before)
    shared, out = torch.zeros(1, dtype=torch.int64), torch.zeros(20, dtype=torch.int64)
    for run in (1, 2):
        program(shared.data_ptr(), out.data_ptr(), tasks=20, chunk=3, threads=threads)
        assert out.tolist() == [7 * run + task for task in range(20)]


def test_loops_with_steps_and_variables():
    def body(code, args, first, last):
        (out,) = args
        with code.loop(first, last) as task:
            total = code.variable(code.integer(0))
            with code.loop(1, task, 3) as i, code.loop(0, i) as j:
                total.set(total.value + j)
            code.store(total.value, out + task * 8)

    out = torch.zeros(12, dtype=torch.int64)
    Program(body, 1)(out.data_ptr(), tasks=12, chunk=12, threads=1)
    assert out.tolist() == [sum(sum(range(i)) for i in range(1, n, 3)) for n in range(12)]


def test_vectors():
    def body(code, args, first, last):
        x, y, bytes_, half, out = args
        a, b = code.load(x, F32X16), code.load(y, F32X16)
        scale = code.splat(code.load(half, F16)).widen()
        results = [
            code.fma(a, b, scale),
            code.load(bytes_, I8X16).to_float(signed=True) / scale,
            (code.load(bytes_, I8X16) & 15).to_float(signed=False) - 8,
            a.part(8, 8).beside(b.part(0, 8)) * 2,
            a.spread(3, 16) + a.rounded_to_bf16(),
            code.splat(code.sum(a)),
        ]
        for i, result in enumerate(results):
            code.store(result, out + 64 * i)

    x, y = torch.randn(2, 16)
    integers = torch.arange(-120, 120, 15, dtype=torch.int8)
    half, out = torch.tensor([1.75], dtype=torch.float16), torch.full((6, 16), torch.nan)
    addresses = [t.data_ptr() for t in (x, y, integers, half, out)]
    Program(body, 5)(*addresses, tasks=1, chunk=1, threads=1)
    torch.testing.assert_close(out[0], x * y + 1.75)
    assert torch.equal(out[1], integers / 1.75)
    assert torch.equal(out[2], (integers.int() & 15).float() - 8)
    assert torch.equal(out[3], torch.cat((x[8:], y[:8])) * 2)
    assert torch.equal(out[4], x[3] + x.bfloat16().float())
    torch.testing.assert_close(out[5], x.sum().expand(16))


def test_choices():
    def body(code, args, first, last):
        x, y, out = args
        a, b = code.load(x, F32X16), code.load(y, F32X16)
        code.store(code.choose(a.less(b), a, b), out)
        code.store(code.choose(a.less(0.5), a, b), out + 64)
        with code.loop(first, last) as task, code.when((task - 2).less(0)):
            code.store(code.constant(F32, 1.0), out + 128 + task * 4)

    x, y = torch.randn(2, 16)
    x[3] = torch.nan
    out = torch.zeros(3, 16)
    Program(body, 3)(*(t.data_ptr() for t in (x, y, out)), tasks=5, chunk=5, threads=1)
    assert torch.equal(out[0], torch.where(x < y, x, y))
    assert torch.equal(out[1], torch.where(x < 0.5, x, y))
    assert out[2].tolist() == [1.0, 1.0] + [0.0] * 14


def test_rounding_to_bfloat16():
    def body(code, args, first, last):
        code.store(code.load(args[0], F32X16).rounded_to_bf16(), args[1])

    x = torch.randn(16)
    # ties to either side, the end of the range, and what is not a number
    x[:8] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, torch.inf, -torch.inf, 0, 1e-40]
    )
    x[8] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    y = torch.full((16,), torch.nan)
    Program(body, 2)(x.data_ptr(), y.data_ptr(), tasks=1, chunk=1, threads=1)
    assert y[8].isnan()
    y[8] = x[8] = 0
    assert torch.equal(y, x.bfloat16().float())


def test_every_call_has_its_own_stack():
    def body(code, args, first, last):
        mine, other = code.stack(12), code.stack(64)
        with code.loop(first, last) as task:
            code.store(task, mine)
            code.store(task + 100, other)
            code.store(code.load(mine, I64) + (mine % 64) + (other % 64), args[0] + task * 8)

    out = torch.zeros(50, dtype=torch.int64)
    Program(body, 1)(out.data_ptr(), tasks=50, chunk=7, threads=3)
    assert out.tolist() == list(range(50))


def test_unaligned_loads():
    def body(code, args, first, last):
        code.store(code.load(args[0] + 1, F32), args[1])

    data = np.zeros(9, np.uint8)
    data[1:5] = np.frombuffer(np.float32(3.25).tobytes(), np.uint8)
    out = torch.zeros(1)
    Program(body, 2)(data.ctypes.data, out.data_ptr(), tasks=1, chunk=1, threads=1)
    assert out.item() == 3.25


def test_conditions_and_integers_of_other_widths():
    def body(code, args, first, last):
        data, out = args
        with code.loop(first, last) as task:
            word = code.load(data + task, I8).resize(I64)
            left, n = code.variable(word), code.variable(code.integer(0))
            with code.repeat(lambda: code.integer(0).less(left.value)):
                left.set(left.value - 7)
                n.set(n.value + 1)
            with code.when(word.less(100)):
                code.store(code.larger(n.value, code.integer(3)).resize(I32), out + task * 4)

    data = torch.tensor([0, 1, 7, 8, 50, 99, 100, 255], dtype=torch.uint8)
    out = torch.full((8,), -1, dtype=torch.int32)
    Program(body, 2)(data.data_ptr(), out.data_ptr(), tasks=8, chunk=8, threads=1)
    assert out.tolist() == [3, 3, 3, 3, 8, 15, -1, -1]


def test_lanes_and_memory_of_the_function():
    def body(code, args, first, last):
        x, out = args
        a, b = code.load(x, F32X16), code.load(x + 64, F32X16)
        own = code.stack(64)
        code.store(a.take([5, 17], b).beside(b.take([0, 0])), own)
        code.store(code.choose(a.less(b), a, b), out + 64)
        code.store(code.load(own, vector(F32, 4)), out)

    x, out = torch.randn(2, 16), torch.full((2, 16), torch.nan)
    x[1, 3] = torch.nan
    Program(body, 2)(x.data_ptr(), out.data_ptr(), tasks=1, chunk=1, threads=1)
    expected = torch.stack((x[0, 5], x[1, 1], x[1, 0], x[1, 0]))
    assert torch.equal(out[0, :4], expected)
    assert out[1, 3].isnan()  # no comparison with NaN holds
    torch.testing.assert_close(out[1, 4:], torch.minimum(*x)[4:])


def test_arguments_keep_their_sign_and_all_their_bits():
    def body(code, args, first, last):
        for i, value in enumerate(args[1:]):
            code.store(value, args[0] + 8 * i)

    values = [-1, -(2**63), 2**63 - 1, 0x123456789ABCDEF]
    out = torch.zeros(4, dtype=torch.int64)
    Program(body, 5)(out.data_ptr(), *values, tasks=1, chunk=1, threads=1)
    assert out.tolist() == values
