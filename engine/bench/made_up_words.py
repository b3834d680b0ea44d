"""A byte-level BPE vocabulary of any size whose words nobody chose."""

from __future__ import annotations

from string import ascii_lowercase

from engine.gguf.pretokenise import BYTE_CHARACTERS

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of every vocabulary."""


def made_up_vocabulary(n: int) -> tuple[list[str], list[str]]:
    """n tokens and the merges that lead to them, "left right", in rank order.

    All single bytes, then aa, ab, … zz, aaa, aab, …, then CONTROL. n > 259.
    """
    tokens = list(BYTE_CHARACTERS)
    merges: list[str] = []
    n_words = n - len(CONTROL)
    words = iter(ascii_lowercase)
    while len(tokens) < n_words:
        longer = [(word, letter) for word in words for letter in ascii_lowercase]
        longer = longer[: n_words - len(tokens)]
        merges += [f"{word} {letter}" for word, letter in longer]
        tokens += [word + letter for word, letter in longer]
        words = iter([word + letter for word, letter in longer])
    return [*tokens, *CONTROL], merges
