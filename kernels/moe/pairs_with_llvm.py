"""Products of few rows with the experts that each has chosen, as one program.

It reads from memory which experts those are, so that one call does for any choice. A task is some
rows of one expert's matrix with one row of x; tasks go through all (row, expert) pairs before the
next rows of the matrices, so that rows that share an expert find its weights in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.integer_blocks import rows_with_llvm as one_matrix
from kernels.integer_blocks.activations_with_llvm import quantise
from kernels.llvm import Code, Program, Value
from kernels.llvm.values import I64
from kernels.moe.places import ExpertPlaces

# weight rows of a task
CHUNK = 64


def multiply_pairs(x: torch.Tensor, ids: torch.Tensor, places: ExpertPlaces) -> torch.Tensor:
    """Row i of x with the matrix of each expert in row i of ids.

    x: f32 [n, in]; ids: int64 [n, k], contiguous. Returns f32 [n, k, out].
    """
    n_rows, n_used = ids.shape
    vnni = one_matrix.has_vnni()
    rows = quantise(x, one_matrix.layout_for(places.type, vnni=vnni))
    y = torch.empty(n_rows, n_used, places.n_parts * places.n_rows)
    n_chunks = -(-places.n_rows // CHUNK)
    _program(places.type, vnni=vnni)(
        rows.data_ptr(),
        rows.shape[1],
        ids.data_ptr(),
        n_rows * n_used,
        n_used,
        y.data_ptr(),
        y.shape[2],
        places.addresses.data_ptr(),
        places.addresses.shape[1],
        places.n_rows,
        places.row_bytes,
        tasks=places.n_parts * n_chunks * n_rows * n_used,
        chunk=1,
        threads=torch.get_num_threads(),
    )
    return y


@functools.cache
def _program(type: str, *, vnni: bool) -> Program:
    return Program(functools.partial(_body, type, vnni), 11)


def _body(
    type: str, vnni: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: rows as quantised and their bytes; ids, how many there are, and of a row; y and
    its columns; addresses and how many experts; rows of a part and their bytes."""
    x, x_bytes, ids, n_pairs, n_used, y, n_out, addresses, n_experts, n_rows, row_bytes = args
    n_chunks = (n_rows + (CHUNK - 1)) // CHUNK
    with code.loop(first, last) as task:
        pair, chunk = task % n_pairs, task // n_pairs
        part, begin = chunk // n_chunks, chunk % n_chunks * CHUNK
        expert = code.load(ids + pair * 8, I64)
        weights = code.load(addresses + (part * n_experts + expert) * 8, I64)
        source = x + pair // n_used * x_bytes
        target = y + (pair * n_out + part * n_rows) * 4
        end = code.smaller(begin + CHUNK, n_rows)
        matrix = weights, row_bytes, source, target, n_out
        one_matrix.write(type, 1, vnni, code, matrix, begin, end)
