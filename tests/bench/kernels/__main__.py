"""python -m tests.bench.kernels: every kernel's time next to the device's copy and matrix rates."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from kernels.dispatch import VARIABLE
from kernels.processor import processor_name
from tests.bench.kernels.cases import all_cases
from tests.bench.kernels.measure import copy_rate, matrix_rate
from tests.bench.kernels.report import Limits, measure, table
from tests.bench.kernels.sizes import Sizes


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Measures and prints. Exit status: 0 done, 2 (from argparse) wrong usage."""
    sizes = sizes or Sizes()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAME", action="append", help="this kernel (repeatable)")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls, of which the median")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    device = torch.device(options.device)
    cases = all_cases(sizes, device)
    names = options.only or list(cases)
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"--only {unknown[0]}: on {device} there are {', '.join(cases)}")

    with torch.inference_mode():
        evict = torch.empty(sizes.evicted_bytes(device.type) // 4, device=device)
        limits = _limits(sizes, evict, options.repeats)
        rows = [
            measure(case, limits, evict, options.repeats)
            for name in names
            for case in cases[name]()
        ]
    facts = {
        "device": _device_name(device),
        "kernels": os.environ.get(VARIABLE) or "auto",
        "threads": torch.get_num_threads(),
        **asdict(limits),
    }
    if options.json:
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    rates = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in limits.operations_per_second.items())
    print(f"{facts['device']}, kernels {facts['kernels']}, {facts['threads']} threads")
    print(f"copy {limits.bytes_per_second / 1e9:.1f} GB/s, products in GFLOP/s: {rates}\n")
    print(table(rows))
    return 0


def _limits(sizes: Sizes, evict: torch.Tensor, repeats: int) -> Limits:
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    rates = {
        name: matrix_rate(evict, sizes.matrix_side, dtype, repeats)
        for name, dtype in dtypes.items()
    }
    return Limits(copy_rate(evict, sizes.copied_bytes, repeats), rates)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


if __name__ == "__main__":
    sys.exit(main())
