"""Few rows of x and short weight rows: neighbouring weight rows together.

A sum waits for every product that it takes, and a short row is through before those of the next
one fill that time. Every sum has the order that it has in rows_with_llvm, so its bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.linear.block_linear.operands_with_llvm import PLAIN, Arithmetic, operands, sizes
from kernels.llvm import F32X16, Code, Value
from kernels.llvm.values import transposed
from kernels.processor import has_feature

GROUP = 4
"""Weight rows of a task."""

_LINE = 64
# bytes; of a matrix that comes from memory four rows at once are slower than one
_CACHED = 4 << 20
# of other types a block alone fills the registers
_TYPES = ("Q8_0", PLAIN)
# sums of 16 numbers that leave registers for what is added to them
_MOST_SUMS = {True: 16, False: 4}


def takes_groups(type: str, n_rows: int, how: Arithmetic, n_out: int, row_bytes: int) -> bool:
    """Whether weight rows come to whole groups, whose sums with so many rows of x stay in the
    registers, and may be in the processor's caches."""
    if type not in _TYPES or how.rounded or n_out % GROUP or n_out * row_bytes > _CACHED:
        return False
    return n_rows * GROUP <= _MOST_SUMS[has_feature("avx512f")]


def multiply_groups(
    type: str,
    n_rows: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """The body of a program whose tasks are groups. Rows of x are one stretch of rows_with_llvm, or
    less; the arguments are those of its programs."""
    blocks, row_bytes, x, n_in, y, n_out = args
    elements, n_bytes = sizes(type)
    zero = code.constant(F32X16, 0.0)
    with code.loop(first, last) as group:
        start = blocks + group * row_bytes * GROUP
        sums = [[code.variable(zero) for _ in range(GROUP)] for _ in range(n_rows)]
        with code.loop(0, n_in // elements) as b:
            rows = [x + (n_in * r + b * elements) * how.size for r in range(n_rows)]
            blocks_here = [start + b * n_bytes + row_bytes * w for w in range(GROUP)]
            for block in blocks_here:
                # the same place of the next group: the processor would not guess it
                for line in range(0, n_bytes, _LINE):
                    code.prefetch(block + row_bytes * GROUP + line)
            decoded = [operands(code, type, block, how) for block in blocks_here]
            for i, weights in enumerate(zip(*decoded, strict=True)):
                factors = [how.load(code, row + i * how.step * how.size) for row in rows]
                for w, weight in enumerate(weights):
                    for totals, factor in zip(sums, factors, strict=True):
                        totals[w].set(how.add(code, totals[w].value, weight, factor))
        for r, totals in enumerate(sums):
            results = _sums([total.value for total in totals])
            code.store(results, y + (n_out * r + group * GROUP) * 4)


def _sums(vectors: Sequence[Value]) -> Value:
    """The sum of each of GROUP vectors, in the order of `Code.sum`."""
    while (half := vectors[0].type.count // 2) >= GROUP:
        vectors = [x.part(0, half) + x.part(half, half) for x in vectors]
    a, b, c, d = transposed(vectors)
    # a stretch is added to 0, which leaves no negative one
    return ((a + c) + (b + d)) + 0.0
