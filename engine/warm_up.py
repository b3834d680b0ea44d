"""Forward passes ahead of the first run, so that no timing contains the compiling of kernels.

Kernels are compiled when they are first called, some for every number of rows. For a model whose
passes take a few hundredths of a second that would be seen in the first rounds of a process.
"""

from __future__ import annotations

import torch

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel

WIDTHS = (16, 1, 2, 3, 4)
"""A prompt, and what plain decoding and drafts of up to three tokens take."""

_N_RS_SEQ = max(WIDTHS[1:]) - 1


@torch.inference_mode()
def warm_up(model: HybridModel) -> None:
    """Decode each of WIDTHS once, with the model and its MTP head, in memory of their own."""
    config, n_ctx = model.config, sum(WIDTHS)
    memory = HybridMemory.for_model(
        config, 1, n_ctx, model.device, policy="planes", n_rs_seq=_N_RS_SEQ
    )
    of_head = HybridMemory.for_head(config, 1, n_ctx, model.device) if model.head else None
    start = 0
    for width in WIDTHS:
        (ubatch,) = memory.split([Span(0, start, [0] * width, range(width))], width, "seq")
        hidden = model.forward(ubatch, memory).hidden
        if model.head and of_head:
            model.head.forward(ubatch, hidden, of_head)
        start += width
