"""The drafters that look tokens up, by name."""

from __future__ import annotations

from engine.draft.drafter import Drafter
from engine.draft.ngram_cache import NgramCache
from engine.draft.ngram_cache_file import read_lookup_cache
from engine.draft.ngram_map import NgramMap
from engine.draft.ngram_mod import NgramMod
from engine.draft.ngram_simple import NgramSimple
from engine.options import SpecOptions


def make_ngram_drafter(name: str, options: SpecOptions, n_vocab: int) -> Drafter:
    """One drafter. Raises LookupCacheError for a file of ngram-cache."""
    if name == "ngram-simple":
        return NgramSimple(options.ngram_simple)
    if name == "ngram-map-k":
        return NgramMap(options.ngram_map_k, with_values=False)
    if name == "ngram-map-k4v":
        return NgramMap(options.ngram_map_k4v, with_values=True)
    if name == "ngram-mod":
        return NgramMod(options.ngram_mod)
    static, dynamic = (
        read_lookup_cache(path, n_vocab) if path else None
        for path in (options.lookup_cache_static, options.lookup_cache_dynamic)
    )
    return NgramCache(static, dynamic)
