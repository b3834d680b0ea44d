"""The audit of the drafts of a run that has ended, with rows of a pass over its text."""

from __future__ import annotations

from functools import cache

import torch

from engine.audit.draft_models import taps_of
from engine.audit.drafts import DraftAudit, audit_drafts
from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.layers import TargetRows, join_rows
from engine.options import RunOptions
from engine.run import Run
from engine.session import Session


def texts_of(run: Run) -> dict[int, list[int]]:
    return {r.seq_id: [*r.prompt_tokens, *r.tokens] for r in run.results()}


def rows_of(opened: Session, options: RunOptions, text: list[int]) -> TargetRows:
    """All rows of a text, decoded in one go."""
    model, taps = opened.model, taps_of(opened, options)
    memory = HybridMemory.for_model(model.config, 1, len(text), model.device)
    parts = [
        model.forward(ubatch, memory, taps=taps).rows
        for ubatch in memory.split([Span(0, 0, text, [])], 512, "equal")
    ]
    return join_rows([part[0] for part in parts])


def audited(opened: Session, run: Run, options: RunOptions) -> list[DraftAudit]:
    texts = texts_of(run)
    with torch.inference_mode():
        rows = cache(lambda seq: rows_of(opened, options, texts[seq]))
        return list(audit_drafts(opened, options, run.run_id, run.trace, texts, rows))
