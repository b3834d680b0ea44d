"""Forward passes ahead of the first run, so that its first rounds do not wait for kernels.

Kernels are compiled, or read from disk, when they are first called, some for every number of rows;
the clock of a run is meanwhile (engine.machine.clock), but its reader waits. What the passes
compute is not wanted: on the processor no kernel is started.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.eagle3 import Eagle3
from engine.model.drafters.loading import LoadedDrafter
from engine.model.hybrid import HybridModel
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import SwigluPart
from engine.model.parts.recurrent import DeltaNetPart
from kernels.dispatch import uses_llvm
from kernels.llvm.program import Launch, watched

WIDTHS = (16, 1, 2, 3, 4)
"""A prompt, and what plain decoding and drafts of up to three tokens take."""

_N_RS_SEQ = max(WIDTHS[1:]) - 1

# parts that do the same whatever the numbers are: not so, where experts are chosen
_STEADY = (AttentionPart, DeltaNetPart, SwigluPart)


def warm_up(model: HybridModel, *, is_plain: bool = False) -> None:
    """Decode each of WIDTHS once, with the model and its MTP head, in memory of their own.

    is_plain: nothing is drafted, so one token at a time is enough, without the head."""
    blocks = model.config.all_blocks
    parts = [part for block in blocks for part in (*block.mixers, block.ffn) if part is not None]
    steady = all(isinstance(part, _STEADY) for part in parts)
    with watched(_ignore) if steady and uses_llvm() else nullcontext():
        _decode(model, is_plain)


def warm_up_drafter(drafter: LoadedDrafter) -> None:
    """Draft once for each of WIDTHS, with a drafter that reads the target's rows."""
    if isinstance(drafter.model, Eagle3):
        with watched(_ignore) if uses_llvm() else nullcontext():
            _decode_eagle3(drafter.model)


def _ignore(launch: Launch) -> None:
    """The kernel is in memory; it is not started."""


@torch.inference_mode()
def _decode(model: HybridModel, is_plain: bool = False) -> None:
    config, n_ctx = model.config, sum(WIDTHS)
    memory = HybridMemory.for_model(
        config, 1, n_ctx, model.device, policy="planes", n_rs_seq=_N_RS_SEQ
    )
    has_head = model.head and not is_plain
    of_head = HybridMemory.for_head(config, 1, n_ctx, model.device) if has_head else None
    start = 0
    for width in WIDTHS[:2] if is_plain else WIDTHS:
        (ubatch,) = memory.split([Span(0, start, [0] * width, range(width))], width, "seq")
        hidden = model.forward(ubatch, memory).hidden
        if model.head and of_head:
            model.head.forward(ubatch, hidden, of_head)
        start += width


@torch.inference_mode()
def _decode_eagle3(model: Eagle3) -> None:
    config, start = model.config, 0
    memory = HybridMemory.for_layers(config.cells(), 1, sum(WIDTHS), model.device)
    for width in WIDTHS:
        (ubatch,) = memory.split([Span(0, start, [0] * width, [width - 1])], width, "seq")
        rows = torch.zeros(1, width, len(config.taps) * config.n_target, device=model.device)
        model.forward(ubatch, model.fused(rows), memory)
        start += width
