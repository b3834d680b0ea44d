"""torch is imported without what is not used of it, and lacks nothing for whoever asks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import kernels
assert "torch" not in sys.modules
import kernels.dispatch, torch
assert "torch._decomp" not in sys.modules and "torch._meta_registrations" not in sys.modules
x = torch.empty(3, 4, device="meta")
assert (x @ x.t()).shape == (3, 3)
import torch._meta_registrations as real
assert "torch._decomp" in sys.modules and torch._meta_registrations is real
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    rows = torch.empty(3, dtype=torch.int64)
    y = torch.nn.functional.gelu(torch.empty(2, 5)).index_select(0, rows)
assert y.shape == (3, 5)
"""


def test_the_part_is_left_out_until_it_is_asked_for() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=100)


def test_torch_that_is_there_already_stays_whole() -> None:
    script = "import torch, kernels.dispatch; assert torch._meta_registrations.meta_index_Tensor"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
