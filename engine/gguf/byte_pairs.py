"""Byte-pair merges of a vocabulary.

A short text needs few of them: those that make a part of one of its words. They are looked up in
the raw strings; the full tables, half a second's work, are built for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np
from tokenizers import Tokenizer as MergeTokenizer
from tokenizers.models import BPE

from engine.errors import ModelFileError
from engine.gguf.binary import (
    BLOCK,
    StringArray,
    among,
    check_cancelled,
    joined,
    keys,
    never,
    shorten,
)
from engine.gguf.metadata import TypedMetadata
from engine.gguf.pretokenise import Splitting, pre_tokenizer

_KEY = "tokenizer.ggml.merges"
_NORMAL = 1  # a type of tokens
_REMEDY = "Use another copy of the model, or convert it again."
_FEW, _ONE = 20_000, 2_000
"""Word parts looked up, over all texts, before the full tables are built; each text counts as at
least this many."""


class BytePairs:
    """Tokenises texts without special tokens."""

    def __init__(
        self,
        file: TypedMetadata,
        tokens: StringArray,
        types: Sequence[int],
        splitting: Splitting,
        cancelled: Callable[[], bool],
    ) -> None:
        """Raises ModelFileError for merges whose parts are not tokens, and Cancelled."""
        self._path, self._tokens, self._types = file.path, tokens, types
        self._whole_words, self._left = splitting.whole_words, _FEW
        self._split = pre_tokenizer(splitting)
        self._all: MergeTokenizer | None = None
        self._merges: StringArray | None = None
        if not splitting.by_rank or _KEY in file.metadata:
            self._merges = StringArray.of(file.strs(_KEY))
            check_cancelled(cancelled)
        if self._merges is None or not _are_of_tokens(self._merges, tokens, cancelled):
            self._all = self._whole(cancelled)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        merger = self._all or self._few(text)
        if merger is None:
            merger = self._all = self._whole()
        found: list[int] = merger.encode(text, add_special_tokens=False).ids
        return found

    def _few(self, text: str) -> MergeTokenizer | None:
        """The merges that this text needs; None if they are too many."""
        if self._merges is None or len(text) > self._left:
            return None
        words = {word for word, _ in self._split.pre_tokenize_str(text)}
        self._left -= max(_ONE, sum(len(word) * (len(word) + 1) // 2 for word in words))
        if self._left < 0:
            return None
        parts = {word[at:to] for word in words for at, to in combinations(range(len(word) + 1), 2)}
        ids = {self._tokens[i]: i for i in self._tokens.places(parts)}
        pairs = {f"{pair[0]} {pair[1]}": pair for pair in _pairs(ids, ids)}
        ranked = (self._merges[i] for i in self._merges.places(pairs))
        return self._merger(ids, list(dict.fromkeys(pairs[merge] for merge in ranked)))

    def _whole(self, cancelled: Callable[[], bool] = never) -> MergeTokenizer:
        ids: dict[str, int] = {}
        for start, block in _blocks(self._tokens, cancelled):
            ids.update(zip(block, range(start, start + len(block)), strict=True))
        if self._merges is None:
            return self._merger(ids, _merges_by_rank(self._tokens, self._types, ids, cancelled))
        return self._merger(ids, self._read_merges(self._merges, ids, cancelled))

    def _merger(self, ids: dict[str, int], merges: list[tuple[str, str]]) -> MergeTokenizer:
        merger = MergeTokenizer(BPE(vocab=ids, merges=merges, ignore_merges=self._whole_words))
        merger.pre_tokenizer = self._split
        return merger

    def _read_merges(
        self, merges: StringArray, ids: dict[str, int], cancelled: Callable[[], bool]
    ) -> list[tuple[str, str]]:
        """Pairs in rank order; of a pair that is listed twice the first counts."""
        own = [""] * (max(ids.values()) + 1)  # one object for all merges that name a token
        for text, token_id in ids.items():
            own[token_id] = text
        pairs: dict[tuple[str, str], None] = {}
        for start, block in _blocks(merges, cancelled):
            for rank, merge in enumerate(block, start):
                left, _, right = merge.partition(" ")
                if not (left and right and left in ids and right in ids and left + right in ids):
                    what = f"merge {rank} ({shorten(merge)}) names a token not in the vocabulary"
                    raise ModelFileError(self._path, f"key {_KEY}", what, _REMEDY)
                pairs.setdefault((own[ids[left]], own[ids[right]]))
        check_cancelled(cancelled)  # the library that takes them cannot be interrupted
        return list(pairs)


def _pairs(made: Iterable[str], ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that make one of these."""
    for token in made:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        yield from (pair for pair in cuts if pair[0] in ids and pair[1] in ids)


def _blocks(
    items: Sequence[str], cancelled: Callable[[], bool]
) -> Iterator[tuple[int, Sequence[str]]]:
    """The items some at a time, with the index of the first; raises Cancelled in between."""
    for start in range(0, len(items), BLOCK):
        check_cancelled(cancelled)
        yield start, items[start : start + BLOCK]


def _merges_by_rank(
    tokens: Sequence[str], types: Sequence[int], ids: dict[str, int], cancelled: Callable[[], bool]
) -> list[tuple[str, str]]:
    """The merges of a vocabulary whose tokens are in rank order: any two tokens that form a third
    one are merged, lowest id first (as in tiktoken)."""
    merges: list[tuple[str, str]] = []
    for start, block in _blocks(tokens, cancelled):
        named = enumerate(block, start)
        merges += _pairs((text for i, text in named if types[i] == _NORMAL and ids[text] == i), ids)
    return merges


def _are_of_tokens(merges: StringArray, tokens: StringArray, cancelled: Callable[[], bool]) -> bool:
    """Whether each merge consists of two tokens and forms a third: certain if False. Hash
    collisions are harmless, because look-ups use tokens only and the full tables are built from
    checked merges."""
    spaces = merges.first(b" ")
    if (spaces < 0).any():
        return False
    left, right = merges.parts(None, spaces), merges.parts(spaces + 1, None)
    check_cancelled(cancelled)
    named = np.concatenate([keys(left), keys(right), keys(joined(left, right))])
    named.sort()  # searching for what is sorted takes a fifth of the time
    check_cancelled(cancelled)
    return bool(among(named, tokens.keys).all())
