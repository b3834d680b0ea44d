"""ngram-mod: one pool for all sequences, hash of n tokens -> the token that followed (#19164).

Entries are overwritten on collision; the pool is emptied when it is a quarter full or when its
drafts fail several times in a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.draft.drafter import Draft
from engine.draft.ngram_drafter import GROUP, SIZE, History, NgramDrafter, nothing
from engine.draft.spec import DrafterSpec
from engine.option_fields import FormRow, NumberRange, option

N_ENTRIES = 4 << 20
EMPTY = -1
MOST_OCCUPANCY = 0.25
LOW_ACCEPTANCE = 0.25
LOW_STREAK = 5
CHUNK = 32
SHORT_MATCH = 16
_FACTOR = 6364136223846793005
_MASK = N_ENTRIES - 1
_FROM_ZERO = NumberRange(0, 1024, "Choose a number from 0.")


@dataclass(frozen=True, slots=True)
class NgramModOptions:
    """ngram-mod: look up n_match tokens, draft n_max; drafts shorter than n_min are dropped."""

    GROUP: ClassVar[str] = GROUP
    n_match: int = option(
        24,
        "--spec-ngram-mod-n-match  length of the n-gram to look up",
        SIZE,
        FormRow("", 1, 1024, short="n"),
    )
    n_min: int = option(
        48,
        "--spec-ngram-mod-n-min  shorter drafts are discarded",
        _FROM_ZERO,
        FormRow("", 0, 1024, short="min"),
    )
    n_max: int = option(
        64, "--spec-ngram-mod-n-max  longest draft", _FROM_ZERO, FormRow("", 0, 1024, short="max")
    )


class NgramPool:
    """int32 [N_ENTRIES]: the token after the n-gram that hashed to an entry, -1 = empty.

    The hash folds n tokens, h = h * factor + token in 64 bits, modulo the number of entries. As
    that is a power of two, arithmetic modulo the number of entries gives the same.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._first_factor = pow(_FACTOR, n - 1, N_ENTRIES)
        self._entries = np.full(N_ENTRIES, EMPTY, np.int32)
        self.n_used = 0

    @property
    def occupancy(self) -> float:
        """Fraction of entries in use."""
        return self.n_used / N_ENTRIES

    def reset(self) -> None:
        """Empty the pool."""
        self._entries.fill(EMPTY)
        self.n_used = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add every n-gram in tokens that has a successor; later ones overwrite earlier ones."""
        values = np.array(tokens, np.uint64)
        n_grams = len(values) - self._n
        if n_grams <= 0:
            return
        at = np.zeros(n_grams, np.uint64)
        for i in range(self._n):
            at = (at * np.uint64(_FACTOR % N_ENTRIES) + values[i : i + n_grams]) & np.uint64(_MASK)
        index = at.astype(np.int64)
        self.n_used += len(np.unique(index[self._entries[index] == EMPTY]))
        self._entries[index] = values[self._n :].astype(np.int32)

    def follow(self, ngram: Sequence[int], n_max: int) -> list[int]:
        """Tokens found by repeated look-ups, each including the token found before."""
        window, found = list(ngram), []
        at = entry_of(ngram)
        for i in range(n_max):
            token = int(self._entries[at])
            if token == EMPTY:
                break
            found.append(token)
            window.append(token)
            at = ((at - window[i] * self._first_factor) * _FACTOR + token) & _MASK
        return found


def entry_of(ngram: Sequence[int]) -> int:
    """Entry of one n-gram."""
    at = 0
    for token in ngram:
        at = (at * _FACTOR + token) & _MASK
    return at


class NgramMod(NgramDrafter):
    """Drafts as long as the pool knows the next token."""

    name = "ngram-mod"

    def __init__(self, options: NgramModOptions) -> None:
        super().__init__()
        self._n, self._n_min, self.n_max = options.n_match, options.n_min, options.n_max
        self.pool = NgramPool(self._n)
        self._added_to = Counter[int]()
        """By sequence: n-grams that start before this position are in the pool."""
        self._n_drafted, self._n_low = Counter[int](), Counter[int]()
        """By sequence: tokens of the latest draft, and bad drafts in a row."""

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """Put the prompt into the pool, which is emptied if that makes it too full."""
        super().begin(seq, prompt)
        self._drop(seq)
        if len(prompt) < self._n:
            return
        self.pool.add(prompt)
        self._added_to[seq] = len(prompt) - self._n
        if self.pool.occupancy > MOST_OCCUPANCY:
            self.pool.reset()

    def accept(self, seq: int, n_accepted: int, *, is_other: bool) -> None:
        """Several bad drafts in a row empty the pool; this sequence is then added again."""
        if is_other or not self._n_drafted[seq]:
            return
        if n_accepted / self._n_drafted[seq] >= LOW_ACCEPTANCE:
            self._n_low[seq] = 0
            return
        self._n_low[seq] += 1
        if self._n_low[seq] >= LOW_STREAK:
            self.pool.reset()
            self._n_low[seq] = self._added_to[seq] = 0

    def forget(self, seq: int) -> None:
        """Drop the sequence; the pool keeps its n-grams."""
        super().forget(seq)
        self._drop(seq)

    def _drop(self, seq: int) -> None:
        for numbers in (self._added_to, self._n_drafted, self._n_low):
            numbers.pop(seq, None)

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        length, self._n_drafted[seq] = len(history), 0
        if length < self._n:
            return nothing("too-short-history")
        if length - self._added_to[seq] > CHUNK:
            self.pool.add(history.part(self._added_to[seq]))
            self._added_to[seq] = length - self._n
        found = self.pool.follow([*history.part(length - self._n + 1), last], self.n_max)
        is_cut = len(found) < self.n_max
        if is_cut and len(found) < self._n_min:
            return nothing("n_min" if found else "pool-miss", n_raw=len(found))
        self._n_drafted[seq] = len(found)
        return Draft(found, reason="pool-miss" if is_cut else "" if found else "n_max")


def _note(options: NgramModOptions) -> str:
    if options.n_match >= SHORT_MATCH:
        return ""
    return f"--spec-ngram-mod-n-match below {SHORT_MATCH} gives poor drafts."


SPEC = DrafterSpec(
    NgramMod.name,
    "tokens from a pool of n-grams shared by all sequences",
    lambda inputs: NgramMod(inputs.options),
    NgramModOptions,
    lambda options: options.n_max,
    field="ngram_mod",
    reasons={"pool-miss": "the pool has no next token"},
    note=_note,
)
