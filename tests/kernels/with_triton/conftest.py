"""Where the Triton kernels run: on a CUDA device, or with TRITON_INTERPRET=1 on the processor.

The variable has to be set before Triton is imported and changes every kernel of the process, so
tests/kernels/test_triton_interpreter.py runs this folder once more in processes of their own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob: list[str] = []
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob.append("test_*.py")
else:
    if INTERPRETED:
        from engine.conform.interpreter_with_triton import mend

        mend()


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles whose rows have the same bits wherever they stand, as a GPU's have.

    The interpreter leaves them to a library that sums in another order at the edges of a matrix,
    on some processors.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            column, row = a.data[..., :, k, None], b.data[..., None, k, :]
            total += column.astype(total.dtype) * row.astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each four columns of a product, not for each one: the interpreter pays for
    programs."""
    if INTERPRETED:
        from kernels.linear.integer_blocks import with_triton
        from kernels.moe import blocks_with_triton

        for module in (with_triton, blocks_with_triton):
            monkeypatch.setattr(module, "columns_of", lambda *_: 4)


@pytest.fixture(
    params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def device(request: pytest.FixtureRequest) -> str:
    """The device whose tensors the kernels are given."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; the interpreter runs these tests")
    return str(request.param)
