"""Golden models of every family on a CUDA device: the cells of tests/bench/gpu_table.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu_cells import CELLS, Row, models

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; fake tensors stand for one in test_rounds_on_cuda.py")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", models())
def test_on_cuda(name, cell):
    CELLS[cell](Row(name, "cuda"))
