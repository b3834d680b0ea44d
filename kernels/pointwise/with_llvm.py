"""The operations on a CPU: every number read once, whatever the expression needs of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value, functions
from kernels.llvm.functions import run, start, vectors
from kernels.pointwise import naive


def _operation(name: str, n_operands: int, n_outputs: int = 1) -> Callable[..., Any]:
    """The expression of that name on rows. Its operands come before its constants and have the
    first one's shape or can be expanded to it; the last may have a single column."""
    n_more = n_operands - 1
    program = functools.cache(functools.partial(_program, name, n_operands, n_outputs))

    def apply(x: torch.Tensor, *rest: Any) -> Any:
        shape, single = x.shape, False
        d = shape[-1]
        operands = [x]
        for operand in rest[:n_more]:
            if operand.shape != shape:
                single = operand.shape[-1] == 1 < d
                operand = operand.expand(*shape[:-1], 1 if single else d)
            operands.append(operand)
        y = x.new_empty(*shape)
        chosen, n_rows = program(d, single, *rest[n_more:]), y.numel() // d
        if n_outputs == 1:
            run(chosen, n_rows, d, tuple(operands), y)
            return y
        z = x.new_empty(*shape)
        run(chosen, n_rows, d, tuple(operands), y, z)
        return y, z

    return apply


def _program(
    name: str, n_operands: int, n_outputs: int, d: int, single: bool, *constants: float
) -> Program:
    body = functools.partial(_body, name, n_operands, d, single, constants)
    return Program(body, 4 * n_operands + n_outputs)


def _body(
    name: str,
    n_operands: int,
    d: int,
    single: bool,
    constants: tuple[float, ...],
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Arguments: each operand in RowPlaces, then each output. single: the last operand has one
    number for a row."""
    expression: Callable[..., Any] = naive.in_terms_of(getattr(naive, name), _functions(code))
    n_vectors = n_operands - single
    with code.loop(first, last) as row:
        operands = [start(args[4 * i : 4 * i + 4], row) for i in range(n_operands)]
        outputs = [each + row * (4 * d) for each in args[4 * n_operands :]]
        factors = [code.splat(code.load(at, F32)) for at in operands[n_vectors:]]
        for at, count in vectors(code, d):
            values = [code.load_first(each + at, F32X16, count) for each in operands[:n_vectors]]
            results = expression(*values, *factors, *constants)
            for result, y in zip(
                results if isinstance(results, tuple) else (results,), outputs, strict=True
            ):
                code.store_first(result, y + at, count)


def _functions(code: Code) -> dict[str, Callable[..., Value]]:
    named = ("sigmoid", "silu", "tanh", "softplus")
    return {
        **{name: functools.partial(getattr(functions, name), code) for name in named},
        # in this order NaN stays NaN
        "larger": lambda least, x: code.larger(code.constant(F32X16, least), x),
        "smaller": lambda most, x: code.smaller(code.constant(F32X16, most), x),
    }


add = _operation("add", 2)
multiply = _operation("multiply", 2)
relu2 = _operation("relu2", 1)
swiglu = _operation("swiglu", 2)
clamped_swiglu = _operation("clamped_swiglu", 2)
situ = _operation("situ", 2)
geglu = _operation("geglu", 2)
output_gate = _operation("output_gate", 2)
open_low = _operation("open_low", 1)
delta_gates = _operation("delta_gates", 4, 2)
step_gates = _operation("step_gates", 3, 2)
