"""What both sides are asked to decode."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "1 token"
"""The work that plain decoding is."""
_DECODED = 32
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class PassWork:
    """n_tokens in one forward pass, or in as many `one_by_one`, `repeats` times, each time behind
    the same `depth` of tokens. They are random.

    all_logits: those behind every token are computed, as for a draft; else those of the last one.
    """

    name: str
    n_tokens: int
    one_by_one: bool = False
    all_logits: bool = False
    repeats: int = 1
    depth: int = 0


def pass_works(widths: tuple[int, ...], n_prompt: int, depth: int) -> list[PassWork]:
    """Plain decoding, verification of these widths, and a prompt."""
    verify = [
        PassWork(f"verify {width}", width, all_logits=True, repeats=_REPEATS, depth=depth)
        for width in widths
    ]
    return [
        PassWork(PLAIN, _DECODED, one_by_one=True, depth=depth),
        *verify,
        PassWork(f"prompt {n_prompt}", n_prompt, depth=depth),
    ]
