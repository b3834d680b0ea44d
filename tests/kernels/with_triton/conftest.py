"""Where the Triton kernels run: on a CUDA device, or with TRITON_INTERPRET=1 on the processor.

The variable has to be set before Triton is imported and changes every kernel of the process, so
tests/kernels/test_triton_interpreter.py runs this folder once more in processes of their own.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob: list[str] = []
try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(
    params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def device(request: pytest.FixtureRequest) -> str:
    """The device whose tensors the kernels are given."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; the interpreter runs these tests")
    return str(request.param)
