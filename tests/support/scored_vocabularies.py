"""A small vocabulary with scores, drawn from a seed, and texts to cut with it."""

from __future__ import annotations

import random
from typing import Any

from engine.gguf.scored_pieces import BYTE_TOKENS

_LATIN = "the and of model state tokens undo draft running speculative recurrent"
_WORDS = f"{_LATIN} 日本語 日本 語学 é ñandú"
_ODD = [
    "\ufeff",
    "\n",
    "\t",
    "  ",
    "🙂",
    "é",
    "ß",
    "\u0000",
    "▁",
    "<s>",
    "<|a|>",
    "ab<|a|>",
    "日本語学",
]


def keys(model: str, seed: int = 1) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a file."""
    rng = random.Random(seed)
    words = _WORDS.split()
    space = "\u2581" if model == "llama" else " "
    pieces = {w[i:j] for w in words for i in range(len(w)) for j in range(i + 1, len(w) + 1)}
    chosen = [piece for piece in sorted(pieces) if len(piece) == 1 or rng.random() < 0.5]
    chosen += [space, 2 * space, *(space + piece for piece in chosen if rng.random() < 0.4)]
    rng.shuffle(chosen)
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *chosen, "<|a|>", "undo!", "[PAD1]", "[PAD2]"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(chosen), 3, 4, 5, 5]
    # few values, so that there are ties
    scores = [-1000.0 if text[0] == "[" else -rng.randrange(40) / 4 for text in tokens]
    found = {"model": model, "tokens": tokens, "scores": scores, "token_type": types}
    found |= {"bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": model == "llama"}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def texts(n: int, seed: int = 2) -> list[str]:
    """Words, parts of them, odd characters, with spaces or without."""
    rng = random.Random(seed)
    words = _WORDS.split()

    def part() -> str:
        word = rng.choice(words)
        return rng.choice(
            [word, " " + word, word[: rng.randrange(len(word) + 1)], rng.choice(_ODD)]
        )

    return ["".join(part() for _ in range(rng.randrange(1, 12))) for _ in range(n)]
