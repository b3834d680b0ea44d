"""Golden models with more tokens than they were made with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import gguf
import numpy as np

from engine.session import Session
from tests.support.golden_runs import DATA, golden
from tests.support.rewrite_gguf import Tensors, rewrite

N_VOCAB = 384


@cache
def widened(name: str, n_more: int) -> Path:
    """A golden model with n_more tokens after its own.

    Each is a louder twin of one that the model likes to say, so it is said instead of that one.
    """
    source = DATA / f"{name}.gguf"
    if not n_more:
        return source
    liked = np.argsort(-golden(name)["logits"].mean(0))
    twins = np.resize(liked[::2], n_more)

    def add_rows(tensors: Tensors) -> None:
        for table in ("token_embd.weight", "output.weight"):
            if table in tensors:
                more = 1.1 * tensors[table][twins]
                tensors[table] = np.concatenate([tensors[table], more.astype(np.float32)])

    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    keys = {
        "tokenizer.ggml.tokens": [*tokens, *(f"<twin_{i}>" for i in range(n_more))],
        "tokenizer.ggml.token_type": [*types, *[1] * n_more],
    }
    target = Path(mkdtemp(prefix="widened-")) / f"{name}-{n_more}.gguf"
    return rewrite(source, target, keys, add_rows)


@cache
def pair(name: str, target_more: int, draft_more: int) -> Session:
    """A model with itself as draft model, each with this many tokens more than the golden one."""
    target, draft = (widened(name, n) for n in (target_more, draft_more))
    return Session.open(target, draft, compute="f32")
