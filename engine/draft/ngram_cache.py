"""ngram-cache: tables of tokens that followed n-grams of 1 to 4 tokens.

The context table learns from the sequence itself; the dynamic and the static one are read from
files and never written. Each look-up includes the tokens drafted so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.draft.drafter import Draft
from engine.draft.ngram_drafter import GROUP, History, NgramDrafter, nothing
from engine.draft.spec import DrafterInputs, DrafterSpec
from engine.errors import LookupCacheError
from engine.files import file_bytes
from engine.option_fields import FormRow, option

N_LONGEST = 4
"""Longest n-gram of a context or dynamic table."""

N_STATIC = 2
"""Length of the n-grams of a static table."""

Counts = dict[int, int]
"""Number of times that each token followed."""

Find = Callable[[tuple[int, ...]], Counts | None]
"""Looks up an n-gram in a table."""
_MAX_BYTES = 256 << 20
_HEAD = N_LONGEST + 1
_REMEDY = "Make it again with llama-lookup-create and this model."


Floor = tuple[tuple[int, int], ...]
"""Least evidence by n-gram length, from 1: observations, and percentage of the most frequent
token."""
LAX: Floor = ((2, 66), (2, 50), (1, 50), (1, 50))
STRICT: Floor = ((4, 75), (3, 66), (2, 66), (2, 66))


def is_enough(floor: Floor, length: int, best: int, total: int) -> bool:
    """Whether `best` of `total` observations after an n-gram of this length are enough."""
    least, percent = floor[length - 1]
    return total >= least and 100 * best >= percent * total


def learn(table: dict[tuple[int, ...], Counts], tokens: Sequence[int], n_known: int = 0) -> None:
    """Count every n-gram of 1..4 tokens that has a successor within `tokens`, after n_known."""
    for n in range(1, N_LONGEST + 1):
        for end in range(max(n, n_known), len(tokens)):
            counts = table.setdefault(tuple(tokens[end - n : end]), {})
            counts[tokens[end]] = counts.get(tokens[end], 0) + 1


def most_likely(find: Find, tail: Sequence[int], static: Counts, floor: Floor) -> int | None:
    """The next token by the longest n-gram at the end of `tail` with enough evidence.

    Among the tokens after an n-gram the largest count wins, multiplied by 100 times the static
    table's count of the token after the last two tokens, if that has any.
    """
    for n in range(min(N_LONGEST, len(tail)), 0, -1):
        counts = find(tuple(tail[-n:]))
        if not counts:
            continue
        best = max(counts, key=lambda token: counts[token] * (100 * static.get(token, 0) or 1))
        if is_enough(floor, n, counts[best], sum(counts.values())):
            return best
    return None


def most_frequent(counts: Counts) -> int | None:
    """The next token by the static table alone."""
    if not counts:
        return None
    best = max(counts, key=counts.__getitem__)
    return best if is_enough(LAX, N_STATIC, counts[best], sum(counts.values())) else None


class LookupCache:
    """An n-gram table read from a file; counts are unpacked on demand.

    The file is llama.cpp's lookup cache: records of little-endian int32: four tokens, -1 where the
    n-gram is shorter; a number of pairs; pairs of a token and its count. It is untrusted:
    everything is checked against the size of the file and of the vocabulary before use.
    """

    def __init__(self, values: np.ndarray, records: dict[tuple[int, ...], int]) -> None:
        self._values, self._records = values, records

    def __len__(self) -> int:
        return len(self._records)

    def find(self, ngram: tuple[int, ...]) -> Counts | None:
        """Counts after an n-gram of 1..4 tokens; of duplicate tokens the first one counts."""
        at = self._records.get(ngram)
        if at is None:
            return None
        counts: Counts = {}
        for token, count in self._values[at + _HEAD : _end(self._values, at)].reshape(-1, 2):
            counts.setdefault(int(token), int(count))
        return counts


def read_lookup_cache(path: Path | str, n_vocab: int) -> LookupCache:
    """Read and check a whole file; of duplicate n-grams the first record counts.

    Raises LookupCacheError with the offset of the error.
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
        raise _wrong(path, at, f"{tokens} is not an n-gram")
    if max(tokens) >= n_vocab:
        raise _wrong(path, at, f"token {max(tokens)} is outside the vocabulary of {n_vocab}")
    if not 0 < n_pairs <= (len(values) - at - _HEAD) // 2:
        raise _wrong(path, at, f"{n_pairs} pairs do not fit the file")
    return tuple(tokens[:length])


def _check_pairs(path: Path, values: np.ndarray, places: np.ndarray, n_vocab: int) -> None:
    """Check tokens and counts, which alternate at the indices `places`. Raises LookupCacheError."""
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


_WRITTEN = "as llama-lookup-* writes them; never changed"


@dataclass(frozen=True, kw_only=True)
class LookupCacheOptions:
    """Files with the tables of ngram-cache."""

    lookup_cache_static: str | None = option(
        None,
        f"-lcs, --lookup-cache-static FILE  ngram-cache: 2-grams of a large corpus, {_WRITTEN}",
        FormRow("static cache", text="file"),
        group=GROUP,
    )
    lookup_cache_dynamic: str | None = option(
        None,
        f"-lcd, --lookup-cache-dynamic FILE  ngram-cache: n-grams of earlier output, {_WRITTEN}",
        FormRow("dynamic cache", text="file"),
        group=GROUP,
    )


class NgramCache(NgramDrafter):
    """Drafts up to eight tokens. n-grams across two calls are not learned."""

    name = "ngram-cache"
    n_max = 8
    longest = N_LONGEST

    def __init__(self, static: LookupCache | None, dynamic: LookupCache | None) -> None:
        super().__init__()
        self._static = static.find if static else _knows_nothing
        self._dynamic = dynamic.find if dynamic else _knows_nothing
        self._tables: dict[int, dict[tuple[int, ...], Counts]] = {}
        """N-gram tables learned from each sequence."""
        self._n_learned: dict[int, int] = {}
        """Number of tokens counted there, including the newest one."""

    def forget(self, seq: int) -> None:
        """Drop the sequence and its table."""
        super().forget(seq)
        self._tables.pop(seq, None)
        self._n_learned.pop(seq, None)

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        table, n_learned = self._tables.setdefault(seq, {}), self._n_learned.get(seq, 0)
        if n_learned <= len(history):
            learn(table, [*history.part(n_learned), last])
            self._n_learned[seq] = len(history) + 1
        if len(history) + 1 < N_STATIC:
            return nothing("too-short-history")
        tail = [*history.part(-(N_LONGEST - 1)), last]
        found: list[int] = []
        while len(found) < self.n_max:
            token = self._next(table, tail[-N_LONGEST:])
            if token is None:
                known = any(
                    find(tuple(tail[-n:]))
                    for find in (table.get, self._dynamic, self._static)
                    for n in range(1, min(N_LONGEST, len(tail)) + 1)
                )
                return Draft(found, reason="low-count" if known else "no-match")
            found.append(token)
            tail.append(token)
        return Draft(found)

    def _next(self, context: dict[tuple[int, ...], Counts], tail: list[int]) -> int | None:
        static = self._static(tuple(tail[-N_STATIC:])) or {}
        for find, floor in ((context.get, LAX), (self._dynamic, STRICT)):
            token = most_likely(find, tail[-self.longest :], static, floor)
            if token is not None:
                return token
        return most_frequent(static)


def _knows_nothing(ngram: tuple[int, ...]) -> Counts | None:
    return None


def _make(inputs: DrafterInputs) -> NgramCache:
    files = inputs.options.lookup_cache_static, inputs.options.lookup_cache_dynamic
    n_vocab = inputs.target.config.n_vocab
    return NgramCache(*(read_lookup_cache(path, n_vocab) if path else None for path in files))


SPEC = DrafterSpec(
    NgramCache.name,
    "likely tokens by counts of n-grams, from this text and from files",
    _make,
    LookupCacheOptions,
    lambda options: NgramCache.n_max,
    reasons={"low-count": "too few observations, or none dominates"},
)
