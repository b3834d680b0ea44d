"""Dequantisation on a processor, for the types whose blocks products are formed with."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.dequant.decode_with_llvm import DECODERS, LANES, decode, sizes
from kernels.llvm import Code, Program, Value

# blocks worth a thread's while
CHUNK = 128


def fill(type: str, blocks: Tensor, out: Tensor) -> None:
    """blocks uint8 [n, bytes per block] -> out f32 [n, elements per block], both contiguous."""
    n_blocks = len(blocks)
    _program(type)(
        blocks.data_ptr(),
        out.data_ptr(),
        tasks=n_blocks,
        chunk=CHUNK,
        threads=torch.get_num_threads(),
    )


def has(type: str) -> bool:
    """Whether there is a decoder for this type."""
    return type in DECODERS


@functools.cache
def _program(type: str) -> Program:
    return Program(functools.partial(_body, type), 2)


def _body(type: str, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    blocks, out = args
    elements, n_bytes = sizes(type)
    with code.loop(first, last) as b:
        for i, weights in enumerate(decode(code, type, blocks + b * n_bytes)):
            code.store(weights, out + b * (4 * elements) + 4 * LANES * i)
