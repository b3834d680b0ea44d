"""Which rows of a table the n-grams that end at a token are hashed to (qwen4exp). No torch."""

from __future__ import annotations

import numpy as np

from engine.model.parts.ngram_embedding import NgramEmbeddingPart


def ngram_rows(context: np.ndarray, part: NgramEmbeddingPart) -> np.ndarray:
    """context: int64 [..., n_gram], each token and those before it, newest first, negative where
    there is none. Returns row numbers int64 [..., heads], shorter n-grams first.

    What stands behind the end of a text, or before its beginning, counts as that end. Products are
    of 64 bits without sign and wrap around.
    """
    cut = (context < 0) | (context == part.end_id)
    cut[..., 0] = False  # a token that is the end itself still follows what came before it
    tokens = np.where(np.logical_or.accumulate(cut, -1), part.end_id, context).astype(np.uint64)
    mixed = np.bitwise_xor.accumulate(tokens * np.array(part.multipliers, np.uint64), -1)
    heads = len(part.sizes) // (part.n_gram - 1)
    by_head = np.repeat(mixed[..., 1:], heads, -1)
    rows = by_head % np.array(part.sizes, np.uint64) + np.array(part.offsets, np.uint64)
    return rows.astype(np.int64)
