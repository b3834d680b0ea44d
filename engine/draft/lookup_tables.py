"""Lookup tables: counts of what followed an n-gram, and which token they predict.

Files of them are llama.cpp's lookup caches: a row of records of little-endian int32: four tokens,
-1 where the n-gram is shorter; a number of pairs; pairs of a token and its count. A file may come
from anyone: nothing in it is believed before it was compared with the size of the file and of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import LookupCacheError
from engine.files import file_bytes

N_LONGEST = 4
"""Longest n-gram of a context or dynamic table."""

N_STATIC = 2
"""Length of the n-grams of a static table."""

Counts = dict[int, int]
"""Token -> how often it followed."""

Find = Callable[[tuple[int, ...]], Counts | None]
"""What a table knows of an n-gram."""


@dataclass(frozen=True, slots=True)
class EvidenceFloor:
    """Least evidence by length of the n-gram, from 1: observations, percent of the best token."""

    samples: tuple[int, ...]
    percent: tuple[int, ...]

    def holds(self, length: int, best: int, total: int) -> bool:
        """Whether `best` of `total` observations after an n-gram of this length are enough."""
        return total >= self.samples[length - 1] and 100 * best >= self.percent[length - 1] * total


LAX = EvidenceFloor((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = EvidenceFloor((4, 3, 2, 2), (75, 66, 66, 66))


def learn(table: dict[tuple[int, ...], Counts], tokens: Sequence[int]) -> None:
    """Count every n-gram of 1..4 tokens that has a successor within `tokens`."""
    for n in range(1, N_LONGEST + 1):
        for end in range(n, len(tokens)):
            counts = table.setdefault(tuple(tokens[end - n : end]), {})
            counts[tokens[end]] = counts.get(tokens[end], 0) + 1


def most_likely(
    find: Find, tail: Sequence[int], static: Counts, floor: EvidenceFloor
) -> int | None:
    """The next token by the longest n-gram at the end of `tail` with enough evidence.

    Among the tokens behind an n-gram the largest count wins, times 100 for each time that the
    static table saw the token behind the last two.
    """
    for n in range(min(N_LONGEST, len(tail)), 0, -1):
        counts = find(tuple(tail[-n:]))
        if not counts:
            continue
        best = max(counts, key=lambda token: counts[token] * (100 * static.get(token, 0) or 1))
        if floor.holds(n, counts[best], sum(counts.values())):
            return best
    return None


def most_frequent(counts: Counts) -> int | None:
    """The next token by the static table alone."""
    if not counts:
        return None
    best = max(counts, key=counts.__getitem__)
    return best if LAX.holds(N_STATIC, counts[best], sum(counts.values())) else None


_MAX_BYTES = 256 << 20
_HEAD = N_LONGEST + 1
_REMEDY = "Make it again with llama-lookup-create and this model."


class LookupCache:
    """An n-gram table that was read from a file; counts stay packed until they are asked for."""

    def __init__(self, values: np.ndarray, records: dict[tuple[int, ...], int]) -> None:
        self._values, self._records = values, records

    def __len__(self) -> int:
        return len(self._records)

    def find(self, ngram: tuple[int, ...]) -> Counts | None:
        """Counts behind an n-gram of 1..4 tokens; of a token given twice the first one counts."""
        at = self._records.get(ngram)
        if at is None:
            return None
        counts: Counts = {}
        for token, count in self._values[at + _HEAD : _end(self._values, at)].reshape(-1, 2):
            counts.setdefault(int(token), int(count))
        return counts


def read_lookup_cache(path: Path | str, n_vocab: int) -> LookupCache:
    """Read and check a whole file; of an n-gram given twice the first record counts.

    Raises LookupCacheError naming the byte where the file is wrong.
    """
    path = Path(path)
    raw = file_bytes(path, _MAX_BYTES, LookupCacheError)
    if len(raw) % 4:
        raise _wrong(path, len(raw) // 4, "the file ends inside a number")
    values = np.frombuffer(raw, "<i4")
    records: dict[tuple[int, ...], int] = {}
    is_pair = np.ones(len(values), bool)
    at = 0
    while at < len(values):
        ngram = _ngram(path, values, at, n_vocab)
        records.setdefault(ngram, at)
        is_pair[at : at + _HEAD] = False
        at = _end(values, at)
    _check_pairs(path, values, np.flatnonzero(is_pair), n_vocab)
    return LookupCache(values, records)


def _end(values: np.ndarray, at: int) -> int:
    return at + _HEAD + 2 * int(values[at + N_LONGEST])


def _ngram(path: Path, values: np.ndarray, at: int, n_vocab: int) -> tuple[int, ...]:
    if at + _HEAD > len(values):
        raise _wrong(path, at, "the file ends inside a record")
    *tokens, n_pairs = values[at : at + _HEAD].tolist()
    length = next((i for i, token in enumerate(tokens) if token < 0), N_LONGEST)
    if not length or any(token != -1 for token in tokens[length:]):
        raise _wrong(path, at, f"{tokens} is no n-gram")
    if max(tokens) >= n_vocab:
        raise _wrong(path, at, f"token {max(tokens)} is outside the vocabulary of {n_vocab}")
    if not 0 < n_pairs <= (len(values) - at - _HEAD) // 2:
        raise _wrong(path, at, f"{n_pairs} pairs do not fit the file")
    return tuple(tokens[:length])


def _check_pairs(path: Path, values: np.ndarray, places: np.ndarray, n_vocab: int) -> None:
    """places: indices of all tokens and counts, in turn."""
    tokens, counts = values[places[0::2]], values[places[1::2]]
    if (bad := (tokens < 0) | (tokens >= n_vocab)).any():
        i = int(bad.argmax())
        raise _wrong(
            path, places[2 * i], f"token {tokens[i]} is outside the vocabulary of {n_vocab}"
        )
    if (bad := counts < 1).any():
        i = int(bad.argmax())
        raise _wrong(path, places[2 * i + 1], f"count {counts[i]} is below 1")


def _wrong(path: Path, at: int, what: str) -> LookupCacheError:
    return LookupCacheError(f"{path.name}: byte {4 * at}: {what}.", _REMEDY)
