"""ngram-cache: tables of what followed n-grams of 1 to 4 tokens.

The context table learns from the sequence itself, the dynamic and the static one come from files
and are never written. Each drafted token is looked up with the tokens drafted before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.draft.drafter import Draft
from engine.draft.history import History
from engine.draft.lookup_tables import (
    LAX,
    N_LONGEST,
    N_STATIC,
    STRICT,
    Counts,
    LookupCache,
    learn,
    most_frequent,
    most_likely,
    read_lookup_cache,
)
from engine.draft.ngram_drafter import GROUP, NgramDrafter, nothing
from engine.draft.spec import DrafterInputs, DrafterSpec
from engine.option_fields import FormRow, option

_HELP = "ngram-cache: {}, as llama-lookup-* writes them; never changed"


@dataclass(frozen=True, kw_only=True)
class LookupCacheOptions:
    """Files with the tables of ngram-cache."""

    lookup_cache_static: str | None = option(
        None,
        "-lcs --lookup-cache-static",
        _HELP.format("2-grams of a large corpus"),
        FormRow("static cache", text="file"),
        group=GROUP,
        metavar="FILE",
    )
    lookup_cache_dynamic: str | None = option(
        None,
        "-lcd --lookup-cache-dynamic",
        _HELP.format("n-grams of earlier output"),
        FormRow("dynamic cache", text="file"),
        group=GROUP,
        metavar="FILE",
    )


@dataclass(slots=True)
class _Context:
    """The n-gram table learned from one sequence. n_learned: tokens counted, `last` included."""

    table: dict[tuple[int, ...], Counts] = field(default_factory=dict)
    n_learned: int = 0


class NgramCache(NgramDrafter):
    """Drafts up to eight tokens. An n-gram that spans two look-ups is not learned."""

    name = "ngram-cache"
    n_max = 8

    def __init__(self, static: LookupCache | None, dynamic: LookupCache | None) -> None:
        super().__init__()
        self._static = static.find if static else _knows_nothing
        self._dynamic = dynamic.find if dynamic else _knows_nothing
        self._contexts: dict[int, _Context] = {}

    def forget(self, seq: int) -> None:
        """Drop the sequence and what it taught."""
        super().forget(seq)
        self._contexts.pop(seq, None)

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        context = self._contexts.setdefault(seq, _Context())
        if context.n_learned <= len(history):
            learn(context.table, [*history.part(context.n_learned), last])
            context.n_learned = len(history) + 1
        if len(history) + 1 < N_STATIC:
            return nothing("too-short-history")
        tail = [*history.part(-(N_LONGEST - 1)), last]
        found: list[int] = []
        while len(found) < self.n_max:
            token = self._next(context.table, tail[-N_LONGEST:])
            if token is None:
                known = any(
                    find(tuple(tail[-n:]))
                    for find in (context.table.get, self._dynamic, self._static)
                    for n in range(1, min(N_LONGEST, len(tail)) + 1)
                )
                return Draft(found, reason="low-count" if known else "no-match")
            found.append(token)
            tail.append(token)
        return Draft(found)

    def _next(self, context: dict[tuple[int, ...], Counts], tail: list[int]) -> int | None:
        static = self._static(tuple(tail[-N_STATIC:])) or {}
        for find, floor in ((context.get, LAX), (self._dynamic, STRICT)):
            token = most_likely(find, tail, static, floor)
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
