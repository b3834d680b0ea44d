"""Prints how far a golden model is from its logits, its matrices left in GGUF blocks.

Run as a program, since DRAFTSCOPE_KERNELS and TRITON_INTERPRET are read when kernels are imported:
the name of a model, the device, and the widths of the forward passes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from engine.batch import Span
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.loader import load_model

DATA = Path(__file__).parents[1] / "data"


def distance(name: str, device: torch.device, widths: list[int]) -> float:
    """The largest difference of a logit, over the first sum(widths) tokens."""
    with GgufFile.open(DATA / f"{name}.gguf") as file:
        model = load_model(file, compute="blocks", device=device)
    with np.load(DATA / f"{name}.npz") as arrays:
        tokens, expected = arrays["tokens"].tolist(), arrays["logits_deq"]
    memory = HybridMemory.for_model(
        model.config, 1, len(tokens), device, policy="ring", n_rs_seq=max(widths)
    )
    worst, pos = 0.0, 0
    for width in widths:
        span = Span(0, pos, tokens[pos : pos + width], range(width))
        (ubatch,) = memory.split([span], width, "equal")
        logits = model.forward(ubatch, memory).logits.cpu().numpy()
        worst = max(worst, float(np.abs(logits - expected[pos : pos + width]).max()))
        pos += width
    return worst


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        from engine.conform.interpreter_with_triton import mend

        mend()
    model_name, device_name, *widths_given = sys.argv[1:]
    worst_logit = distance(model_name, torch.device(device_name), [int(w) for w in widths_given])
    sys.stdout.write(f"{worst_logit}\n")
