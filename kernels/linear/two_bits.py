"""Rows of numbers rounded to two bits, as blocks of the GGML type Q2_K."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import run
from kernels.llvm.values import F16, I8, I32


@operation(llvm=__name__)
def two_bits(rows: Tensor) -> Tensor:
    """Blocks of Q2_K with numbers near those of `rows`: every 16 are cut into three equal steps
    from their least number, or 0, to their largest one.

    rows: f32 [n, in] of finite numbers, in a multiple of BLOCK. Returns uint8
    [n, in / 256 * 84]. Of numbers from a
    normal distribution about 12 % of the variance are lost.
    """
    groups = rows.unflatten(-1, (-1, BLOCK // GROUP, GROUP))
    least = groups.amin(-1).clamp_max(0).abs_()
    steps = (groups.amax(-1) + least).div_(MOST)
    step_scale, steps = _scaled(steps)
    least_scale, leasts = _scaled(least)
    # what the rounded steps and minimums say, so that the integers make up for them
    step = (steps * step_scale.unsqueeze(-1)).clamp_min_(torch.finfo(rows.dtype).tiny)
    least = leasts * least_scale.unsqueeze(-1)
    levels = ((groups + least.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, MOST)
    fours = levels.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    shifts = torch.tensor([1, 4, 16, 64], dtype=torch.uint8).view(4, 1)
    integers = (fours * shifts).sum(-2, dtype=torch.uint8).flatten(-2)
    scales = (steps + leasts * (MOST_SCALE + 1)).to(torch.uint8)
    halves = torch.stack((step_scale, least_scale), -1).half().view(torch.uint8)
    return torch.cat((scales, integers, halves), -1).flatten(-2)


BLOCK, GROUP = 256, 16
BLOCK_BYTES = 84
MOST, MOST_SCALE = 3, 15
"""The largest integer of a number, and that of the scale of a group."""


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., groups], not negative, as a scale that float16 holds, [...], and integers 0..15."""
    scale = (x.amax(-1) / MOST_SCALE).half().float()
    integers = x / scale.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1)
    return scale, integers.round_().clamp_(0, MOST_SCALE)


# Rows rounded to two bits on a CPU, a block after the other.
_TINY = torch.finfo(torch.float32).tiny
_WHOLE = 3 * 2.0**22
"""A number this large has no digits after the point: adding it rounds, ties to even."""
_GROUPS = range(BLOCK // GROUP)


def two_bits_with_llvm(rows: Tensor) -> Tensor:
    width = rows.shape[-1] // BLOCK * BLOCK_BYTES
    found = rows.new_empty((*rows.shape[:-1], width), dtype=torch.uint8)
    run(_program(), rows.numel() // BLOCK, BLOCK, rows, found)
    return found


@kernel(2)
def _program(code: Code, args: Sequence[Value], block: Value) -> None:
    """Arguments: numbers, blocks."""
    x, out = args[0] + block * (4 * BLOCK), args[1] + block * BLOCK_BYTES
    zero = code.constant(F32, 0.0)
    numbers = [code.load(x + 4 * GROUP * i, F32X16) for i in _GROUPS]
    largest = [code.maximum(group) for group in numbers]
    minus = code.constant(F32X16, -1.0)
    least = [code.larger(code.maximum(group * minus), zero) for group in numbers]
    steps = [(a + b) / float(MOST) for a, b in zip(largest, least, strict=True)]
    step_scale, step_integers = _scaled_llvm(code, steps)
    least_scale, least_integers = _scaled_llvm(code, least)
    for i in _GROUPS:
        both = step_integers[i] + least_integers[i] * float(MOST_SCALE + 1)
        code.store(both.to_integer(I32).resize(I8), out + i)
    levels = []
    for i in _GROUPS:
        step = code.larger(step_integers[i] * step_scale, code.constant(F32, _TINY))
        low = code.splat(least_integers[i] * least_scale)
        level = _rounded(code, (numbers[i] + low) / code.splat(step), MOST)
        levels.append(level.to_integer(I32).resize(I8))
    for half in range(2):
        for part in range(2):
            fours = [levels[8 * half + 2 * i + part] << 2 * i for i in range(4)]
            at = out + len(_GROUPS) + 2 * GROUP * half + GROUP * part
            code.store(fours[0] | fours[1] | fours[2] | fours[3], at)
    behind = out + len(_GROUPS) + BLOCK // 4
    for i, scale in enumerate((step_scale, least_scale)):
        code.store(scale.narrow(F16), behind + 2 * i)


def _scaled_llvm(code: Code, numbers: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Numbers that are not negative as a scale that f16 holds and integers 0..15, all f32."""
    most = numbers[0]
    for number in numbers[1:]:
        most = code.larger(number, most)
    scale = (most / float(MOST_SCALE)).rounded_to_f16()
    divisor = code.larger(scale, code.constant(F32, _TINY))
    return scale, [_rounded(code, number / divisor, MOST_SCALE) for number in numbers]


def _rounded(code: Code, x: Value, most: int) -> Value:
    """x, not much below 0, as a whole number 0..most, ties to even."""
    kept = code.smaller(x, code.constant(x.type, float(most)))
    kept = code.larger(kept, code.constant(x.type, 0.0))
    return kept + _WHOLE - _WHOLE
