"""Scored pieces: tokenisation with vocabularies without merges.

"llama" (SentencePiece): adjacent parts that form the token with the best score are merged first.
"plamo2": the segmentation with the best sum of scores. Characters that are not tokens become byte
tokens. Both as in llama.cpp.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
"""The token of each byte."""
_SPACE = "\u2581"
_BYTE_OF = {text: bytes([byte]) for byte, text in enumerate(BYTE_TOKENS)}
_IS_BYTE = 6
_STEPS, _UNKNOWN, _INVALID = 10_000, -10_000_000, -20_000_000
"""Steps of a PLaMo score per unit; the score, in steps, of a character as bytes, and of unused
tokens."""

Encoder = Callable[[str], list[int]]


def _joined_by_score(
    tokens: Sequence[str], ids: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> Encoder:
    of_bytes = [ids[text] for text in BYTE_TOKENS]

    def encode(text: str) -> list[int]:
        parts = list(text.replace(" ", _SPACE))
        # the parts before and after each one, as parts are joined; the right one becomes empty
        before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        best: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(parts):
                token = ids.get(parts[left] + parts[right])
                if token is not None:
                    length = len(parts[left]) + len(parts[right])
                    heapq.heappush(best, (-scores[token], left, right, length))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while best:
            _, left, right, length = heapq.heappop(best)
            alive = parts[left] and parts[right]
            if not alive or len(parts[left]) + len(parts[right]) != length:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        found: list[int] = []
        for part in filter(None, parts):
            token = ids.get(part)
            found += [of_bytes[byte] for byte in part.encode()] if token is None else [token]
        return found

    return encode


def _best_sum(
    tokens: Sequence[str], ids: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> Encoder:
    of_bytes = [ids[text] for text in BYTE_TOKENS]
    steps: dict[str, int] = {}
    longest: dict[str, int] = {}
    for text, score, kind in zip(tokens, scores, types, strict=True):
        if kind == _IS_BYTE or not text:
            continue
        # halves are rounded away from zero
        step = math.copysign(math.floor(abs(score) * _STEPS + 0.5), score)
        steps[text] = int(step) if math.isfinite(score) and step > _INVALID else _INVALID
        longest[text[0]] = max(longest.get(text[0], 0), len(text))

    def encode(text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        n = len(text)
        costs, lengths, chosen = [0] * (n + 1), [1] * n, [-1] * n
        for at in range(n - 1, -1, -1):
            costs[at] = 1 << 60
            for length in range(min(longest.get(text[at], 0), n - at), 0, -1):
                piece = text[at : at + length]
                step = steps.get(piece, _INVALID)
                if step == _INVALID:
                    continue
                # the longest of equal ones
                if (cost := costs[at + length] - step) < costs[at]:
                    costs[at], lengths[at], chosen[at] = cost, length, ids[piece]
                if step == _UNKNOWN:
                    break
            else:
                if (cost := costs[at + 1] - _UNKNOWN) < costs[at]:
                    costs[at], lengths[at], chosen[at] = cost, 1, -1
        found: list[int] = []
        at = 0
        while at < n:
            if chosen[at] < 0:
                found += [of_bytes[byte] for byte in text[at].encode()]
            else:
                found.append(chosen[at])
            at += lengths[at]
        return found

    return encode


SCORED = {"llama": (_joined_by_score, True), "plamo2": (_best_sum, False)}
"""By `tokenizer.ggml.model`: the function that makes an encoder from tokens, ids, scores and types;
whether texts get a beginning token and a space in front, unless the file says otherwise."""


def bytes_of_scored(model: str) -> Callable[[str], bytes]:
    """A function from a normal or byte token to the bytes that it represents."""
    space = _SPACE if model == "llama" else " "
    return lambda token: _BYTE_OF.get(token) or token.replace(space, " ").encode()
