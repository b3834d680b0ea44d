"""ngram-simple, ngram-map-k and ngram-map-k4v: the continuation of an earlier occurrence of the
last n tokens; the maps also remember how drafts after an n-gram fared.

ngram-simple copies what followed the latest occurrence. k drafts what followed the match. k4v
counts up to four continuations of the key and drafts only if one of them dominates. Both limit a
key's next draft to the accepted length of its last one, so one fully rejected draft mutes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.draft.drafter import Draft, tree_of
from engine.draft.ngram_drafter import History, NgramDrafter, NgramSizes, nothing
from engine.draft.spec import DrafterSpec

DOMINATES = 2  # required ratio to all other continuations
MOST_HITS = 16380
MOST_VALUES = 4
N_SLOTS = 1 << 18
_FACTOR = 2654435761


class FirstOccurrences:
    """Start of the first n-gram hashed to each slot; 0 means an empty slot.

    last: positions entered so far. Only hashes are kept: a look-up must compare the tokens.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._slots: dict[int, int] = {}
        self.last = 0

    def find(self, ngram: Sequence[int]) -> int:
        """Start in the history of an n-gram in the same hash slot; 0 = there is none."""
        return self._slots.get(slot_of(ngram), 0)

    def enter(self, history: History, starts: Iterator[int]) -> None:
        """Add the n-grams at these starts; a slot in use keeps what it has."""
        for start in starts:
            self._slots.setdefault(slot_of(history.part(start, start + self._n)), start)

    def drop_from(self, length: int) -> None:
        """Drop entries that start at or after `length`."""
        self._slots = {slot: start for slot, start in self._slots.items() if start < length}
        self.last = min(self.last, max(0, length - 1))


def slot_of(ngram: Sequence[int]) -> int:
    """Hash slot of an n-gram: h = h * 2654435761 + token in 32 bits, modulo the number of slots."""
    value = 0
    for token in ngram:
        value = (value * _FACTOR + token) & 0xFFFFFFFF
    return value % N_SLOTS


@dataclass(slots=True)
class NgramKey:
    """An n-gram that was looked up, or a continuation of it. start: its first occurrence. limit:
    longest draft it allows. counted_to: match up to which its continuations, `values`, are
    counted."""

    start: int
    limit: int
    hits: int = 0
    counted_to: int = 0
    values: list[NgramKey] = field(default_factory=list)


@dataclass(slots=True)
class _Map:
    """State of one sequence. started, checked: lengths at `begin` and at the latest look-up."""

    table: FirstOccurrences
    keys: dict[tuple[int, ...], NgramKey] = field(default_factory=dict)
    begun: int = 0
    checked: int = 0
    used: NgramKey | None = None


class NgramMap(NgramDrafter):
    """The drafters ngram-map-k and, with_values, ngram-map-k4v."""

    def __init__(self, sizes: NgramSizes, *, with_values: bool, tree: Sequence[int] = ()) -> None:
        super().__init__()
        self.name = (KEYS_AND_VALUES if with_values else KEYS).name
        self._n, self.n_max = sizes.size_n, sizes.size_m
        self._min_hits, self._with_values, self._tree = sizes.min_hits, with_values, tree
        self._maps: dict[int, _Map] = {}

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """Start from the prompt; after a longer history, entries that start beyond the prompt's
        end are deleted."""
        super().begin(seq, prompt)
        state, length = self._map(seq), len(prompt)
        if length < state.checked:
            state.table.drop_from(length)
            self._drop_from(state, length)
        state.begun, state.checked = length, max(0, length - 1)

    def accept(self, seq: int, n_accepted: int, *, is_other: bool) -> None:
        """Limit later drafts of the key or value used to the accepted length."""
        state = self._map(seq)
        if not is_other and state.used is not None:
            state.used.limit = n_accepted

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._maps.pop(seq, None)

    def _map(self, seq: int) -> _Map:
        return self._maps.setdefault(seq, _Map(FirstOccurrences(self._n)))

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        state, length = self._map(seq), len(history)
        state.used = None
        if length < 2 * self._n + self.n_max:
            return nothing("too-short-history")
        state.checked = length
        ngram = [*history.part(length - self._n + 1), last]
        match = self._match(state, history, ngram)
        parts = self._parts(state, self._newest(length))  # the latest first within each
        state.table.enter(history, (i for low, high in parts for i in range(high, low - 1, -1)))
        state.table.last = max(state.table.last, self._newest(length))
        if not match:
            return nothing("no-match")
        key = state.keys.setdefault(tuple(ngram), NgramKey(match, self.n_max))
        key.hits = min(key.hits + 1, MOST_HITS)
        used = key
        if self._with_values:
            if key.hits < self._min_hits:
                return nothing("min-hits", match_pos=match)
            self._count_values(key, history, ngram, match)
            used = max(key.values, key=lambda value: value.hits)
            if self._tree:
                return self._tree_of(key, history, match)
            others = sum(value.hits for value in key.values) - used.hits
            if used.hits < DOMINATES * others:
                return nothing("ambiguous", match_pos=match)
        state.used = used
        return self._after(history, match, used.limit)

    def _after(self, history: History, match: int, limit: int) -> Draft:
        start = match + self._n
        draft = Draft(history.part(start, start + self.n_max), match_pos=match)
        draft.cut(limit, "accepted-before" if limit else "muted")
        return draft

    def _tree_of(self, key: NgramKey, history: History, match: int) -> Draft:
        """A tree of the counted continuations, most frequent first. Acceptance of trees does not
        shorten later drafts."""
        best = sorted(key.values, key=lambda value: -value.hits)
        draft = tree_of([history.part(v.start, v.start + self.n_max) for v in best], self._tree)
        draft.match_pos = match
        return draft

    def _newest(self, length: int) -> int:
        """The last start with room for a key and a whole draft before the end."""
        return length - self._n - self.n_max - 1

    def _match(self, state: _Map, history: History, ngram: list[int]) -> int:
        """Start of an occurrence: from the table, else the latest one not yet entered; 0 = none."""
        newest = self._newest(len(history))
        start = state.table.find(ngram)
        if 0 < start < newest and history.holds(ngram, start):
            return start
        for low, high in self._parts(state, newest):
            if (start := history.find_last(ngram, low, high)) > 0:
                return start
        return 0

    def _parts(self, state: _Map, newest: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last start in the prompt and in the generated text, beyond the table's last.

        Generated text comes second: a chat may drop or reorder it later.
        """
        low = state.table.last + 1
        return (low, self._newest(state.begun)), (max(low, state.begun + 1), newest)

    def _count_values(self, key: NgramKey, history: History, ngram: list[int], match: int) -> None:
        n, m = self._n, self.n_max
        for start in history.find_all(ngram, key.counted_to, match):
            tokens = history.part(start + n, start + n + m)
            value = next((v for v in key.values if history.holds(tokens, v.start)), None)
            if value is None:
                if len(key.values) == MOST_VALUES:
                    continue
                value = NgramKey(start + n, m)
                key.values.append(value)
            value.hits = min(value.hits + 1, MOST_HITS)
        key.counted_to = match

    def _drop_from(self, state: _Map, length: int) -> None:
        """Delete keys and values at or after `length`, and keys that extend beyond it."""
        for ngram, key in list(state.keys.items()):
            key.values = [value for value in key.values if value.start < length]
            reaches = key.start + self._n > length
            if reaches or (self._with_values and not key.values):
                del state.keys[ngram]


_MATCHING = {
    "muted": "no token of the last draft after this key was accepted",
    "accepted-before": "not longer than the accepted part of the last draft after this key",
}
KEYS = DrafterSpec(
    "ngram-map-k",
    "continuation of the last n tokens, as far as such drafts were accepted before",
    lambda inputs: NgramMap(inputs.options, with_values=False),
    NgramSizes,
    lambda sizes: sizes.size_m,
    field="ngram_map_k",
    reasons=_MATCHING,
)
KEYS_AND_VALUES = DrafterSpec(
    "ngram-map-k4v",
    "the most frequent continuation of the last n tokens, if it dominates; in trees all of them",
    lambda inputs: NgramMap(inputs.options, with_values=True, tree=inputs.tree),
    NgramSizes,
    lambda sizes: sizes.size_m,
    field="ngram_map_k4v",
    branches=True,
    reasons={
        **_MATCHING,
        "min-hits": "the key was looked up too few times",
        "ambiguous": "no continuation of the key dominates",
    },
)


class NgramSimple(NgramDrafter):
    """Copies up to size_m tokens after the match, at least size_n. tree: a tree also holds what
    followed earlier matches, latest first."""

    name = "ngram-simple"
    find = staticmethod(History.find_last)

    def __init__(self, sizes: NgramSizes, tree: Sequence[int] = ()) -> None:
        super().__init__()
        self._n, self.n_max, self._tree = sizes.size_n, sizes.size_m, tree

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        n, m, length = self._n, self.n_max, len(history)
        if length <= n + m + 1:
            return nothing("too-short-history")
        pattern = [*history.part(length - n + 1), last]
        match = self.find(history, pattern, 1, length - n - 1)  # position 0 means no match
        if match < 0:
            return nothing("no-match")
        copied = history.part(match + n, match + n + m)
        if len(copied) < n:
            return nothing("copy<n", match_pos=match, n_raw=len(copied))
        reason = "history-end" if len(copied) < m else ""
        if not self._tree:
            return Draft(copied, match_pos=match, reason=reason)
        starts = [*history.find_all(pattern, 1, match)][::-1]
        draft = tree_of([history.part(start + n, start + n + m) for start in starts], self._tree)
        draft.match_pos, draft.reason = match, reason
        return draft


SIMPLE = DrafterSpec(
    NgramSimple.name,
    "continuation of the latest occurrence of the last n tokens",
    lambda inputs: NgramSimple(inputs.options, inputs.tree),
    NgramSizes,
    lambda sizes: sizes.size_m,
    field="ngram_simple",
    branches=True,
    reasons={
        "copy<n": "fewer tokens follow the match than the n-gram has",
        "history-end": "the history ends before a whole draft",
    },
)
