"""Lookup cache files of llama.cpp: what followed an n-gram, counted over some corpus.

The file is a row of records of little-endian int32: four tokens, -1 where the n-gram is
shorter; a number of pairs; pairs of a token and its count. A file may come from anyone: nothing in
it is believed before it was compared with the size of the file and of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.draft.ngram_table import N_LONGEST, Counts
from engine.errors import LookupCacheError

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
    try:
        n_bytes = path.stat().st_size
        if n_bytes > _MAX_BYTES:
            raise LookupCacheError(
                f"{path.name} has {n_bytes >> 20} MiB, a lookup cache may have {_MAX_BYTES >> 20}.",
                "Make one from a smaller corpus.",
            )
        raw = path.read_bytes()
    except OSError as error:
        raise LookupCacheError(
            f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
        ) from error
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
